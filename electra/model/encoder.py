"""The encoder: embeddings, then Transformer layers; token ids to one hidden state per token.

The classic style equals BERT and ELECTRA (`transformers`' ElectraModel): token, position and segment embeddings, summed
and normalised, projected where the embedding width differs from the hidden width; post-norm layers; exact (erf) GELU.

The modern style is ModernBERT's: token embeddings, projected where widths differ, then normalised; pre-norm layers with
rotary positions and GeGLU; no biases. With a projection, `transformers`' ModernBertModel has table and projection
multiplied into one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from electra.data.loader import compute_cu_seqlens
from electra.kernels import dispatch, reference
from electra.kernels.dispatch import AttentionBackend, AttentionBias
from electra.kernels.reference import gather_positions
from electra.model.config import EncoderConfig


class Fp32LayerNorm(nn.LayerNorm):
    """LayerNorm in fp32 whose output has the dtype of the matrix products that follow.

    Under autocast it would be fp32, and every layer would move twice the bytes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).to(dispatch.matmul_dtype(hidden))


def create_norm(config: EncoderConfig, width: int) -> Fp32LayerNorm:
    """A LayerNorm, in the modern style without bias."""
    return Fp32LayerNorm(width, config.norm_epsilon, bias=not config.is_modern())


def create_linear(config: EncoderConfig, inputs: int, outputs: int) -> nn.Linear:
    """A linear layer, in the modern style without bias."""
    return nn.Linear(inputs, outputs, bias=not config.is_modern())


