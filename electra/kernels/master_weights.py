"""A model's working copy in half precision: it reads and is blamed, the model itself is moved.

Under autocast alone every product casts its weight, and every gradient is cast back: hundreds of small kernels a step.
Here all weights of products lie in one stretch of memory and are cast at once, and so are their gradients; the numbers
are the same. What autocast leaves in fp32 (embeddings, norms) is not copied, but one with the model's.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

ALIGNED = 64  # numbers; products read whole stretches of 128 bytes


@dataclass(frozen=True)
class Halved:
    """A parameter, the place of its gradient, and its copy in half precision."""

    own: nn.Parameter
    gradient: Tensor
    copy: nn.Parameter


class WorkingCopy(Generic[Model]):
    """A model in the precision that it works in; in fp32 that is the model itself."""

    def __init__(self, model: Model, precision: torch.dtype) -> None:
        self.model, self.device, self.precision = model, next(model.parameters()).device, precision
        self.halved: list[Halved] = []
        if precision != torch.float32:
            self.model = deepcopy(model)
            self.own, self.halves, places = laid_out(model, precision)
            gradients = torch.zeros_like(self.own)
            for own, copy in zip(model.modules(), self.model.modules(), strict=True):
                for name, parameter in own.named_parameters(recurse=False):
                    place = places.get(parameter)
                    if place is None:
                        setattr(copy, name, parameter)
                        continue
                    half = nn.Parameter(self.halves[place].view_as(parameter))
                    setattr(copy, name, half)
                    self.halved.append(Halved(parameter, gradients[place].view_as(parameter), half))

    def autocast(self) -> torch.autocast:
        """For what is not copied: sums and norms in fp32, products in half precision."""
        return torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32)

    def refresh(self) -> None:
        """Take over the weights as they are now."""
        if self.halved:
            self.halves.copy_(self.own)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those of the model's own parameters."""
        loss.backward()
        first: list[tuple[Tensor, Tensor]] = []
        later: list[tuple[Tensor, Tensor]] = []
        for each in self.halved:
            if each.copy.grad is not None:
                (first if each.own.grad is None else later).append((each.gradient, each.copy.grad))
                each.own.grad, each.copy.grad = each.gradient, None
        if first:
            torch._foreach_copy_([own for own, _ in first], [copied for _, copied in first])
        if later:
            torch._foreach_add_([own for own, _ in later], [copied for _, copied in later])


def laid_out(model: nn.Module, precision: torch.dtype) -> tuple[Tensor, Tensor, dict[nn.Parameter, slice]]:
    """The weights and biases of a model's products moved to one stretch of memory, a copy of it, and who is where."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    parameters = [parameter for linear in linears for parameter in linear.parameters()]
    places, end = {}, 0
    for parameter in parameters:
        places[parameter] = slice(end, end + parameter.numel())
        end += -(-parameter.numel() // ALIGNED) * ALIGNED
    own = torch.zeros(end, device=parameters[0].device)
    for parameter, place in places.items():
        own[place] = parameter.detach().flatten()
        parameter.data = own[place].view_as(parameter)
    return own, own.to(precision), places
