"""Output heads of generator and discriminator."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from electra.kernels.dispatch import linear_gelu
from electra.model.config import EncoderConfig
from electra.model.encoder import initialize, linear, norm


class MLMHead(nn.Module):
    """Transforms hidden states for the product with the tied token table, and has the output bias (p_G of section 2).

    The modern head keeps the hidden size and applies the encoder's projection before the product, so that table and
    projection fold into one table, as ModernBertForMaskedLM has it.
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
    """Logit of D(x, t) of section 2 for every token; the modern head normalises before the last layer."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = linear(config, config.width, config.width)
        self.norm = norm(config, config.width) if config.is_modern() else nn.Identity()
        self.classifier = nn.Linear(config.width, 1)
        initialize(self, config.init_std)
        nn.init.xavier_uniform_(self.classifier.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [B, L] from `hidden` [B, L, D]: positive for replaced tokens."""
        return self.classifier(self.norm(linear_gelu(self.dense, hidden))).squeeze(-1)


class CopyGate(nn.Module):
    """Mixes a copy of the input token with the softmax over the vocabulary (All-Tokens MLM)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, 1)
        initialize(self, config.init_std)

    def forward(self, hidden: Tensor, log_probs: Tensor, is_input: Tensor) -> Tensor:
        """log(gate · [x is the input] + (1 − gate) · p(x)) for tokens x [..., X], of which `log_probs` has log p(x)."""
        gate = self.dense(hidden).float()  # [..., 1]
        predicted = functional.logsigmoid(-gate) + log_probs
        return torch.where(is_input, torch.logaddexp(functional.logsigmoid(gate), predicted), predicted)


class BaselineHead(nn.Module):
    """Predicts the generator's reward (adversarial training, appendix F)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, 1)
        initialize(self, config.init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [B, M] from `hidden` [B, M, D]: positive where the discriminator is predicted to be right."""
        return self.dense(hidden).squeeze(-1)
