"""Weights, gradients and optimizer states divided over the ranks (FSDP2): for models that do not fit on one GPU.

Each rank keeps its part of every parameter in fp32, the master weights. The weights of a layer are gathered when it is
computed, on a GPU in bf16, and its gradients are summed and divided after it. What FSDP needs of torch is imported
where it is used: that takes a second.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from electra.errors import ConfigError
from electra.training.distributed import World, backend_is_gloo

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def shard_model(model: nn.Module, layers: Iterable[nn.Module], world: World, dtype: torch.dtype) -> None:
    """Divide the parameters of a model over the ranks; those of `layers` are gathered layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if not world.is_distributed:
        raise ConfigError("--shard-weights divides the weights over ranks; start them with torchrun")
    if world.device.type == "cuda" and backend_is_gloo():
        raise ConfigError("--shard-weights needs a GPU for each rank; start as many ranks as there are GPUs")
    if dtype == torch.float16:
        raise ConfigError("--shard-weights needs --precision bf16 or fp32, not fp16")
    mesh = init_device_mesh(world.device.type, (world.size,))
    casts = {} if dtype == torch.float32 else {"param_dtype": dtype, "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(**casts, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are divided by the counts of all ranks already
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether each rank has a part of a tensor, which is a DTensor then."""
    return hasattr(tensor, "full_tensor")


def gather(tensor: Tensor) -> Tensor:
    """A tensor of which each rank may have a part, as a whole; all ranks must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def divide_like(whole: Tensor, other: Tensor) -> Tensor:
    """A tensor, which all ranks have, divided over the ranks if `other`, of the same shape, is."""
    if not is_sharded(other) or whole.shape != other.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


@torch.no_grad()
def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Copy all parameters between models of which one may be divided over the ranks; all ranks must call this."""
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        theirs.copy_(divide_like(gather(ours), theirs))
