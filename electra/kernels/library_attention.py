"""Attention over rows of any length, by the libraries that have it: flash attention document by document, and cuDNN,
which is faster, where tokens see their whole row.

Both give the gradients of queries, keys and values one by one; the pass that adds these up for the bias also puts them
back side by side.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra.kernels.reductions import tiles_of

ROWS, COLUMNS = 16, 128  # of a tile
CUDNN_WIDTHS = (64, 128)  # of a head
CUDNN_LENGTHS = 64  # tokens: rows are a multiple, so that no cuDNN has to fill them up
aten = torch.ops.aten


@cache
def has_cudnn(device: int) -> bool:
    """Whether cuDNN's attention is the faster one: measured on Hopper only."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def is_for_cudnn(qkv: Tensor, starts: Tensor | None) -> bool:
    """Whether cuDNN mixes these values [B, L, 3, H, K]: over whole rows."""
    fits = qkv.shape[-1] in CUDNN_WIDTHS and qkv.shape[1] % CUDNN_LENGTHS == 0
    is_wanted = torch.backends.cudnn.enabled and torch.backends.cuda.cudnn_sdp_enabled()
    return fits and starts is None and is_wanted and has_cudnn(qkv.device.index)


def mix(qkv: Tensor, starts: Tensor | None, dropout: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mix the values of `qkv` [B, L, 3, H, K] by the agreement of its queries and keys: [B, L, H, K].

    Tokens see their document, where `starts` [N + 1] says where those start in the flattened batch. Also what the
    backward pass reads again: the logarithms of sums [B · L · H], and the state [2] that dropout's noise came from.
    """
    query, key, value = qkv.unbind(2)
    if is_for_cudnn(qkv, starts):
        heads = [each.transpose(1, 2) for each in (query, key, value)]
        mixed, levels, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            *heads, None, True, dropout
        )
        state = torch.cat([seed.view(1), offset.view(1)]).to(qkv.device) if dropout else no_state(qkv)
        return mixed.transpose(1, 2).contiguous(), levels.flatten(), state
    text = [each.flatten(0, 1) for each in (query, key, value)]
    mixed, levels, state, *_ = aten._flash_attention_forward(*text, *borders(qkv, starts), dropout, False, False)
    return mixed.view_as(value), levels.flatten(), state.view(torch.int64) if dropout else no_state(qkv)


def gradients_of_mix(
    qkv: Tensor, starts: Tensor | None, mixed: Tensor, levels: Tensor, state: Tensor, grown: Tensor, dropout: float
) -> tuple[Tensor, Tensor]:
    """The gradient of `qkv` from that of the mixed values, `grown` [B, L, H, K]; that of a bias in it as parts
    [programs, 3 · H · K] to sum."""
    (B, L, _, H, _), (query, key, value) = qkv.shape, qkv.unbind(2)
    if is_for_cudnn(qkv, starts):
        heads = [each.transpose(1, 2) for each in (grown, query, key, value, mixed)]
        others = state[0], state[1], None, None, None, L, L, dropout, False
        found = aten._scaled_dot_product_cudnn_attention_backward(*heads, levels.view(B, H, L, 1), *others)
        return side_by_side(qkv, *(each.transpose(1, 2).contiguous() for each in found))
    text = [each.flatten(0, 1) for each in (grown, query, key, value, mixed)]
    ends = *borders(qkv, starts), dropout, False, state.view(torch.uint64), qkv.new_empty(0)
    return side_by_side(qkv, *aten._flash_attention_backward(*text, levels.view(H, B * L), *ends))


def borders(qkv: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor, int, int]:
    """Where queries and keys of a document start, or else of a row, and the most of each that belong together."""
    B, L = qkv.shape[:2]
    if starts is None:
        starts = torch.arange(0, B * L + 1, L, device=qkv.device, dtype=torch.int32)
    return starts, starts, L, L


def no_state(qkv: Tensor) -> Tensor:
    """Stands for the state of noise that there is none of."""
    return torch.zeros(2, device=qkv.device, dtype=torch.int64)


@triton.jit
def side_by_side_kernel(queries, keys, values, packed, sums, N, D, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """packed [N, 3, D] of queries, keys and values [N, D], and its sums over the rows of each program."""
    column, which = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(2)
    source = queries
    if which == 1:
        source = keys
    if which == 2:
        source = values
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tiles):
        row = ((tl.program_id(0) * tiles + tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        is_there = (row < N)[:, None] & (column < D)[None, :]
        found = tl.load(source + row[:, None] * D + column[None, :], mask=is_there, other=0.0)
        tl.store(packed + (row[:, None] * 3 + which) * D + column[None, :], found, mask=is_there)
        total += found.to(tl.float32)
    target = sums + (tl.program_id(0).to(tl.int64) * 3 + which) * D + column
    tl.store(target, tl.sum(total, 0), mask=column < D)


def side_by_side(qkv: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of queries, keys and values as one of `qkv` [B, L, 3, H, K], and its parts [programs, 3 · D] to sum."""
    packed, D = torch.empty_like(qkv), qkv[0, 0, 0].numel()
    N, columns = qkv.shape[0] * qkv.shape[1], triton.cdiv(D, COLUMNS)
    tiles, programs = tiles_of(N, ROWS, 3 * columns)
    parts = torch.empty(programs, 3 * D, device=qkv.device)
    side_by_side_kernel[(programs, columns, 3)](
        queries, keys, values, packed, parts, N, D, tiles, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4
    )
    return packed, parts
