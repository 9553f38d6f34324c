"""Output heads of generator and discriminator."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from electra.kernels.dispatch import can_fuse_mlm_head, linear_gelu, mlm_loss_and_sample
from electra.model.config import EncoderConfig
from electra.model.encoder import create_linear, create_norm, initialize_parameters
from electra.random import Purpose, sample_from_logits


class TokenPredictions:
    """Predicted distributions over the vocabulary at M positions of each row.

    Vocabulary logits are by far the largest tensor of a step, so they are only computed when they are used. On a GPU in
    half precision and on a CPU in fp32, the MLM loss and a sample come from one pass over them.
    """

    def __init__(self, hidden: Tensor, states: Tensor, table: Tensor, bias: Tensor) -> None:
        self.hidden = hidden  # [B, M, D] final hidden states of the encoder
        self.states = states  # [B, M, E] hidden states transformed by the MLM head
        self.table = table  # [V, E] token embeddings
        self.bias = bias  # [V]
        self.cached_logits: Tensor | None = None
        self.cached_loss: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """[B, M, V]"""
        if self.cached_logits is None:
            self.cached_logits = functional.linear(self.states, self.table, self.bias)
        return self.cached_logits

    def sampling_logits(self, labels: Tensor, temperature: float, disallow_correct: bool) -> Tensor:
        """Logits [B, M, V] of the distribution to sample from; `disallow_correct` excludes `labels` [B, M]."""
        logits = self.logits.float() / temperature  # half precision would overflow with Gumbel noise
        return logits.scatter(2, labels[:, :, None], float("-inf")) if disallow_correct else logits

    def sample(
        self,
        labels: Tensor,
        weights: Tensor,
        keys_for: Callable[[Purpose], Tensor],
        temperature: float = 1.0,
        disallow_correct: bool = False,
    ) -> Tensor:
        """Tokens [B, M] sampled with the random keys of each purpose; `labels` and `weights` as in `mlm_loss_sum`."""
        keys = keys_for(Purpose.SAMPLE_BLOCK), keys_for(Purpose.SAMPLE_TOKEN)
        if temperature == 1 and not disallow_correct and self.can_fuse():
            losses, sampled = mlm_loss_and_sample(self.states, self.table, self.bias, labels, *keys)
            self.cached_loss = (losses * weights).sum()
            return sampled
        return sample_from_logits(self.sampling_logits(labels, temperature, disallow_correct), *keys)

    def mlm_loss_sum(self, labels: Tensor, weights: Tensor) -> Tensor:
        """Sum of the negative log-likelihoods of `labels` [B, M] at positions with weight 1 in `weights` [B, M]."""
        if self.cached_loss is None:
            self.cached_loss = (self.mlm_losses(labels) * weights).sum()
        return self.cached_loss

    def mlm_losses(self, labels: Tensor) -> Tensor:
        """The negative log-likelihood of each of `labels` [B, M]."""
        if self.can_fuse():
            keys = labels.new_zeros(len(labels), 2)  # the sample is not used
            return mlm_loss_and_sample(self.states, self.table, self.bias, labels, keys, keys)[0]
        logits = self.logits.float().flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)

    def can_fuse(self) -> bool:
        """Whether loss and sample can be computed without the logits."""
        return self.cached_logits is None and can_fuse_mlm_head(self.hidden)


class MLMHead(nn.Module):
    """Transforms hidden states for the product with the tied token table, and has the output bias (p_G of section 2).

    The modern head keeps the hidden size and applies the encoder's projection before the product, so that table and
    projection fold into one table, as ModernBertForMaskedLM has it.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.width if config.is_modern() else config.embedding_width
        self.dense = create_linear(config, config.width, width)
        self.norm = create_norm(config, width)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        initialize_parameters(self, config.init_std)

    def forward(self, hidden: Tensor, projection: Tensor | None = None) -> Tensor:
        """States [..., E] to compare with the token table; a modern encoder has a `projection` [D, E] before it."""
        states = self.norm(linear_gelu(self.dense, hidden))
        return states if projection is None else states @ projection


class RTDHead(nn.Module):
    """Logit of D(x, t) of section 2 for every token; the modern head normalises before the last layer."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = create_linear(config, config.width, config.width)
        self.norm = create_norm(config, config.width) if config.is_modern() else nn.Identity()
        self.classifier = nn.Linear(config.width, 1)
        initialize_parameters(self, config.init_std)
        nn.init.xavier_uniform_(self.classifier.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [B, L] from `hidden` [B, L, D]: positive for replaced tokens."""
        return self.classifier(self.norm(linear_gelu(self.dense, hidden))).squeeze(-1)


class CopyGate(nn.Module):
    """Mixes a copy of the input token with the softmax over the vocabulary (All-Tokens MLM)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, 1)
        initialize_parameters(self, config.init_std)

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
        initialize_parameters(self, config.init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [B, M] from `hidden` [B, M, D]: positive where the discriminator is predicted to be right."""
        return self.dense(hidden).squeeze(-1)