class TokenEmbeddings(nn.Module):
    """Token embeddings; the modern style has no others, since positions are rotary and segments are ignored.

    With a `base` (disentangled sharing) the tables are differences to its tables: E = stopgrad(E_base) + E_Δ."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.embedding_width, padding_idx=config.pad_id)
        self.base: TokenEmbeddings | None = None

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        return self.embed_with_base(input_ids, segment_ids)  # [B, L, E]

    def embed_with_base(self, input_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        """The sum of all embeddings, including the base's, before the norm."""
        embedded = self.embed_without_base(input_ids, segment_ids)
        if self.base is None:
            return embedded
        with torch.no_grad():
            base = self.base.embed_with_base(input_ids, segment_ids)
        return base + embedded

    def embed_without_base(self, input_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        """The sum of this module's embeddings."""
        return self.token(input_ids)

    def token_table(self) -> Tensor:
        """The token embeddings [V, E], which are also the output table of a masked language model."""
        return self.token.weight if self.base is None else self.base.token_table().detach() + self.token.weight

    def embedding_tables(self) -> Iterator[nn.Embedding]:
        """The embedding tables of this module."""
        return (module for module in self.children() if isinstance(module, nn.Embedding))


class ClassicEmbeddings(TokenEmbeddings):
    """Token, position and segment embeddings with LayerNorm (classic style)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.position = nn.Embedding(config.positions, config.embedding_width)
        self.segment = nn.Embedding(config.segments, config.embedding_width)
        self.norm = Fp32LayerNorm(config.embedding_width, config.norm_epsilon)

    def forward(self, input_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        return self.norm(self.embed_with_base(input_ids, segment_ids))  # [B, L, E]

    def embed_without_base(self, input_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        """The sum in the order of `transformers`, for equal rounding."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        segment = self.segment.weight[0] if segment_ids is None else self.segment(segment_ids)
        return self.token(input_ids) + segment + self.position(positions)


def create_disentangled_embeddings(base: TokenEmbeddings, config: EncoderConfig) -> TokenEmbeddings:
    """Embeddings that add a difference, zero at first, to another model's: E = stopgrad(E_base) + E_Δ (DeBERTa-v3).

    The base gets no gradient from this model's loss. For the same reason the LayerNorm is not shared."""
    embeddings = type(base)(config)
    for table in embeddings.embedding_tables():
        nn.init.zeros_(table.weight)
    embeddings.base = base
    return embeddings


class ModernEmbeddingNorm(nn.Module):
    """LayerNorm and dropout of the projected embeddings (modern style); its output stays in fp32."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, config.norm_epsilon, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.norm(hidden))


def make_attention_bias(
    attention_mask: Tensor | None,
    document_ids: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    backend: AttentionBackend,
) -> AttentionBias:
    """The bias of rows with padding at one end (`attention_mask` False), several documents, both or neither.

    `cu_seqlens` are the documents' boundaries, if they are already computed (`electra.data.loader`)."""
    if document_ids is None and attention_mask is None:
        return AttentionBias(backend)
    if document_ids is None and backend == "sdpa":
        assert attention_mask is not None
        return AttentionBias(mask=attention_mask.bool()[:, None, None, :])
    if attention_mask is not None:  # padding becomes another document
        ids = torch.zeros_like(attention_mask, dtype=torch.int32) if document_ids is None else document_ids
        count = len(ids) if document_ids is None else None if cu_seqlens is None else len(cu_seqlens) - 1
        max_documents = None if count is None else count + len(ids)
        document_ids = ids.masked_fill(~attention_mask.bool(), -1)
        cu_seqlens = compute_cu_seqlens(document_ids, max_documents) if backend == "varlen" else None
    assert document_ids is not None
    if backend == "short":
        return AttentionBias(backend, document_ids=document_ids.int().contiguous())  # the kernel assumes this layout
    if backend == "varlen":
        return AttentionBias(backend, cu_seqlens=compute_cu_seqlens(document_ids) if cu_seqlens is None else cu_seqlens)
    return AttentionBias(mask=document_ids[:, None, :, None] == document_ids[:, None, None, :])


def limit_to_window(bias: AttentionBias, window: int, length: int, device: torch.device) -> AttentionBias:
    """Restrict attention to tokens at most `window` positions away, in rows of `length` tokens."""
    if length <= window + 1:
        return bias
    if bias.backend == "short" or bias.cu_seqlens is not None:
        return replace(bias, window=window)
    position = torch.arange(length, device=device)
    distance = (position[:, None] - position).abs()[None, None]  # [1, 1, L, L]
    if bias.mask is None:
        return replace(bias, backend="sdpa", mask=distance <= window)
    mask = bias.mask | (distance == 0)  # padding far from all tokens attends to itself: a softmax of nothing is NaN
    return replace(bias, mask=mask & (distance <= window))


def make_rope(length: int, head_width: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines [2, L, 1, K/2] of rotary positions in fp32; frequencies fall from 1 towards 1/theta."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_width, 2, device=device) / head_width)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])[:, :, None]


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.attention_dropout
        self.qkv = create_linear(config, config.width, 3 * config.width)
        self.output = create_linear(config, config.width, config.width)

    def forward(self, hidden: Tensor, bias: AttentionBias, positions: Tensor | None = None) -> Tensor:
        qkv = self.qkv(hidden).unflatten(-1, (3, self.heads, -1))  # [B, L, 3, H, K]
        context = dispatch.attention(qkv, bias, self.dropout if self.training else 0.0).flatten(2)  # [B, L, D]
        return self.output(gather_positions(context, positions))  # [B, L or M, D]


class FeedForward(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.feedforward)
        self.down = nn.Linear(config.feedforward, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(reference.linear_gelu(self.up, hidden))  # the GELU kernel is part of the fused layer


class GatedFeedForward(nn.Module):
    """down(gelu(a) · b), where up(x) is a and b side by side (GeGLU)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.up = create_linear(config, config.width, 2 * config.feedforward)
        self.down = create_linear(config, config.feedforward, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.dropout(dispatch.geglu(self.up(hidden))))


def cast_parameters(layer: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """A layer's parameters in order, those of matrix products in `dtype`."""
    return [each if "norm" in name else each.to(dtype) for name, each in layer.named_parameters()]


class ClassicLayer(nn.Module):
    """A post-norm Transformer layer: x = LN(x + attention(x)); x = LN(x + feedforward(x)).

    With `positions` [B, M] only those hidden states are computed. In half precision on a GPU the layer is one fused
    operation, which does not call the modules inside (nor their hooks)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = create_norm(config, config.width)
        self.feedforward = FeedForward(config)
        self.feedforward_norm = create_norm(config, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, bias: AttentionBias, positions: Tensor | None = None) -> Tensor:
        if dispatch.can_fuse_classic_layer(hidden, bias):
            return self.forward_fused(hidden, bias, positions)
        attended = self.dropout(self.attention(hidden, bias, positions))
        hidden = self.attention_norm(gather_positions(hidden, positions) + attended)
        return self.feedforward_norm(hidden + self.dropout(self.feedforward(hidden)))

    def forward_fused(self, hidden: Tensor, bias: AttentionBias, positions: Tensor | None = None) -> Tensor:
        dtype = dispatch.matmul_dtype(hidden)
        return dispatch.fused_classic_layer(
            hidden.to(dtype),
            cast_parameters(self, dtype),
            bias,
            positions,
            heads=self.attention.heads,
            attention_dropout=self.attention.dropout if self.training else 0.0,
            dropout=self.dropout.p if self.training else 0.0,
            epsilon=self.attention_norm.eps,
        )


class ModernLayer(nn.Module):
    """A pre-norm Transformer layer: x = x + attention(LN(x)); x = x + feedforward(LN(x)).

    In half precision on a GPU it may be one fused operation, which does not call the modules inside."""

    def __init__(self, config: EncoderConfig, is_first: bool) -> None:
        super().__init__()
        self.attention_norm = (
            nn.Identity() if is_first else create_norm(config, config.width)
        )  # embeddings are normalised
        self.attention = Attention(config)
        self.feedforward_norm = create_norm(config, config.width)
        self.feedforward = GatedFeedForward(config)
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(self, hidden: Tensor, bias: AttentionBias, positions: Tensor | None = None) -> Tensor:
        attended = self.dropout(self.attention(self.attention_norm(hidden), bias, positions))
        hidden = gather_positions(hidden, positions) + attended
        return hidden + self.feedforward(self.feedforward_norm(hidden))

    def forward_fused(
        self,
        residual: Tensor,
        pending: Tensor | None,
        bias: AttentionBias,
        positions: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """The fp32 residual stream and the feed-forward output that the next layer adds to it."""
        return dispatch.fused_modern_layer(
            residual,
            pending,
            cast_parameters(self, dtype),
            bias,
            positions,
            heads=self.attention.heads,
            epsilon=self.feedforward_norm.eps,
        )

    def has_dropout(self) -> bool:
        return self.training and max(self.dropout.p, self.attention.dropout, self.feedforward.dropout.p) > 0


class Encoder(nn.Module):
    """Token ids [B, L] to hidden states [B, L, D]."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config, self.output_width = config, config.width
        is_modern = config.is_modern()
        has_projection = config.embedding_width != config.width
        self.embeddings = TokenEmbeddings(config) if is_modern else ClassicEmbeddings(config)
        # not part of the embeddings, which a generator with another dropout may share
        self.embedding_dropout = nn.Identity() if is_modern else nn.Dropout(config.dropout)
        self.project = create_linear(config, config.embedding_width, config.width) if has_projection else nn.Identity()
        self.embedding_norm = ModernEmbeddingNorm(config) if is_modern else nn.Identity()
        self.layers = nn.ModuleList(
            ModernLayer(config, is_first=number == 0) if is_modern else ClassicLayer(config)
            for number in range(config.layers)
        )
        self.final_norm = create_norm(config, config.width) if is_modern else nn.Identity()
        self.activation_checkpointing = False
        initialize_parameters(self, config.init_std)
        if is_modern:
            scale_residual_projections(self.layers)

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
        """Hidden states [B, L, D], or [B, M, D] at `positions` [B, M], to which the last layer is then restricted.

        `attention_mask` is False at padding, which must be at one end of a row; `segment_ids` is 1 in segment B; tokens
        attend only to tokens with their `document_ids`. None means no padding, segment A, one document a row.
        `cu_seqlens` are the boundaries of the documents (`electra.data.loader.compute_cu_seqlens`); in a compiled graph
        long rows need them to avoid a mask [B, 1, L, L]."""
        self.config.check_length(input_ids.shape[1])
        hidden = self.embed(input_ids, segment_ids)
        biases = self.attention_biases(input_ids, attention_mask, document_ids, cu_seqlens)
        is_fused = self.can_fuse_modern_layers(hidden, biases)
        run_layers = self.run_fused_modern_layers if is_fused else self.run_layers
        return self.final_norm(run_layers(hidden, biases, positions))

    def hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> list[Tensor]:
        """Hidden states [B, L, D] of the embeddings and of each layer, the last one after the final norm: those of
        `transformers` with output_hidden_states."""
        self.config.check_length(input_ids.shape[1])
        states = [self.embed(input_ids, segment_ids)]
        for layer, bias in zip(self.layers, self.attention_biases(input_ids, attention_mask, None, None), strict=True):
            states.append(layer(states[-1], bias))
        return [*states[:-1], self.final_norm(states[-1])]

    def embed(self, input_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        """The input of the first layer [B, L, D]."""
        embedded = self.embedding_dropout(self.embeddings(input_ids, segment_ids))  # [B, L, E]
        return self.embedding_norm(self.project(embedded))

    def run_layers(self, hidden: Tensor, biases: list[AttentionBias], positions: Tensor | None) -> Tensor:
        for number, (layer, bias) in enumerate(zip(self.layers, biases, strict=True)):
            is_last = number == len(self.layers) - 1
            hidden = self.call_maybe_checkpointed(layer, hidden, bias, positions if is_last else None)
        return hidden

    def can_fuse_modern_layers(self, hidden: Tensor, biases: list[AttentionBias]) -> bool:
        is_modern = all(isinstance(layer, ModernLayer) and not layer.has_dropout() for layer in self.layers)
        return is_modern and dispatch.can_fuse_modern_layers(hidden, biases)

    def run_fused_modern_layers(self, hidden: Tensor, biases: list[AttentionBias], positions: Tensor | None) -> Tensor:
        """`run_layers` with fused layers, whose residual stream is in fp32."""
        dtype = dispatch.matmul_dtype(hidden)
        residual = hidden.float()
        pending: Tensor | None = None  # the last layer's feed-forward output, not yet added
        for number, (layer, bias) in enumerate(zip(self.layers, biases, strict=True)):
            assert isinstance(layer, ModernLayer)
            is_last = number == len(self.layers) - 1
            arguments = residual, pending, bias, positions if is_last else None, dtype
            residual, pending = self.call_maybe_checkpointed(layer.forward_fused, *arguments)
        return (residual if pending is None else residual + pending).to(hidden.dtype)

    def call_maybe_checkpointed(self, layer: Callable[..., Any], *arguments: Any) -> Any:
        """Call a layer, in training perhaps with activation checkpointing."""
        if self.activation_checkpointing and self.training:
            return checkpoint(layer, *arguments, use_reentrant=False)
        return layer(*arguments)

    def attention_biases(
        self, input_ids: Tensor, attention_mask: Tensor | None, document_ids: Tensor | None, cu_seqlens: Tensor | None
    ) -> list[AttentionBias]:
        """The attention bias of each layer."""
        config, length, device = self.config, input_ids.shape[1], input_ids.device
        backend = self.attention_backend(length, has_cu_seqlens=document_ids is None or cu_seqlens is not None)
        bias = make_attention_bias(attention_mask, document_ids, cu_seqlens, backend=backend)
        if not config.is_modern():
            return [bias] * config.layers
        head_width = config.width // config.heads
        local_bias = global_bias = replace(bias, rope=make_rope(length, head_width, config.global_theta, device))
        if config.global_attention_every > 1:
            local_bias = limit_to_window(bias, config.local_attention // 2, length, device)
            local_bias = replace(local_bias, rope=make_rope(length, head_width, config.local_theta, device))
        return [global_bias if config.has_global_attention(number) else local_bias for number in range(config.layers)]

    def attention_backend(self, length: int, has_cu_seqlens: bool = False) -> AttentionBackend:
        """The attention backend for rows of `length` tokens; `has_cu_seqlens` also where there are no documents."""
        weight = next(self.layers.parameters())
        return dispatch.select_attention_backend(weight, length, self.config.width // self.config.heads, has_cu_seqlens)

    def tied_projection(self) -> Tensor | None:
        """The projection [D, E] that the modern style's tied output table is multiplied with, if there is one."""
        return getattr(self.project, "weight", None) if self.config.is_modern() else None


def initialize_parameters(module: nn.Module, std: float) -> None:
    """Initialise as ELECTRA was: truncated normal, zero biases, Glorot uniform for the embedding projection."""
    for name, parameter in module.named_parameters():
        if name == "project.weight":
            nn.init.xavier_uniform_(parameter)
        elif parameter.dim() == 2:
            nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def scale_residual_projections(layers: nn.ModuleList) -> None:
    """Divide the projections into the residual stream by √(2 · layers), as in GPT-2 and ModernBERT."""
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if name.endswith(("attention.output.weight", "feedforward.down.weight")):
                parameter.div_((2 * len(layers)) ** 0.5)
