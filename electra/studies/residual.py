"""Whether layers add to the residual stream or replace it: norms of the outputs of attention and feed-forward.

docs/studies.md says how to read them."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from electra.data.loader import Batch
from electra.model.encoder import ClassicLayer, Encoder


@dataclass(frozen=True)
class LayerRatios:
    """The norm of each sublayer's output divided by that of the residual that it is added to, means over tokens."""

    layer: int  # from 1
    attention: float
    feedforward: float


@torch.no_grad()
def residual_ratios(encoder: Encoder, batches: Iterable[Batch]) -> list[LayerRatios]:
    """The ratios of each layer on the tokens of `batches`; the encoder must be in fp32, whose layers are not fused."""
    norms: dict[str, Tensor] = {}  # [B, L] of the residual, by branch
    ratios: dict[str, list[Tensor]] = defaultdict(list)  # [tokens] of each batch, by branch
    is_token = torch.empty(0)  # [B, L] of the batch

    def residual_hook(branch: str) -> Callable[..., None]:
        return lambda module, inputs: norms.update({branch: inputs[0].norm(dim=-1)})

    def branch_hook(branch: str) -> Callable[..., None]:
        return lambda module, inputs, output: ratios[branch].append((output.norm(dim=-1) / norms[branch])[is_token])

    hooks = []
    for number, layer in enumerate(encoder.layers, 1):
        for name in ("attention", "feedforward"):
            branch = layer.get_submodule(name)
            # post-norm: the branch reads the residual itself; pre-norm: its norm does
            reader = branch if isinstance(layer, ClassicLayer) else layer.get_submodule(f"{name}_norm")
            hooks.append(reader.register_forward_pre_hook(residual_hook(f"{number}.{name}")))
            hooks.append(branch.register_forward_hook(branch_hook(f"{number}.{name}")))
    try:
        for batch in batches:
            mask = batch.attention_mask
            is_token = torch.ones_like(batch.input_ids, dtype=torch.bool) if mask is None else mask.bool()
            encoder(batch.input_ids, **batch.encoder_inputs())
    finally:
        for hook in hooks:
            hook.remove()
    return [
        LayerRatios(
            number, *(torch.cat(ratios[f"{number}.{name}"]).mean().item() for name in ("attention", "feedforward"))
        )
        for number in range(1, len(encoder.layers) + 1)
    ]
