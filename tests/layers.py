"""A layer with made-up weights, and what it makes by plain operations with the noise of our kernels."""

import torch

from electra.model.config import EncoderConfig
from electra.model.encoder import ClassicLayer
from electra.random import scramble


def made_layer(
    width: int, dropout: float = 0.0, attention_dropout: float = 0.0, *, rows: int = 37, length: int = 110,
    heads: int | None = None, device: str = "cpu",
) -> tuple[ClassicLayer, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """A layer whose parameters all matter, hidden states and the gradient of what comes of them, and documents."""
    torch.manual_seed(0)
    rates = {"dropout": dropout, "attention_dropout": attention_dropout}
    config = EncoderConfig(width=width, heads=heads or width // 64, feedforward=4 * width, **rates)
    layer = ClassicLayer(config).to(device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=1 if parameter.dim() == 1 else width**-0.5)
    hidden, grown = torch.randn(2, rows, length, width, device=device).bfloat16().float()
    return layer, hidden, grown, (torch.rand(rows, length, device=device) < 0.03).cumsum(1)


def by_steps(
    layer: ClassicLayer, hidden: torch.Tensor, documents: torch.Tensor | None, seeds: torch.Tensor | None,
    at: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """A layer by plain operations, with the same noise; of tokens `at` [B, M] only, where these are given."""
    (B, L, D), H = hidden.shape, layer.attention.heads
    block = max(16, 2 ** (L - 1).bit_length())  # of the kernel: weights are numbered as if rows were so long
    after, second, within = (None, None, None) if seeds is None else seeds.tolist()
    wanted = torch.arange(L, device=hidden.device).expand(B, L) if at is None else at
    numbers = torch.arange(wanted.numel() * D, device=hidden.device).view(*wanted.shape, D)
    pairs = torch.arange(B * H * block * block, device=hidden.device).view(B, H, block, block)[:, :, :L, :L]
    query, key, value = (each.transpose(1, 2) for each in layer.attention.qkv(hidden).view(B, L, 3, H, -1).unbind(2))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5  # [B, H, L, L]
    if documents is not None:
        scores = scores.masked_fill(documents[:, None, :, None] != documents[:, None, None, :], float("-inf"))
    weights = scores.softmax(-1) * factors(within, pairs, layer.attention.dropout)
    mixed = (weights.to(value.dtype) @ value).transpose(1, 2).flatten(2)
    mixed, hidden = (each.gather(1, wanted[:, :, None].expand(-1, -1, D)) for each in (mixed, hidden))
    between = layer.attention.output(mixed) * factors(after, numbers, layer.dropout.p)
    hidden = layer.attention_norm(hidden + between)
    return layer.feedforward_norm(hidden + layer.feedforward(hidden) * factors(second, numbers, layer.dropout.p))


def factors(seed: int | None, numbers: torch.Tensor, dropout: float) -> torch.Tensor | float:
    """What the kernels' dropout multiplies by (`model.gpu.noise`)."""
    if seed is None or not dropout:
        return 1.0
    bits = scramble((scramble(numbers ^ scramble(seed)) + seed) % 2**32)
    return torch.where(bits < dropout * 2**32, 0.0, 1 / (1 - dropout))
