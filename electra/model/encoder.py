"""The encoder: embeddings, then Transformer layers. Text goes in, one vector per token comes out.

The classic style is BERT's and ELECTRA's to the last bit: the sum of three embeddings, normalised, projected where the
embedding width differs from the hidden width; post-norm layers; exact (erf) GELU. `transformers` calls it ElectraModel.

The modern style is ModernBERT's: token embeddings, projected where widths differ, then normalised; pre-norm layers with
rotary positions and gated feed-forward; no biases. Where embeddings are not narrower, `transformers` calls it
ModernBertModel; where they are, table and projection multiply out to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from electra.kernels.dispatch import HAS_TRITON, is_for_kernels, precision_at
from electra.model.activation import gated_gelu_of, plain_gelu_of
from electra.model.attention import AttentionBias, Kernel, attend, attention_bias_of, kernel_for, turns_of, within
from electra.model.config import EncoderConfig, check_length

if HAS_TRITON:
    from electra.kernels import fused_layers as classic_layer
    from electra.kernels import gather as chosen_rows
    from electra.kernels import modern_layer


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
        self.token = nn.Embedding(config.vocab_size, config.embedding_width, padding_idx=config.pad_id)
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

    def forward(self, hidden: Tensor, reach: AttentionBias, at: Tensor | None = None) -> Tensor:
        return self.output(chosen(self.mix(hidden, reach), at))  # [B, L or M, D]

    def mix(self, hidden: Tensor, reach: AttentionBias) -> Tensor:
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
        return self.narrow(plain_gelu_of(self.widen, hidden))


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

    It makes hidden states of all tokens, or of those `at` some positions [B, M] only.
    In half precision on a GPU it is one operation, and the modules inside are not called (so hooks on them are not)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = norm(config, config.width)
        self.feedforward = FeedForward(config)
        self.feedforward_norm = norm(config, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, reach: AttentionBias, at: Tensor | None = None) -> Tensor:
        if is_for_kernels(hidden) and reach.kernel != "mask":
            return self.at_once(hidden, reach, at)
        hidden = self.attention_norm(chosen(hidden, at) + self.dropout(self.attention(hidden, reach, at)))
        return self.feedforward_norm(hidden + self.dropout(self.feedforward(hidden)))

    def at_once(self, hidden: Tensor, reach: AttentionBias, at: Tensor | None = None) -> Tensor:
        """The same as one operation."""
        precision, is_short = precision_at(hidden), reach.kernel == "short rows"
        rates = (self.attention.dropout, self.dropout.p) if self.training else (0.0, 0.0)
        seen = reach.documents if is_short else reach.starts
        given = hidden.to(precision), parameters_in(self, precision), seen, at, self.attention.heads, is_short
        return classic_layer.layer_at_once(*given, *rates, self.attention_norm.eps)


def chosen(hidden: Tensor, at: Tensor | None) -> Tensor:
    """The hidden states [B, M, D] at positions `at` [B, M] of those [B, L, D]; all of them without."""
    return hidden if at is None else hidden.gather(1, at[:, :, None].expand(-1, -1, hidden.shape[2]))


def parameters_in(layer: nn.Module, precision: torch.dtype) -> list[Tensor]:
    """A layer's parameters, those of products in the precision of these."""
    return [each if "norm" in name else each.to(precision) for name, each in layer.named_parameters()]


