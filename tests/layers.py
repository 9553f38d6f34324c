"""Random layers for tests of kernels."""

import torch
from torch import Tensor

from electra.kernels import reference
from electra.model.config import EncoderConfig
from electra.model.encoder import ClassicLayer, cast_parameters


def random_layer(
    width: int, dropout: float = 0.0, attention_dropout: float = 0.0, *, rows: int = 37, length: int = 110,
    heads: int | None = None, device: str = "cpu",
) -> tuple[ClassicLayer, Tensor, Tensor, Tensor]:  # fmt: skip
    """A layer with random parameters, its input, the gradient of its output (both exact in bf16), and document ids."""
    torch.manual_seed(0)
    rates = {"dropout": dropout, "attention_dropout": attention_dropout}
    config = EncoderConfig(width=width, heads=heads or width // 64, feedforward=4 * width, **rates)
    layer = ClassicLayer(config).to(device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=1 if parameter.dim() == 1 else width**-0.5)
    hidden, grad_out = torch.randn(2, rows, length, width, device=device).bfloat16().float()
    return layer, hidden, grad_out, (torch.rand(rows, length, device=device) < 0.03).cumsum(1)


def reference_layer(
    layer: ClassicLayer, hidden: Tensor, document_ids: Tensor | None, seeds: Tensor | None,
    positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The layer's output by `reference.classic_layer`, with the dropout noise of the kernels."""
    return reference.classic_layer(
        hidden, cast_parameters(layer, hidden.dtype), document_ids, positions, seeds, heads=layer.attention.heads,
        attention_dropout=layer.attention.dropout, dropout=layer.dropout.p, epsilon=layer.attention_norm.eps,
    )  # fmt: skip
