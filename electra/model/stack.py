"""Stacking: the layers of a deeper encoder start as repetitions of those of a trained one (Gong et al. 2019, Efficient
Training of BERT by Progressively Stacking). Its outputs differ from those of the trained encoder."""

from torch import Tensor

from electra.model.config import ElectraConfig


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
