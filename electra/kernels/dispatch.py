"""Chooses the kernel for each operation: a Triton or library kernel where it applies, plain PyTorch elsewhere.

Other code imports this module, cuda_graph, master_weights, side_stream and plain functions of reference, but never a
Triton module. Triton kernels run on a GPU in half precision; with TRITON_INTERPRET=1 also on a CPU, slowly, for tests.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from electra.errors import ConfigError
from electra.kernels import mlm_head_cpu, reference

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
HAS_C_COMPILER = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))  # Triton links with it
HAS_TRITON = find_spec("triton") is not None and (IS_INTERPRETED or (torch.cuda.is_available() and HAS_C_COMPILER))
HALF_DTYPES = (torch.bfloat16, torch.float16)
MAX_FLASH_HEAD_WIDTH = 192  # flash attention's backward supports it on every GPU

if torch.cuda.is_available():  # importing it takes half as long as importing torch
    from torch.nn.attention.varlen import varlen_attn
if HAS_TRITON:
    from electra.kernels import attention as attention_kernels
    from electra.kernels import fused_layers, gelu, mlm_head
    from electra.kernels.side_stream import WeightGradientStream

KERNELS = (
    "short_attention",
    "varlen_attention",
    "linear_gelu",
    "geglu",
    "classic_layer",
    "modern_layer",
    "mlm_head",
    "weight_gradient_stream",
)
LARGEST_KERNELS = ("short_attention", "mlm_head", "classic_layer", "modern_layer", "linear_gelu", "geglu")
disabled: set[str] = set()  # single kernels
Result = TypeVar("Result")
KernelMode = Literal["auto", "off"]
kernel_mode: KernelMode = "auto"

AttentionBackend = Literal["sdpa", "varlen", "short"]
"""scaled_dot_product_attention with a mask; flash attention with cu_seqlens; the Triton kernel for short rows."""


@dataclass(frozen=True)
class AttentionBias:
    """Which tokens attend to which, in the form that the attention backend takes; shared by layers of equal window.

    Without mask, cu_seqlens and document_ids tokens attend to their whole row."""

    backend: AttentionBackend = "sdpa"
    mask: Tensor | None = None  # sdpa: [B, 1, 1 or L, L] bool, True where a query (row) attends to a key (column)
    cu_seqlens: Tensor | None = None  # varlen: [documents + 1] int32, boundaries of documents in the flattened batch
    document_ids: Tensor | None = None  # short: [B, L] int32
    window: int = -1  # tokens to either side, -1 for all; a mask already contains it
    rope: Tensor | None = None  # [2, L, 1, K/2] cosines and sines of rotary positions


def set_kernel_mode(mode: KernelMode) -> None:
    """Use kernels wherever they apply ("auto"), or plain PyTorch only ("off")."""
    global kernel_mode
    kernel_mode = mode


@contextmanager
def without_kernels(*names: str) -> Iterator[None]:
    """Switch single KERNELS off, to measure what each one buys."""
    if unknown := set(names) - set(KERNELS):
        raise ConfigError(f"unknown kernels {', '.join(sorted(unknown))}; choose from {', '.join(KERNELS)}")
    disabled.update(names)
    if HAS_TRITON:
        WeightGradientStream.enabled = is_kernel_enabled("weight_gradient_stream")
    try:
        yield
    finally:
        disabled.difference_update(names)
        if HAS_TRITON:
            WeightGradientStream.enabled = is_kernel_enabled("weight_gradient_stream")


def disable_largest_kernel() -> str | None:
    """Switch off the kernel that needs most shared memory of those in use, for a GPU that has too little; its name."""
    for kernel in LARGEST_KERNELS:
        if is_kernel_enabled(kernel):
            disabled.add(kernel)
            return kernel
    return None


def call_without_large_kernels(function: Callable[[], Result]) -> Result:
    """Call a function, and again without the largest kernel while one needs more shared memory than the GPU has."""
    while True:
        try:
            return function()
        except Exception as error:
            if not is_out_of_shared_memory(error) or disable_largest_kernel() is None:
                raise


def is_out_of_shared_memory(error: Exception) -> bool:
    """Whether a Triton kernel needs more shared memory or registers than the GPU has; Triton may not be installed."""
    return type(error).__name__ == "OutOfResources"


def is_kernel_enabled(kernel: str) -> bool:
    return kernel_mode == "auto" and kernel not in disabled


def matmul_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of matrix products with this tensor: autocast's on a GPU, if it is enabled."""
    return torch.get_autocast_dtype("cuda") if tensor.is_cuda and torch.is_autocast_enabled("cuda") else tensor.dtype


def can_use_kernel(kernel: str, tensor: Tensor) -> bool:
    """Whether a Triton kernel is enabled and takes this tensor."""
    is_supported = IS_INTERPRETED or (tensor.is_cuda and matmul_dtype(tensor) in HALF_DTYPES)
    return HAS_TRITON and is_supported and is_kernel_enabled(kernel)


def select_attention_backend(weight: Tensor, length: int, head_width: int, has_cu_seqlens: bool) -> AttentionBackend:
    """The backend for rows of `length` tokens and a model with this `weight`.

    `has_cu_seqlens`: they are part of the batch, or there are no documents. A compiled graph needs that for varlen:
    computed inside it, their number would differ from batch to batch."""
    if can_use_kernel("short_attention", weight) and attention_kernels.fits_short_attention(length, head_width):
        return "short"
    is_half = weight.is_cuda and matmul_dtype(weight) in HALF_DTYPES
    if not is_half or head_width % 8 or head_width > MAX_FLASH_HEAD_WIDTH or not is_kernel_enabled("varlen_attention"):
        return "sdpa"
    return "sdpa" if torch.compiler.is_compiling() and not has_cu_seqlens else "varlen"