class ModernLayer(nn.Module):
    """A pre-norm Transformer layer: what is added comes of the normalised, and the sum stays as it is.

    In half precision on a GPU it, too, may be one operation (`at_once`): then neither it nor what is in it is called.
    """

    def __init__(self, config: EncoderConfig, is_first: bool) -> None:
        super().__init__()
        self.attention_norm = nn.Identity() if is_first else norm(config, config.width)  # embeddings come normalised
        self.attention = Attention(config)
        self.feedforward_norm = norm(config, config.width)
        self.feedforward = GatedFeedForward(config)
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(self, hidden: Tensor, reach: AttentionBias, at: Tensor | None = None) -> Tensor:
        hidden = chosen(hidden, at) + self.dropout(self.attention(self.attention_norm(hidden), reach, at))
        return hidden + self.feedforward(self.feedforward_norm(hidden))

    def at_once(
        self,
        total: Tensor,
        added: Tensor | None,
        reach: AttentionBias,
        precision: torch.dtype,
        at: Tensor | None = None,
    ) -> list[Tensor]:
        """The same as one operation, from a sum [B, L, D] and what the layer before adds to it, as these two again."""
        assert reach.turns is not None
        flat = total.flatten(0, 1).contiguous(), None if added is None else added.flatten(0, 1)
        seen = reach.documents, reach.turns.squeeze(2), chosen_rows.flat_places(at, total)
        numbers = len(total), self.attention.heads, reach.window, self.feedforward_norm.eps
        found = modern_layer.modern_layer(*flat, parameters_in(self, precision), *seen, *numbers)
        return [each.unflatten(0, (len(total), -1)) for each in found[:2]]

    def is_dropping(self) -> bool:
        """Whether anything is dropped in it."""
        return self.training and max(self.dropout.p, self.attention.dropout, self.feedforward.dropout.p) > 0


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
        self.activation_checkpointing = False  # gradient checkpointing: less memory, a third more work
        initialize(self, config.init_std)
        if config.is_modern():
            calm(self.layers)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        positions: Tensor | None = None,
    ) -> Tensor:
        """`attention_mask` is False at padding, which stands at one end of a row, `segment_ids` 1 in segment B; tokens
        see only their own of `document_ids`.

        Leave out what all rows have alike: no padding, segment A, one document a row. `cu_seqlens` are the boundaries
        of documents (`compute_cu_seqlens`), without which long rows need a mask in a compiled graph. Where only the states `at`
        some positions [B, M] are wanted, [B, M, D], the last layer makes no others.
        """
        check_length(input_ids.shape[1], self.config)
        hidden = self.entry(self.project(self.embeddings(input_ids, segment_ids)))  # [B, L, D]
        reaches = self.reaches(input_ids, attention_mask, document_ids, cu_seqlens)
        through = self.through_at_once if self.goes_at_once(hidden, reaches) else self.through_layers
        return self.final_norm(through(hidden, reaches, positions))

    def through_layers(self, hidden: Tensor, reaches: dict[bool, AttentionBias], at: Tensor | None) -> Tensor:
        """What the layers make of hidden states."""
        for number, layer in enumerate(self.layers):
            hidden = self.call_layer(layer, hidden, reaches[self.config.is_global(number)], self.wanted(number, at))
        return hidden

    def wanted(self, number: int, at: Tensor | None) -> Tensor | None:
        """The positions whose states layer `number` makes: those `at` in the last one, all in the others."""
        return at if number == len(self.layers) - 1 else None

    def goes_at_once(self, hidden: Tensor, reaches: dict[bool, AttentionBias]) -> bool:
        """Whether modern layers are one operation each: on a GPU in half precision, in short rows, without dropout."""
        is_short = all(reach.kernel == "short rows" for reach in reaches.values())
        is_modern = all(isinstance(layer, ModernLayer) and not layer.is_dropping() for layer in self.layers)
        return is_modern and is_short and is_for_kernels(hidden)

    def through_at_once(self, hidden: Tensor, reaches: dict[bool, AttentionBias], at: Tensor | None) -> Tensor:
        """The same of modern layers that are one operation each; their sum is in fp32."""
        total, precision = hidden.float(), precision_at(hidden)
        added: Tensor | None = None
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, ModernLayer)
            reach = reaches[self.config.is_global(number)]
            given = total, added, reach, precision, self.wanted(number, at)
            total, added = self.call_layer(layer.at_once, *given)
        return (total if added is None else total + added).to(hidden.dtype)

    def call_layer(self, layer: Callable[..., Any], *given: Any) -> Any:
        """What a layer gives; in training perhaps so that it is made again in the backward pass."""
        is_made_again = self.activation_checkpointing and self.training
        return checkpoint(layer, *given, use_reentrant=False) if is_made_again else layer(*given)

    def reaches(self, input_ids: Tensor, *surroundings: Tensor | None) -> dict[bool, AttentionBias]:
        """How far tokens see in layers that are global (True) and in those that are not."""
        config, length, device = self.config, input_ids.shape[1], input_ids.device
        attention_mask, documents, starts = surroundings
        kernel = self.kernel(length, is_listed=documents is None or starts is not None)
        reach = attention_bias_of(attention_mask, documents, starts, kernel=kernel)
        if not config.is_modern():
            return {True: reach}
        width = config.width // config.heads
        reaches = {True: replace(reach, turns=turns_of(length, width, config.global_theta, device))}
        if config.global_attention_every > 1:
            near = within(reach, config.local_attention // 2, length, device)
            reaches[False] = replace(near, turns=turns_of(length, width, config.local_theta, device))
        return reaches

    def tied_projection(self) -> Tensor | None:
        """The projection [D, E] as part of a tied output table: the modern style's, where it has one."""
        return getattr(self.project, "weight", None) if self.config.is_modern() else None

    def kernel(self, length: int, is_listed: bool = False) -> Kernel:
        """How this device attends in rows of `length` tokens; `is_listed` if their documents are, or there are none."""
        config, weight = self.config, next(self.layers.parameters())
        return kernel_for(weight, length, config.width // config.heads, is_listed)


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
