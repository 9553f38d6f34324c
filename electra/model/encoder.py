"""The encoder: embeddings, then Transformer layers. Text goes in, one vector per token comes out.

The classic style is BERT's and ELECTRA's to the last bit: the sum of three embeddings, normalised, projected where the
embedding width differs from the hidden width; post-norm layers; exact (erf) GELU. `transformers` calls it ElectraModel.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from electra.errors import ConfigError
from electra.model.attention import Reach, attend, has_document_kernel, reach_of


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The size of one encoder. The defaults are ELECTRA-Small's discriminator."""

    layers: int = 12
    width: int = 256
    """Hidden size."""
    heads: int = 4
    """Attention heads; they divide the width among them."""
    feedforward: int = 1024
    """Width of the feed-forward layers."""
    embedding_width: int = 128
    """Width of the embedding tables; projected to the hidden size where it differs."""
    vocabulary: int = 30522
    """Entries of the token table."""
    positions: int = 512
    """The longest row, in tokens."""
    segments: int = 2
    """Entries of the segment table: A and B."""
    pad_id: int = 0
    """The token id of padding; its embedding is not trained by the input."""
    dropout: float = 0.1
    """Dropout of embeddings and of each layer's two outputs."""
    attention_dropout: float = 0.1
    """Dropout of attention weights."""
    norm_epsilon: float = 1e-12
    initial_std: float = 0.02
    """Spread of the first weights: a truncated normal of this standard deviation."""

    def __post_init__(self) -> None:
        self.check_numbers()
        if self.width % self.heads:
            raise ConfigError(
                f"width {self.width} does not divide into {self.heads} heads; "
                f"try width {max(1, self.width // self.heads) * self.heads} or another number of heads"
            )
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0 and less than 1")
        if not 0 < self.initial_std < 1:
            raise ConfigError(f"initial_std is {self.initial_std}; it must lie between 0 and 1, usually 0.02")
        if not 0 < self.norm_epsilon < 1:
            raise ConfigError(f"norm_epsilon is {self.norm_epsilon}; it must lie between 0 and 1, usually 1e-12")
        if not 0 <= self.pad_id < self.vocabulary:
            raise ConfigError(f"pad_id {self.pad_id} is not in the vocabulary of {self.vocabulary:,} entries")

    def check_numbers(self) -> None:
        """Refuse what is no number (settings also come from files), and counts below 1."""
        for field in fields(self):
            value, is_count = getattr(self, field.name), field.type is int
            if type(value) is not int and (is_count or type(value) is not float):
                raise ConfigError(f"{field.name} is {value!r}; it must be a {'whole ' if is_count else ''}number")
            if is_count and value < 1 and field.name != "pad_id":
                raise ConfigError(f"{field.name} is {value}; it must be at least 1")


class Embeddings(nn.Module):
    """What a token is (token table), where it stands (position table), which segment it is in (segment table)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.embedding_width, padding_idx=config.pad_id)
        self.position = nn.Embedding(config.positions, config.embedding_width)
        self.segment = nn.Embedding(config.segments, config.embedding_width)
        self.norm = nn.LayerNorm(config.embedding_width, config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, segment_ids: Tensor) -> Tensor:
        return self.dropout(self.norm(self.summed(input_ids, segment_ids)))  # [B, L, E]

    def summed(self, input_ids: Tensor, segment_ids: Tensor) -> Tensor:
        """The three embeddings of each token, added in the order that `transformers` adds them."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.token(input_ids) + self.segment(segment_ids) + self.position(positions)

    def token_table(self) -> Tensor:
        """What each token of the vocabulary is [V, E]: the output table of a model that predicts tokens."""
        return self.token.weight


class DisentangledEmbeddings(Embeddings):
    """Tables that add to another model's without moving them: E = stopgrad(E_base) + E_Δ, E_Δ zero at first.

    So two tasks do not pull one table two ways (DeBERTa-v3). Its own token, position and segment tables are the
    differences. The LayerNorm is its own too: sharing that would let its gradient into the other model.
    """

    def __init__(self, base: Embeddings, config: EncoderConfig) -> None:
        super().__init__(config)
        self.base = base
        for table in (self.token, self.position, self.segment):
            nn.init.zeros_(table.weight)

    def summed(self, input_ids: Tensor, segment_ids: Tensor) -> Tensor:
        with torch.no_grad():
            base = self.base.summed(input_ids, segment_ids)
        return base + super().summed(input_ids, segment_ids)

    def token_table(self) -> Tensor:
        return self.base.token_table().detach() + self.token.weight


class Attention(nn.Module):
    """Every token looks at the tokens within its reach."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor, reach: Reach) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).unbind(2)  # each [B, L, H, K]
        mixed = attend(query, key, value, reach, self.dropout if self.training else 0.0)
        return self.output(mixed.flatten(2))  # [B, L, D]


class FeedForward(nn.Module):
    """Each token by itself: widen, GELU, narrow."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.widen = nn.Linear(config.width, config.feedforward)
        self.narrow = nn.Linear(config.feedforward, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.narrow(functional.gelu(self.widen(hidden)))


class ClassicLayer(nn.Module):
    """A post-norm Transformer layer: what is added is normalised with what it is added to."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.LayerNorm(config.width, config.norm_epsilon)
        self.feedforward = FeedForward(config)
        self.feedforward_norm = nn.LayerNorm(config.width, config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, reach: Reach) -> Tensor:
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, reach)))
        return self.feedforward_norm(hidden + self.dropout(self.feedforward(hidden)))


class Encoder(nn.Module):
    """Token ids [B, L] to hidden states [B, L, D]."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.project = project_of(config)
        self.layers = nn.ModuleList(ClassicLayer(config) for _ in range(config.layers))
        self.recomputes_layers = False  # gradient checkpointing: less memory, a third more work
        initialize(self, config.initial_std)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """`attention_mask` is False at padding, `segment_ids` 1 in segment B; tokens see only their own of `documents`.

        Leave out what all rows have alike: no padding, segment A, one document a row.
        """
        check_length(input_ids.shape[1], self.config)
        segment_ids = torch.zeros_like(input_ids) if segment_ids is None else segment_ids
        hidden = self.project(self.embeddings(input_ids, segment_ids))  # [B, L, D]
        reach = reach_of(attention_mask, documents, has_kernel=self.has_document_kernel())
        for layer in self.layers:
            if self.recomputes_layers and self.training:
                hidden = checkpoint(layer, hidden, reach, use_reentrant=False)
            else:
                hidden = layer(hidden, reach)
        return hidden

    def has_document_kernel(self) -> bool:
        """Whether this device attends document by document without a mask."""
        return has_document_kernel(
            next(self.layers.parameters()), self.config.attention_dropout if self.training else 0
        )


def project_of(config: EncoderConfig) -> nn.Module:
    """The way from the embedding width to the hidden width; nothing where they are equal."""
    is_needed = config.embedding_width != config.width
    return nn.Linear(config.embedding_width, config.width) if is_needed else nn.Identity()


def check_length(length: int, config: EncoderConfig) -> None:
    """Refuse rows that the position table does not reach."""
    if length > config.positions:
        raise ConfigError(
            f"a row of {length} tokens is longer than the model's {config.positions} positions; "
            f"shorten rows to {config.positions} or build the model with --positions {length}"
        )


def initialize(module: nn.Module, std: float) -> None:
    """Weights as released: truncated normal, Glorot uniform for the projection of embeddings, zero biases."""
    for name, parameter in module.named_parameters():
        if name == "project.weight":
            nn.init.xavier_uniform_(parameter)
        elif parameter.dim() == 2:
            nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
