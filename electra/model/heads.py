"""What the models of a pair say of their encoders' hidden states."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from electra.model.encoder import EncoderConfig, initialize


class GeneratorHead(nn.Module):
    """p_G(x | masked) before the softmax: e(x)·transformed hidden state, plus a bias per vocabulary entry."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.embedding_width)
        self.norm = nn.LayerNorm(config.embedding_width, config.norm_epsilon)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        initialize(self, config.initial_std)

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        """Logits [..., V] of `hidden` [..., D]; `table` [V, E] is the encoder's own token table, so always tied."""
        return functional.linear(self.norm(functional.gelu(self.dense(hidden))), table, self.bias)


class DiscriminatorHead(nn.Module):
    """D(x, t) before the sigmoid: how surely each token was replaced."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.verdict = nn.Linear(config.width, 1)
        initialize(self, config.initial_std)
        nn.init.xavier_uniform_(self.verdict.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [B, L] of `hidden` [B, L, D]: positive where a token looks replaced."""
        return self.verdict(functional.gelu(self.dense(hidden))).squeeze(-1)


class CopyGate(nn.Module):
    """Between copying the token that is read and the softmax over the vocabulary (All-Tokens MLM)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, 1)
        initialize(self, config.initial_std)

    def forward(self, hidden: Tensor, likelihoods: Tensor, is_read: Tensor) -> Tensor:
        """log(gate · [x is read] + (1 − gate) · p(x)) of some tokens x [..., X]; `likelihoods` are their log p(x)."""
        gate = self.dense(hidden).float()  # [..., 1]
        spoken = functional.logsigmoid(-gate) + likelihoods
        return torch.where(is_read, torch.logaddexp(functional.logsigmoid(gate), spoken), spoken)


class BaselineHead(nn.Module):
    """What the generator expects before the discriminator is asked (adversarial training, appendix F)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, 1)
        initialize(self, config.initial_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [B, M] of `hidden` [B, M, D]: positive where the discriminator is expected to be right."""
        return self.dense(hidden).squeeze(-1)
