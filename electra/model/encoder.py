"""The encoder: embeddings, then Transformer layers. Text goes in, one vector per token comes out.

The classic style is BERT's and ELECTRA's to the last bit: the sum of three embeddings, normalised, projected where the
embedding width differs from the hidden width; post-norm layers; exact (erf) GELU. `transformers` calls it ElectraModel.

The modern style is ModernBERT's: token embeddings, projected where widths differ, then normalised; pre-norm layers with
rotary positions and gated feed-forward; no biases. Where embeddings are not narrower, `transformers` calls it
ModernBertModel; where they are, table and projection multiply out to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from electra.errors import ConfigError
from electra.model.activation import gated_gelu_of
from electra.model.attention import Kernel, Reach, attend, kernel_for, reach_of, turns_of, within
from electra.model.kernels import HAS_TRITON, is_for_kernels, precision_at

if HAS_TRITON:
    from electra.model.gpu import classic_layer, modern_layer

Style = Literal["classic", "modern"]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The size and style of one encoder. The defaults are ELECTRA-Small's discriminator."""

    style: Style = "classic"
    """classic: BERT's and ELECTRA's encoder; modern: ModernBERT's."""
    layers: int = 12
    width: int = 256
    """Hidden size."""
    heads: int = 4
    """Attention heads; they divide the width among them."""
    feedforward: int = 1024
    """Width of the feed-forward layers; modern ones have a gate of this width beside it."""
    embedding_width: int = 128
    """Width of the embedding tables; projected to the hidden size where it differs."""
    vocabulary: int = 30522
    """Entries of the token table."""
    positions: int = 512
    """The longest row, in tokens."""
    segments: int = 2
    """Entries of the segment table: A and B. The modern style has none, and reads segments alike."""
    pad_id: int = 0
    """The token id of padding; its embedding is not trained by the input."""
    dropout: float = 0.1
    """Dropout of embeddings and of each layer's two outputs; modern layers drop inside the feed-forward instead."""
    attention_dropout: float = 0.1
    """Dropout of attention weights; in the modern style also of what attention gives out."""
    norm_epsilon: float = 1e-12
    initial_std: float = 0.02
    """Spread of the first weights: a truncated normal of this standard deviation."""
    global_every: int = 1
    """Modern: one layer in so many, from the first, sees the whole row; the others see a window."""
    local_attention: int = 128
    """Modern: the window of the other layers; half of it lies to either side."""
    global_theta: float = 160_000.0
    """Modern: how slow the slowest rotary position turns, where the whole row is seen."""
    local_theta: float = 10_000.0
    """Modern: the same, where a window is seen."""

    def __post_init__(self) -> None:
        self.check_numbers()
        self.check_style()
        self.check_turns()
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
            value, is_count = getattr(self, field.name), field.type == "int"
            if field.name == "style":
                continue
            if type(value) is not int and (is_count or type(value) is not float):
                raise ConfigError(f"{field.name} is {value!r}; it must be a {'whole ' if is_count else ''}number")
            if is_count and value < 1 and field.name != "pad_id":
                raise ConfigError(f"{field.name} is {value}; it must be at least 1")

    def check_style(self) -> None:
        """Refuse styles that are not there, and what the chosen one cannot have."""
        if self.style not in get_args(Style):
            raise ConfigError(f"there is no style {self.style!r}; choose from {', '.join(get_args(Style))}")
        for name, usual in MODERN_SETTINGS.items():
            if self.style == "classic" and getattr(self, name) != usual:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, and the classic style has none; choose --style modern"
                )

    def check_turns(self) -> None:
        """Refuse what rotary positions cannot be."""
        if self.style == "modern" and self.width % (2 * self.heads) and not self.width % self.heads:
            raise ConfigError(
                f"{self.heads} heads of width {self.width // self.heads} cannot turn by position, which takes an even "
                f"width; choose another width or number of heads"
            )
        for name in ("global_theta", "local_theta"):
            if getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 1, usually 10000 or more")

    def is_modern(self) -> bool:
        """Whether the style is modern: pre-norm, rotary positions, gates, and no biases."""
        return self.style == "modern"

    def is_global(self, layer: int) -> bool:
        """Whether a layer sees the whole row."""
        return layer % self.global_every == 0

    @classmethod
    def from_dict(cls, settings: Any) -> EncoderConfig:
        """The inverse of `dataclasses.asdict`; what was stored before there were styles is classic."""
        if isinstance(settings, dict) and not settings.keys() & {"style", *MODERN_SETTINGS}:
            settings = {"style": "classic"} | settings | MODERN_SETTINGS
        check_fields(settings, cls)
        return cls(**settings)