def attention(qkv: Tensor, bias: AttentionBias, dropout: float) -> Tensor:
    """softmax(Q Kᵀ / √K) V of `qkv` [B, L, 3, H, K]: [B, L, H, K]."""
    if bias.backend == "short":
        rope = None if bias.rope is None else bias.rope.squeeze(2)
        seed = torch.randint(2**31, (), device=qkv.device, dtype=torch.int32) if dropout else None
        return attention_kernels.short_attention(qkv, bias.document_ids, rope, seed, bias.window, dropout)
    query, key, value = qkv.unbind(2)  # each [B, L, H, K]
    if bias.rope is not None:
        query, key = reference.apply_rope(query, bias.rope), reference.apply_rope(key, bias.rope)
    if bias.cu_seqlens is not None:
        return varlen_attention(query, key, value, bias.cu_seqlens, bias.window, dropout)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # [B, H, L, K]
    context = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias.mask, dropout_p=dropout)
    return context.transpose(1, 2)  # [B, L, H, K]


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, window: int, dropout: float
) -> Tensor:
    """Flash attention within each document of the flattened batch; [B, L, H, K] as `query`."""
    B, L = query.shape[:2]
    query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)  # [B · L, H, K]
    arguments = (query, key, value, cu_seqlens, cu_seqlens, L, L)
    if dropout:  # `varlen_attn` has none, but the operation that it calls does (torch 2.11 to 2.13)
        sides = {"window_size_left": window, "window_size_right": window} if window >= 0 else {}
        context, *_ = torch.ops.aten._flash_attention_forward(*arguments, dropout, False, False, **sides)
    else:
        context = varlen_attn(*arguments) if window < 0 else varlen_attn(*arguments, window_size=(window, window))
    assert isinstance(context, Tensor)
    return context.unflatten(0, (B, L))


def linear_gelu(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """gelu(linear(hidden)); exact, in half precision to within rounding."""
    if linear.bias is None or not can_use_kernel("linear_gelu", hidden):
        return reference.linear_gelu(linear, hidden)
    return gelu.bias_gelu(functional.linear(hidden, linear.weight), linear.bias)


def geglu(x: Tensor) -> Tensor:
    """gelu(first half) · second half of `x` [..., 2 · F]: [..., F]."""
    return gelu.geglu(x) if can_use_kernel("geglu", x) else reference.geglu(x)


def can_fuse_classic_layer(hidden: Tensor, bias: AttentionBias) -> bool:
    """Whether `fused_classic_layer` takes these hidden states."""
    return can_use_kernel("classic_layer", hidden) and bias.backend != "sdpa"


def fused_classic_layer(
    hidden: Tensor, parameters: list[Tensor], bias: AttentionBias, positions: Tensor | None, *, heads: int,
    attention_dropout: float, dropout: float, epsilon: float,
) -> Tensor:  # fmt: skip
    """A post-norm layer as one operation: [B, L, D] from `hidden`, or [B, M, D] at `positions` [B, M].

    `parameters` are in the order of `ClassicLayer.parameters()`."""
    return fused_layers.fused_classic_layer(
        hidden, parameters, bias.document_ids, bias.cu_seqlens, positions, heads=heads,
        use_short_attention=bias.backend == "short", attention_dropout=attention_dropout, dropout=dropout,
        epsilon=epsilon,
    )  # fmt: skip


def can_fuse_modern_layers(hidden: Tensor, biases: Iterable[AttentionBias]) -> bool:
    """Whether `fused_modern_layer` takes these hidden states; it has no dropout."""
    return can_use_kernel("modern_layer", hidden) and all(bias.backend == "short" for bias in biases)


def fused_modern_layer(
    residual: Tensor, pending: Tensor | None, parameters: list[Tensor], bias: AttentionBias, positions: Tensor | None,
    *, heads: int, epsilon: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A pre-norm layer as one operation: the fp32 residual stream [B, L, D] and the feed-forward output to add to it.

    `pending` is the feed-forward output of the layer before, None in the first layer."""
    assert bias.rope is not None
    return fused_layers.fused_modern_layer(
        residual, pending, parameters, bias.document_ids, bias.rope.squeeze(2), positions, heads=heads,
        window=bias.window, epsilon=epsilon,
    )  # fmt: skip


def can_fuse_mlm_head(hidden: Tensor) -> bool:
    """Whether `mlm_loss_and_sample` takes these hidden states."""
    return can_use_kernel("mlm_head", hidden) or can_use_cpu_mlm_head(hidden)


def can_use_cpu_mlm_head(hidden: Tensor) -> bool:
    """Whether the chunked MLM head applies: on a CPU in fp32, unless the step is compiled."""
    is_plain = not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()
    is_supported = hidden.device.type == "cpu" and hidden.dtype == torch.float32
    return is_supported and is_plain and is_kernel_enabled("mlm_head")


def mlm_loss_and_sample(
    states: Tensor, table: Tensor, bias: Tensor, labels: Tensor, block_keys: Tensor, token_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """The MLM loss of each of `labels` [B, M] and a token sampled at each position [B, M], in one pass over the logits.

    Logits [B, M, V] are `states` [B, M, E] times the transposed `table` [V, E], plus `bias` [V]. The sample is drawn
    with Gumbel noise from the rows' keys [B, 2]: a block of the vocabulary by `block_keys`, a token in it by
    `token_keys`."""
    kernel = mlm_head if can_use_kernel("mlm_head", states) else mlm_head_cpu
    return kernel.mlm_loss_and_sample(states, table, bias, labels, block_keys, token_keys)
