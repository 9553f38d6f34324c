"""A trained encoder as the start of a wider or deeper one.

Widening does not change its outputs (Net2Net, arXiv 1511.05641). Every feature of hidden states, attention heads and
feed-forward layers becomes several equal ones, and the weights that read them are divided by their number. Copies that
are read alike would stay equal in training, so these weights also get noise, which cancels over the copies of an input
and differs between the copies of an output.

Stacking repeats its layers, which changes its outputs (Gong et al. 2019, Efficient Training of BERT by Progressively
Stacking)."""

import torch
from torch import Tensor, nn

from electra.model.config import ElectraConfig
from electra.model.electra import Electra
from electra.model.encoder import Attention, GatedFeedForward
from electra.model.heads import MLMHead

NOISE = 1.0  # standard deviation, relative to the root mean square of the divided weights


@torch.no_grad()
def load_widened_weights(model: Electra, weights: dict[str, Tensor], seed: int) -> None:
    """Set the parameters of a model from the weights of an equal or narrower one, by name; a parameter without a weight
    keeps its value."""
    generator = torch.Generator().manual_seed(seed)
    num_matrices = count_fused_matrices(model)
    mlm_norms = {module.norm.weight for module in model.modules() if isinstance(module, MLMHead)}
    for name, parameter in model.named_parameters():
        if name not in weights:
            continue
        matrices = weights[name].chunk(num_matrices.get(parameter, 1))
        shape = torch.Size([len(parameter) // len(matrices), *parameter.shape[1:]])
        parameter.copy_(torch.cat([widen(matrix, shape, generator) for matrix in matrices]))
        if parameter in mlm_norms:
            # The modern MLM head multiplies its states by the projection of the embeddings: all copies add up there.
            parameter.div_(len(parameter) / len(weights[name]))


def count_fused_matrices(model: nn.Module) -> dict[nn.Parameter, int]:
    """The number of matrices (or biases) in parameters that hold several, one after the other."""
    counts: dict[nn.Parameter, int] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            counts |= dict.fromkeys(module.qkv.parameters(), 3)
        if isinstance(module, GatedFeedForward):
            counts |= dict.fromkeys(module.up.parameters(), 2)
    return counts


def widen(weight: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """A weight [O, I] or [O] with copies of its outputs and inputs, so that it has the given shape."""
    output_copies = shape[0] // len(weight)
    if weight.dim() == 1 or weight.shape[1] == shape[1]:
        return weight.repeat(output_copies, *[1] * (weight.dim() - 1))
    return torch.cat([widen_inputs(weight, shape[1] // weight.shape[1], generator) for _ in range(output_copies)])


def widen_inputs(weight: Tensor, copies: int, generator: torch.Generator) -> Tensor:
    """A weight [O, copies · I] that maps copies of an input, side by side, to what `weight` [O, I] maps it to."""
    divided = weight.expand(copies, *weight.shape) / copies
    noise = torch.randn(divided.shape, generator=generator) * (NOISE * divided.square().mean().sqrt())
    return (divided + noise - noise.mean(0)).transpose(0, 1).flatten(1)


def stack_layers(weights: dict[str, Tensor], before: ElectraConfig, after: ElectraConfig) -> dict[str, Tensor]:
    """The weights of `before` with further layers, so that its encoders have as many as those of `after`: layer i is
    layer i mod n of the n there are. The modern style's first layer has no attention norm: those of its copies have no
    weights here and keep their initial ones."""
    stacked, deeper = dict(weights), after.encoder_configs()
    for part, encoder in before.encoder_configs().items():
        layers = deeper[part].layers if part in deeper else 0
        for layer in range(encoder.layers, layers):
            target, source = (f"{part}.encoder.layers.{number}." for number in (layer, layer % encoder.layers))
            names = [name.removeprefix(source) for name in weights if name.startswith(source)]
            stacked |= {target + name: weights[source + name] for name in names}
    return stacked