MODERN_SETTINGS = {
    field.name: field.default
    for field in fields(EncoderConfig)
    if field.name in ("global_every", "local_attention", "global_theta", "local_theta")
}


def check_fields(settings: Any, kind: type) -> None:
    """Refuse stored settings that are not just the fields of `kind`: a default in their place would be a guess."""
    if not isinstance(settings, dict):
        raise ConfigError(f"these are not the settings of a model: {settings!r}")
    wanted = {field.name for field in fields(kind)}
    if settings.keys() != wanted:
        differing = ", ".join(sorted(map(repr, settings.keys() ^ wanted)))
        raise ConfigError(f"{differing} is missing or unknown; the settings are {', '.join(sorted(wanted))}")


class Norm(nn.LayerNorm):
    """LayerNorm, worked out in fp32; what it gives out is ready for the products that follow.

    Under autocast it would leave in fp32, and every layer would move twice the bytes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).to(precision_at(hidden))


class TokenEmbeddings(nn.Module):
    """What a token is (token table); the modern style needs no more: positions turn, and segments are read alike.

    A `base`, if there is one, is added to and not moved: E = stopgrad(E_base) + E_Δ.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.embedding_width, padding_idx=config.pad_id)
        self.base: TokenEmbeddings | None = None

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        return self.summed(input_ids, segment_ids)  # [B, L, E]

    def summed(self, input_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        """The embeddings of each token, added up, and to the base's."""
        own = self.looked_up(input_ids, segment_ids)
        if self.base is None:
            return own
        with torch.no_grad():
            base = self.base.summed(input_ids, segment_ids)
        return base + own

    def token_table(self) -> Tensor:
        """What each token of the vocabulary is [V, E]: the output table of a model that predicts tokens."""
        return self.token.weight if self.base is None else self.base.token_table().detach() + self.token.weight

    def looked_up(self, input_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        """The sum of what the own tables have."""
        return self.token(input_ids)

    def tables(self) -> Iterator[nn.Embedding]:
        """The own tables."""
        return (module for module in self.children() if isinstance(module, nn.Embedding))


class Embeddings(TokenEmbeddings):
    """What a token is (token table), where it stands (position table), which segment it is in (segment table)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.position = nn.Embedding(config.positions, config.embedding_width)
        self.segment = nn.Embedding(config.segments, config.embedding_width)
        self.norm = Norm(config.embedding_width, config.norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        return self.dropout(self.norm(self.summed(input_ids, segment_ids)))  # [B, L, E]

    def looked_up(self, input_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        """The three embeddings of each token, added in the order that `transformers` adds them."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        segment = self.segment.weight[0] if segment_ids is None else self.segment(segment_ids)
        return self.token(input_ids) + segment + self.position(positions)


def disentangled(base: TokenEmbeddings, config: EncoderConfig) -> TokenEmbeddings:
    """Embeddings that add to another model's without moving them: E = stopgrad(E_base) + E_Δ, E_Δ zero at first.

    So two tasks do not pull one table two ways (DeBERTa-v3). The own tables are the differences. A LayerNorm is the
    own too: sharing that would let its gradient into the other model.
    """
    embeddings = type(base)(config)
    for table in embeddings.tables():
        nn.init.zeros_(table.weight)
    embeddings.base = base
    return embeddings


class Attention(nn.Module):
    """Every token looks at the tokens within its reach."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.qkv = linear(config, config.width, 3 * config.width)
        self.output = linear(config, config.width, config.width)

    def forward(self, hidden: Tensor, reach: Reach) -> Tensor:
        return self.output(self.mix(hidden, reach))  # [B, L, D]

    def mix(self, hidden: Tensor, reach: Reach) -> Tensor:
        """What each token takes from those it looks at: [B, L, D]."""
        qkv = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))  # [B, L, 3, H, K]
        return attend(qkv, reach, self.dropout if self.training else 0.0).flatten(2)


class FeedForward(nn.Module):
    """Each token by itself: widen, GELU, narrow."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.widen = nn.Linear(config.width, config.feedforward)
        self.narrow = nn.Linear(config.feedforward, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.narrow(functional.gelu(self.widen(hidden)))


class GatedFeedForward(nn.Module):
    """Each token by itself: widen twice, GELU of one times the other, narrow (GeGLU)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.widen = linear(config, config.width, 2 * config.feedforward)
        self.narrow = linear(config, config.feedforward, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.narrow(self.dropout(gated_gelu_of(self.widen(hidden))))


class ClassicLayer(nn.Module):
    """A post-norm Transformer layer: what is added is normalised with what it is added to.

    In half precision on a GPU it is one operation, and the modules inside are not called (so hooks on them are not)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = norm(config, config.width)
        self.feedforward = FeedForward(config)
        self.feedforward_norm = norm(config, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, reach: Reach) -> Tensor:
        if is_for_kernels(hidden) and reach.mask is None:
            return self.at_once(hidden, reach)
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, reach)))
        return self.feedforward_norm(hidden + self.dropout(self.feedforward(hidden)))

    def at_once(self, hidden: Tensor, reach: Reach) -> Tensor:
        """The same as one operation."""
        precision, is_short = precision_at(hidden), reach.kernel == "short rows"
        named = self.named_parameters()  # those of products in the precision of these
        parameters = [each if "norm" in name else each.to(precision) for name, each in named]
        rates = (self.attention.dropout, self.dropout.p) if self.training else (0.0, 0.0)
        seen = reach.documents if is_short else reach.starts
        given = hidden.to(precision), parameters, seen, self.attention.heads, is_short
        return classic_layer.layer_at_once(*given, *rates, self.attention_norm.eps)


