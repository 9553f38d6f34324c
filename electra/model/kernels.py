"""Where kernels of our own run, and in what precision products are made."""

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = torch.cuda.is_available() and find_spec("triton") is not None
HALVES = (torch.bfloat16, torch.float16)


def precision_at(tensor: Tensor) -> torch.dtype:
    """The precision that products with a tensor are made in."""
    return torch.get_autocast_dtype("cuda") if tensor.is_cuda and torch.is_autocast_enabled("cuda") else tensor.dtype


def is_for_kernels(tensor: Tensor) -> bool:
    """Whether our own kernels take a tensor: on a GPU, in half precision."""
    return HAS_TRITON and tensor.is_cuda and precision_at(tensor) in HALVES
