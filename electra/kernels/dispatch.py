"""Where kernels of our own run, and in what precision products are made."""

import os
import shutil
from importlib.util import find_spec

import torch
from torch import Tensor


def has_compiler() -> bool:
    """Whether there is a C compiler: Triton joins kernels to Python by one, on the machine they run on."""
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
"""Triton's own switch: kernels run on the CPU too, one program after the other, to be tested where there is no GPU."""
HAS_TRITON = find_spec("triton") is not None and (IS_INTERPRETED or (torch.cuda.is_available() and has_compiler()))
HALVES = (torch.bfloat16, torch.float16)


def precision_at(tensor: Tensor) -> torch.dtype:
    """The precision that products with a tensor are made in."""
    return torch.get_autocast_dtype("cuda") if tensor.is_cuda and torch.is_autocast_enabled("cuda") else tensor.dtype


def is_for_kernels(tensor: Tensor) -> bool:
    """Whether our own kernels take a tensor: on a GPU in half precision; in Triton's interpreter any."""
    return HAS_TRITON and (IS_INTERPRETED or (tensor.is_cuda and precision_at(tensor) in HALVES))


if HAS_TRITON:
    from electra.kernels import mlm_head


def can_fuse_mlm_head(hidden: Tensor) -> bool:
    """Whether `mlm_loss_and_sample` runs on these hidden states."""
    return is_for_kernels(hidden)


def mlm_loss_and_sample(
    states: Tensor, table: Tensor, bias: Tensor, labels: Tensor, block_keys: Tensor, token_keys: Tensor
) -> tuple[Tensor, Tensor]:
    """The MLM loss of each of `labels` [B, M] and a token sampled at each position [B, M], in one pass over the logits.

    Logits [B, M, V] are `states` [B, M, E] times the transposed `table` [V, E], plus `bias` [V]. The sample is drawn
    with Gumbel noise from the rows' `block_keys` and `token_keys` [B, 2]: a block of the vocabulary, then a token in it.
    """
    return mlm_head.loss_and_sample(states, table, bias, labels, block_keys, token_keys)