class ModernLayer(nn.Module):
    """A pre-norm Transformer layer: what is added comes of the normalised, and the sum stays as it is."""

    def __init__(self, config: EncoderConfig, is_first: bool) -> None:
        super().__init__()
        self.attention_norm = nn.Identity() if is_first else norm(config, config.width)  # embeddings come normalised
        self.attention = Attention(config)
        self.feedforward_norm = norm(config, config.width)
        self.feedforward = GatedFeedForward(config)
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(self, hidden: Tensor, reach: Reach) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), reach))
        return hidden + self.feedforward(self.feedforward_norm(hidden))

    def at_once(self, total: Tensor, added: Tensor | None, reach: Reach, precision: torch.dtype) -> list[Tensor]:
        """The same as one operation, from a sum [B, L, D] and what the layer before adds to it, as these two again."""
        named = self.named_parameters()  # those of products in their precision
        parameters = [each if "norm" in name else each.to(precision) for name, each in named]
        assert reach.turns is not None
        flat = total.flatten(0, 1).contiguous(), None if added is None else added.flatten(0, 1)
        shape = len(total), self.attention.heads, reach.window, self.feedforward_norm.eps
        found = modern_layer.modern_layer(*flat, parameters, reach.documents, reach.turns.squeeze(2), *shape)
        return [each.view_as(total) for each in found[:2]]


