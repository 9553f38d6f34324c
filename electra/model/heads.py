"""What the models of a pair say of their encoders' hidden states."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from electra.kernels.dispatch import linear_gelu
from electra.model.config import EncoderConfig
from electra.model.encoder import initialize, linear, norm


class MLMHead(nn.Module):
    """p_G(x | masked) before the softmax: e(x)·transformed hidden state, plus a bias per vocabulary entry.

    The modern head stays as wide as hidden states and meets the table through the encoder's own projection, so that
    both multiply out to one table, as ModernBertForMaskedLM has it.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.width if config.is_modern() else config.embedding_width
        self.dense = linear(config, config.width, width)
        self.norm = norm(config, width)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        initialize(self, config.init_std)

    def forward(self, hidden: Tensor, table: Tensor, projection: Tensor | None = None) -> Tensor:
        """Logits [..., V] of `hidden` [..., D]; `table` [V, E] is the encoder's own token table, so always tied.

        So is a modern encoder's `projection` [D, E]."""
        return functional.linear(self.transformed(hidden, projection), table, self.bias)

    def transformed(self, hidden: Tensor, projection: Tensor | None = None) -> Tensor:
        """What is compared with the entries of the table: [..., E]."""
        transformed = self.norm(linear_gelu(self.dense, hidden))
        return transformed if projection is None else transformed @ projection


class RTDHead(nn.Module):
    """D(x, t) before the sigmoid: how surely each token was replaced. The modern head has a norm before the verdict."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = linear(config, config.width, config.width)
        self.norm = norm(config, config.width) if config.is_modern() else nn.Identity()
        self.classifier = nn.Linear(config.width, 1)
        initialize(self, config.init_std)
        nn.init.xavier_uniform_(self.classifier.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [B, L] of `hidden` [B, L, D]: positive where a token looks replaced."""
        return self.classifier(self.norm(linear_gelu(self.dense, hidden))).squeeze(-1)


class CopyGate(nn.Module):
    """Between copying the token that is read and the softmax over the vocabulary (All-Tokens MLM)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, 1)
        initialize(self, config.init_std)

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
        initialize(self, config.init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [B, M] of `hidden` [B, M, D]: positive where the discriminator is expected to be right."""
        return self.dense(hidden).squeeze(-1)
