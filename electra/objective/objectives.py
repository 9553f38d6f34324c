"""What is learnt: one function per objective, each beside its section of the paper.

An objective takes the pair, a batch and settings, and returns the losses that the trainer is to bring down.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from electra.errors import ConfigError
from electra.model.electra import Electra, Generator
from electra.objective.losses import Counts, Loss, Losses
from electra.objective.masking import Masked, MaskingConfig, mask
from electra.objective.randomness import Purpose, gumbel, row_keys
from electra.text.batches import Batch
from electra.text.vocabulary import Vocabulary

BLOCK = 128  # entries of the vocabulary that are drawn among together


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(MaskingConfig):
    """How the pair is trained: what is masked, how fills are drawn, how losses are weighed."""

    seed: int = 0
    """Weights, order of the text, masks and samples are functions of it."""
    discriminator_weight: float = 50.0
    """λ: the binary loss is far smaller than the one over the vocabulary."""
    temperature: float = 1.0
    """Of the generator's distribution when it is sampled; below 1 it samples likelier tokens."""
    disallow_correct: bool = False
    """Never sample the original token."""
    right_guess: Literal["original", "replaced"] = "original"
    """What a sample that equals the original counts as; `replaced` is worse, for comparison."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise ConfigError(f"temperature is {self.temperature}; it must be above 0, usually 1")
        if self.discriminator_weight < 0:
            raise ConfigError(f"discriminator_weight is {self.discriminator_weight}; it must be at least 0, usually 50")


@dataclass(frozen=True, kw_only=True)
class Settings(ObjectiveConfig):
    """What an objective is called with: the configuration, and the vocabulary of the text."""

    vocabulary: Vocabulary = field(default_factory=Vocabulary)


@dataclass(frozen=True)
class Corrupted:
    """Text the discriminator reads: the generator's samples stand where tokens were masked."""

    input_ids: Tensor  # [B, L]
    is_replaced: Tensor  # [B, L] bool; where the sample happened to be right, as `right_guess` says


def replaced_token_detection(electra: Electra, batch: Batch, settings: Settings) -> Losses:
    """Joint training (section 2): the generator fills blanks, the discriminator finds its fills."""
    generator, discriminator = electra.pair()
    check_vocabulary(generator, settings.vocabulary)
    masked = mask(batch, settings.vocabulary, settings, settings.seed)
    guesses = generator(masked.input_ids, *batch.surroundings(), at=masked.positions)  # [B, M, V]
    corrupted = corrupt(batch.input_ids, masked, sample(guesses, masked, batch, settings), settings.right_guess)
    verdicts = discriminator(corrupted.input_ids, *batch.surroundings())  # [B, L]
    return {
        "generator": mlm_loss(guesses, masked),
        "discriminator": rtd_loss(verdicts, corrupted, batch.attention_mask, settings.discriminator_weight),
    }


def masked_language_modeling(electra: Electra, batch: Batch, settings: Settings) -> Losses:
    """BERT's objective, without its next-sentence task: the generator alone fills blanks."""
    generator = electra.the_generator()
    check_vocabulary(generator, settings.vocabulary)
    masked = mask(batch, settings.vocabulary, settings, settings.seed)
    guesses = generator(masked.input_ids, *batch.surroundings(), at=masked.positions)  # [B, M, V]
    return {"generator": mlm_loss(guesses, masked)}


def check_vocabulary(generator: Generator, vocabulary: Vocabulary) -> None:
    """Refuse text of another vocabulary than the model's."""
    entries = generator.encoder.config.vocabulary
    if vocabulary.size != entries:
        raise ConfigError(
            f"the text has a vocabulary of {vocabulary.size:,} entries but the model one of {entries:,}; "
            f"give Settings the vocabulary of the tokenizer that the model was built for"
        )


def count_masked(batch: Batch, settings: Settings) -> Counts:
    """What the generator's loss is divided by."""
    return {"generator": mask(batch, settings.vocabulary, settings, settings.seed).weights.sum()}


def count_masked_and_tokens(batch: Batch, settings: Settings) -> Counts:
    """What the generator's and the discriminator's loss are divided by."""
    return count_masked(batch, settings) | {"discriminator": batch.tokens().sum()}


@dataclass(frozen=True)
class Objective:
    """An objective: its losses, what they are divided by (known before any weight is), and whom it trains."""

    losses: Callable[[Electra, Batch, Settings], Losses]
    counts: Callable[[Batch, Settings], Counts]
    has_discriminator: bool


OBJECTIVES = {
    "rtd": Objective(replaced_token_detection, count_masked_and_tokens, has_discriminator=True),
    "mlm": Objective(masked_language_modeling, count_masked, has_discriminator=False),
}


@torch.no_grad()
def sample(guesses: Tensor, masked: Masked, batch: Batch, settings: Settings) -> Tensor:
    """x̂ ~ p_G at each slot [B, M], in fp32 whatever came: half precision overflows in the noise.

    In two draws, first a block of the vocabulary, then a token in it: the same distribution as one draw over all
    entries, from a hundredth of the noise.
    """
    logits = guesses.float() / settings.temperature  # [B, M, V]
    if settings.disallow_correct:
        logits = logits.scatter(2, masked.originals[:, :, None], float("-inf"))
    blocks = functional.pad(logits, (0, -logits.shape[2] % BLOCK), value=float("-inf")).unflatten(2, (-1, BLOCK))
    block = gumbel_max(blocks.logsumexp(3), row_keys(settings.seed, batch.step, batch.rows, Purpose.SAMPLE_BLOCK))
    within = blocks.gather(2, block[:, :, None, None].expand(-1, -1, 1, BLOCK)).squeeze(2)  # [B, M, BLOCK]
    return block * BLOCK + gumbel_max(within, row_keys(settings.seed, batch.step, batch.rows, Purpose.SAMPLE_TOKEN))


def gumbel_max(logits: Tensor, keys: Tensor) -> Tensor:
    """A draw from softmax(logits) over the last of [B, M, N], with the noise of each row's key: [B, M]."""
    places, entries = logits.shape[1:]
    return (logits + gumbel(keys, places * entries).unflatten(1, (places, entries))).argmax(2)


def corrupt(input_ids: Tensor, masked: Masked, sampled: Tensor, right_guess: str = "original") -> Corrupted:
    """Write `sampled` [B, M] over `input_ids` [B, L] where tokens were masked."""
    is_used = masked.weights > 0
    corrupted = input_ids.scatter(1, masked.positions, torch.where(is_used, sampled, masked.originals))
    if right_guess == "replaced":
        return Corrupted(corrupted, torch.zeros_like(input_ids, dtype=torch.bool).scatter(1, masked.positions, is_used))
    return Corrupted(corrupted, is_replaced=corrupted != input_ids)


def mlm_loss(guesses: Tensor, masked: Masked) -> Loss:
    """L_MLM: negative log-likelihood of the originals at the masked positions."""
    losses = functional.cross_entropy(guesses.float().flatten(0, 1), masked.originals.flatten(), reduction="none")
    return Loss((losses * masked.weights.flatten()).sum(), masked.weights.sum())


def rtd_loss(verdicts: Tensor, corrupted: Corrupted, attention_mask: Tensor | None, weight: float) -> Loss:
    """L_Disc: binary cross-entropy over every token that is not padding."""
    losses = functional.binary_cross_entropy_with_logits(
        verdicts.float(), corrupted.is_replaced.float(), reduction="none"
    )
    is_token = torch.ones_like(losses) if attention_mask is None else attention_mask.float()
    return Loss((losses * is_token).sum(), is_token.sum(), weight)