class Entry(nn.Module):
    """The way into modern layers: embeddings are normalised once they are as wide as hidden states."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, config.norm_epsilon, bias=False)  # sums of many layers stay in fp32
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.norm(hidden))


class Encoder(nn.Module):
    """Token ids [B, L] to hidden states [B, L, D]."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = TokenEmbeddings(config) if config.is_modern() else Embeddings(config)
        self.project = project_of(config)
        self.entry = Entry(config) if config.is_modern() else nn.Identity()
        self.layers = nn.ModuleList(layer_of(config, number) for number in range(config.layers))
        self.final_norm = norm(config, config.width) if config.is_modern() else nn.Identity()
        self.recomputes_layers = False  # gradient checkpointing: less memory, a third more work
        self.most_documents: int | None = None  # in a row, where that is known: compiled steps need no mask then
        initialize(self, config.initial_std)
        if config.is_modern():
            calm(self.layers)

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
        hidden = self.entry(self.project(self.embeddings(input_ids, segment_ids)))  # [B, L, D]
        reaches = self.reaches(input_ids, attention_mask, documents)
        through = self.through_at_once if self.goes_at_once(hidden, reaches) else self.through_layers
        return self.final_norm(through(hidden, reaches))

    def through_layers(self, hidden: Tensor, reaches: dict[bool, Reach]) -> Tensor:
        """What the layers make of hidden states."""
        for number, layer in enumerate(self.layers):
            hidden = self.call(layer, hidden, reaches[self.config.is_global(number)])
        return hidden

    def goes_at_once(self, hidden: Tensor, reaches: dict[bool, Reach]) -> bool:
        """Whether modern layers are one operation each: on a GPU in half precision, in short rows, without dropout."""
        config = self.config
        is_dropping = self.training and max(config.dropout, config.attention_dropout) > 0
        is_short = all(reach.kernel == "short rows" for reach in reaches.values())
        return config.is_modern() and is_for_kernels(hidden) and is_short and not is_dropping

    def through_at_once(self, hidden: Tensor, reaches: dict[bool, Reach]) -> Tensor:
        """The same of modern layers that are one operation each; their sum is in fp32."""
        total, precision = hidden.float(), precision_at(hidden)
        added: Tensor | None = None
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, ModernLayer)
            total, added = self.call(layer.at_once, total, added, reaches[self.config.is_global(number)], precision)
        return (total if added is None else total + added).to(hidden.dtype)

    def call(self, layer: Callable[..., Any], *given: Any) -> Any:
        """What a layer gives; in training perhaps so that it is made again in the backward pass."""
        is_made_again = self.recomputes_layers and self.training
        return checkpoint(layer, *given, use_reentrant=False) if is_made_again else layer(*given)

    def reaches(self, input_ids: Tensor, attention_mask: Tensor | None, documents: Tensor | None) -> dict[bool, Reach]:
        """How far tokens see in layers that are global (True) and in those that are not."""
        config, length, device = self.config, input_ids.shape[1], input_ids.device
        kernel, most = self.kernel(length, is_bounded=documents is None), self.most_documents
        reach = reach_of(attention_mask, documents, kernel=kernel, most_documents=most)
        if not config.is_modern():
            return {True: reach}
        width = config.width // config.heads
        reaches = {True: replace(reach, turns=turns_of(length, width, config.global_theta, device))}
        if config.global_every > 1:
            near = within(reach, config.local_attention // 2, length, device)
            reaches[False] = replace(near, turns=turns_of(length, width, config.local_theta, device))
        return reaches

    def tied_projection(self) -> Tensor | None:
        """The projection [D, E] as part of a tied output table: the modern style's, where it has one."""
        return getattr(self.project, "weight", None) if self.config.is_modern() else None

    def kernel(self, length: int, is_bounded: bool = False) -> Kernel:
        """How this device attends in rows of `length` tokens; `is_bounded` if they are known to have few documents."""
        config, weight = self.config, next(self.layers.parameters())
        is_bounded = is_bounded or self.most_documents is not None
        return kernel_for(weight, length, config.width // config.heads, is_bounded)


def project_of(config: EncoderConfig) -> nn.Module:
    """The way from the embedding width to the hidden width; nothing where they are equal."""
    is_needed = config.embedding_width != config.width
    return linear(config, config.embedding_width, config.width) if is_needed else nn.Identity()


def layer_of(config: EncoderConfig, number: int) -> nn.Module:
    """A layer in the style of the encoder."""
    return ModernLayer(config, is_first=number == 0) if config.is_modern() else ClassicLayer(config)


def linear(config: EncoderConfig, inputs: int, outputs: int) -> nn.Linear:
    """A linear layer, in the modern style without bias."""
    return nn.Linear(inputs, outputs, bias=not config.is_modern())


def norm(config: EncoderConfig, width: int) -> Norm:
    """A LayerNorm, in the modern style without bias."""
    return Norm(width, config.norm_epsilon, bias=not config.is_modern())


def check_length(length: int, config: EncoderConfig) -> None:
    """Refuse rows that the position table does not reach."""
    if length > config.positions:
        raise ConfigError(
            f"a row of {length} tokens is longer than the model's {config.positions} positions; "
            f"shorten rows to {config.positions} (--length), or pre-train a model with --positions {length}"
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


def calm(layers: nn.ModuleList) -> None:
    """Start what pre-norm layers add to the sum smaller, the more of them there are (as ModernBERT and GPT-2 do)."""
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if name.endswith(("attention.output.weight", "feedforward.narrow.weight")):
                parameter.div_((2 * len(layers)) ** 0.5)
