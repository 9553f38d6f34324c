"""Half-precision weights for forward and backward, fp32 master weights for the optimizer.

Under autocast alone every matrix product casts its weight, and every gradient is cast back: hundreds of small kernels a
step. Here the weights and biases of all linear layers are views of one fp32 buffer, which is cast by one kernel; their
gradients are cast back together. The results are those of autocast. Parameters that autocast leaves in fp32
(embeddings, norms) are shared by both models.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

ALIGNMENT = 64  # elements: matrix products read aligned stretches of 128 bytes


@dataclass(frozen=True)
class MasterParameter:
    """An fp32 master parameter, the buffer for its gradient, and its half-precision copy."""

    master: nn.Parameter
    gradient: Tensor
    half: nn.Parameter


class MasterWeights(Generic[Model]):
    """Keeps `forward_model`, a copy of a model in `dtype` for forward and backward; with fp32 it is the model itself.

    The optimizer updates the original's parameters, the master weights; `update_half_precision_weights` copies them.
    Their gradients are written to `gradient_views` if given. A model that is sharded over ranks is not copied: FSDP
    casts its weights.
    """

    def __init__(
        self,
        model: Model,
        dtype: torch.dtype,
        gradient_views: Mapping[nn.Parameter, Tensor] | None = None,
        is_sharded: bool = False,
    ) -> None:
        self.original = self.forward_model = model
        self.device, self.dtype = next(model.parameters()).device, dtype
        self.cast_parameters: list[MasterParameter] = []
        if dtype != torch.float32 and not is_sharded:
            self.forward_model = deepcopy(model)
            self.master, self.half, slices = flatten_linears(model, dtype)
            if gradient_views is None:
                gradients = torch.zeros_like(self.master)
                gradient_views = {parameter: gradients[part].view_as(parameter) for parameter, part in slices.items()}
            for original, copy in zip(model.modules(), self.forward_model.modules(), strict=True):
                for name, parameter in original.named_parameters(recurse=False):
                    if parameter not in slices:
                        setattr(copy, name, parameter)
                        continue
                    half = nn.Parameter(self.half[slices[parameter]].view_as(parameter))
                    setattr(copy, name, half)
                    self.cast_parameters.append(MasterParameter(parameter, gradient_views[parameter], half))

    @property
    def needs_loss_scaling(self) -> bool:
        return self.dtype == torch.float16

    def autocast(self) -> torch.autocast:
        """Autocast for what is not copied: norms in fp32, matrix products in half precision."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def update_half_precision_weights(self) -> None:
        """Copy the master weights to the half-precision weights."""
        if self.cast_parameters:
            self.half.copy_(self.master)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those of the master weights."""
        loss.backward()
        new: list[tuple[Tensor, Tensor]] = []
        accumulated: list[tuple[Tensor, Tensor]] = []
        for each in self.cast_parameters:
            if each.half.grad is not None:
                (new if each.master.grad is None else accumulated).append((each.gradient, each.half.grad))
                each.master.grad, each.half.grad = each.gradient, None
        if new:
            torch._foreach_copy_([target for target, _ in new], [grad for _, grad in new])
        if accumulated:
            torch._foreach_add_([target for target, _ in accumulated], [grad for _, grad in accumulated])

    def discard_gradients(self) -> None:
        """Remove all gradients, also those of a backward pass that failed halfway."""
        for model in (self.original, self.forward_model):
            model.zero_grad()


def assign_slices(parameters: Iterable[nn.Parameter]) -> tuple[dict[nn.Parameter, slice], int]:
    """The slice of each parameter in one buffer for all of them, and the size of the buffer."""
    slices, end = {}, 0
    for parameter in parameters:
        slices[parameter] = slice(end, end + parameter.numel())
        end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    return slices, end


def flatten_linears(model: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[nn.Parameter, slice]]:
    """Move the parameters of all linear layers into one fp32 buffer; also its copy in `dtype`, and each one's slice."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    parameters = [parameter for linear in linears for parameter in linear.parameters(recurse=False)]
    slices, size = assign_slices(parameters)
    master = torch.zeros(size, device=parameters[0].device)
    for parameter, part in slices.items():
        master[part] = parameter.detach().flatten()
        parameter.data = master[part].view_as(parameter)
    return master, master.to(dtype), slices
