"""What is learnt: one function per objective, each beside its section of the paper.

An objective takes the pair, a batch and settings, and returns the losses that the trainer is to bring down.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from cyclopts import Parameter
from torch import Tensor
from torch.nn import functional

from electra.data.loader import Batch
from electra.data.tokenizer import Vocabulary
from electra.errors import ConfigError
from electra.kernels import dispatch
from electra.model.config import Head
from electra.model.electra import Electra, MaskedLanguageModel
from electra.objectives.losses import Counts, Loss, Losses
from electra.objectives.masking import Masked, MaskingConfig, mask
from electra.random import BLOCK, Purpose, gumbel, random_uniform, row_keys

if TYPE_CHECKING:
    from electra.kernels.side_stream import GeneratorStream  # imports torch's compiler

SAMPLING = (Purpose.SAMPLE_BLOCK, Purpose.SAMPLE_TOKEN)

ObjectiveName = Literal["rtd", "electra-15", "replace-mlm", "all-tokens-mlm", "mlm", "adversarial", "frozen-rtd"]
GeneratorName = Literal["model", "uniform", "unigram"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Pre-training objective."""

    name: Annotated[ObjectiveName, Parameter(name="--objective")] = "rtd"
    """rtd: replaced token detection, the generator and discriminator of the paper; electra-15: rtd at the masked
    positions only; replace-mlm: predict the masked tokens from text with generator samples; all-tokens-mlm: the same for
    all tokens, with a copy mechanism; mlm: a masked language model (BERT: --mask-token-probability 0.8
    --random-token-probability 0.1); adversarial: the generator maximises the discriminator's loss by REINFORCE;
    frozen-rtd: rtd without training the generator (second stage of two-stage training)."""
    generator: GeneratorName = "model"
    """What samples the replacements: the generator, or without one a uniform or unigram distribution over tokens."""
    discriminator_weight: float = 50.0
    """λ: the binary loss is far smaller than the one over the vocabulary."""
    temperature: float = 1.0
    """Of the generator's distribution when it is sampled; below 1 it samples likelier tokens."""
    disallow_correct: bool = False
    """Never sample the original token."""
    correct_sample_label: Literal["original", "replaced"] = "original"
    """What a sample that equals the original counts as; `replaced` is worse, for comparison."""
    entropy_bonus: float = 0.0
    """adversarial: what the generator is paid for each nat of entropy; policy gradients alone leave it little."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"temperature is {self.temperature}; it must be above 0, usually 1")
        if self.discriminator_weight < 0:
            raise ConfigError(f"discriminator_weight is {self.discriminator_weight}; it must be at least 0, usually 50")
        if self.entropy_bonus < 0:
            raise ConfigError(f"entropy_bonus is {self.entropy_bonus}; it must be at least 0, for instance 0.01")


@dataclass(frozen=True, kw_only=True)
class Settings(ObjectiveConfig, MaskingConfig):
    """What an objective is called with: the configuration, and the vocabulary of the text."""

    seed: int = 0
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    frequencies: Tensor | None = field(default=None, compare=False)
    """Probabilities of tokens [V] that fill blanks where there is no generator; None: the generator fills them."""
    detour: "GeneratorStream | None" = field(default=None, compare=False)
    """The stream on which the generator works, where there is one."""


@dataclass(frozen=True)
class Corrupted:
    """Text the discriminator reads: the generator's samples stand where tokens were masked."""

    input_ids: Tensor  # [B, L]
    is_replaced: Tensor  # [B, L] bool; where the sample happened to be right, as `correct_sample_label` says


@dataclass(frozen=True)
class Filled:
    """What stands where tokens were masked, and what is lost by whom filled them in."""

    sampled: Tensor  # [B, M]
    losses: Losses  # the generator's; empty where there is none


def replaced_token_detection(electra: Electra, batch: Batch, settings: Settings) -> Losses:
    """Joint training (section 2): the generator fills blanks, the discriminator finds its fills."""
    masked = mask_text(batch, electra, settings)
    filled = fill(electra, masked, batch, settings)
    corrupted = corrupt(batch.input_ids, masked, filled.sampled, settings.correct_sample_label)
    verdicts = electra.require_discriminator()(corrupted.input_ids, **batch.encoder_inputs())  # [B, L]
    losses = rtd_losses(verdicts, corrupted)
    return filled.losses | {"discriminator": mean_over(losses, is_token(batch), settings.discriminator_weight)}


def electra_15(electra: Electra, batch: Batch, settings: Settings) -> Losses:
    """ELECTRA 15 % (section 3.5): the discriminator is asked about the masked positions only."""
    masked = mask_text(batch, electra, settings)
    filled = fill(electra, masked, batch, settings)
    corrupted = corrupt(batch.input_ids, masked, filled.sampled, settings.correct_sample_label)
    verdicts = electra.require_discriminator()(corrupted.input_ids, **batch.encoder_inputs())  # [B, L]
    losses = rtd_losses(verdicts, corrupted).gather(1, masked.positions)  # [B, M]
    return filled.losses | {"discriminator": mean_over(losses, masked.weights, settings.discriminator_weight)}


def replace_mlm(electra: Electra, batch: Batch, settings: Settings) -> Losses:
    """Replace MLM (section 3.5): masked language modelling of text that has fills instead of [MASK]."""
    masked = mask_text(batch, electra, settings)
    filled = fill(electra, masked, batch, settings)
    corrupted = corrupt(batch.input_ids, masked, filled.sampled)
    model = electra.require_mlm()
    hidden = model.read(corrupted.input_ids, **batch.encoder_inputs(), at=masked.positions)  # [B, M, D]
    return filled.losses | {"replace_mlm": guessing_loss(model, hidden, masked, batch, settings)}


def all_tokens_mlm(electra: Electra, batch: Batch, settings: Settings) -> Losses:
    """All-Tokens MLM (section 3.5): as Replace MLM, but every token is predicted, and may be copied."""
    model = electra.require_copy_mlm()
    masked = mask_text(batch, electra, settings)
    filled = fill(electra, masked, batch, settings)
    corrupted = corrupt(batch.input_ids, masked, filled.sampled)
    hidden = model.read(corrupted.input_ids, **batch.encoder_inputs())  # [B, L, D]
    likelihoods = model.log_likelihood(hidden, corrupted.input_ids, labels=batch.input_ids)  # [B, L]
    return filled.losses | {"all_tokens_mlm": mean_over(-likelihoods, is_token(batch))}


def masked_language_modeling(electra: Electra, batch: Batch, settings: Settings) -> Losses:
    """BERT's objective, without its next-sentence task: the generator alone fills blanks."""
    generator, masked = electra.require_generator(), mask_text(batch, electra, settings)
    hidden = generator.read(masked.input_ids, **batch.encoder_inputs(), at=masked.positions)  # [B, M, D]
    return {"generator": guessing_loss(generator, hidden, masked, batch, settings)}


def adversarial(electra: Electra, batch: Batch, settings: Settings) -> Losses:
    """Adversarial training (section 3.2, appendix F): the generator is paid what its fills cost the discriminator.

    The payment for a fill is the discriminator's loss at its position alone. What a baseline expected of the position
    is taken off: it foretells how surely the discriminator will be right, and learns that by cross-entropy. It reads
    the generator's states without moving them.
    """
    generator, discriminator = electra.pair()
    masked = mask_text(batch, electra, settings)
    hidden = generator.read(masked.input_ids, **batch.encoder_inputs(), at=masked.positions)  # [B, M, D]
    guesses = generator.guess(hidden)  # [B, M, V]
    sampled = sample(guesses, masked, batch, settings)
    corrupted = corrupt(batch.input_ids, masked, sampled, settings.correct_sample_label)
    verdicts = discriminator(corrupted.input_ids, **batch.encoder_inputs())  # [B, L]
    losses = rtd_losses(verdicts, corrupted)
    rewards = losses.detach().gather(1, masked.positions)  # [B, M]
    foretold = electra.require_baseline()(hidden.detach()).float()  # [B, M] logits
    advantages = rewards - functional.softplus(-foretold).detach()  # R − b, where b = −log sigmoid(w·h)
    return {
        "generator": policy_loss(sampling_logits(guesses, masked, settings), sampled, advantages, masked, settings),
        "baseline": baseline_loss(foretold, rewards, masked),
        "discriminator": mean_over(losses, is_token(batch), settings.discriminator_weight),
    }


def frozen_generator_detection(electra: Electra, batch: Batch, settings: Settings) -> Losses:
    """Stage two of two-stage training (section 3.2): only the discriminator learns; the generator stays as it is.

    Where there is dropout it is sampled with it, as in joint training."""
    generator, discriminator = electra.pair()
    masked = mask_text(batch, electra, settings)
    with torch.no_grad():
        guesses = generator(masked.input_ids, **batch.encoder_inputs(), at=masked.positions)  # [B, M, V]
    corrupted = corrupt(
        batch.input_ids, masked, sample(guesses, masked, batch, settings), settings.correct_sample_label
    )
    verdicts = discriminator(corrupted.input_ids, **batch.encoder_inputs())  # [B, L]
    losses = rtd_losses(verdicts, corrupted)
    return {"discriminator": mean_over(losses, is_token(batch), settings.discriminator_weight)}


def count_masked(batch: Batch, settings: Settings) -> Counts:
    """What losses over the masked positions are divided by, whoever's they are."""
    count = mask(batch, settings.vocabulary, settings, settings.seed).weights.sum()
    return dict.fromkeys(("generator", "baseline", "discriminator", "replace_mlm"), count)


def count_masked_and_tokens(batch: Batch, settings: Settings) -> Counts:
    """What losses are divided by where the discriminator, or the model in its place, is asked about every token."""
    return count_masked(batch, settings) | dict.fromkeys(("discriminator", "all_tokens_mlm"), batch.lengths().sum())


@dataclass(frozen=True)
class Objective:
    """An objective: its losses, what they are divided by (known before any weight is), and what models it needs."""

    losses: Callable[[Electra, Batch, Settings], Losses]
    counts: Callable[[Batch, Settings], Counts]
    head: Head | None  # of the discriminator; None: there is none
    needs_generator: bool = False  # a model: drawing fills by frequency will not do
    has_baseline: bool = False
    is_frozen: bool = False  # the generator, which must have been trained before


OBJECTIVES: dict[ObjectiveName, Objective] = {
    "rtd": Objective(replaced_token_detection, count_masked_and_tokens, head="rtd"),
    "electra-15": Objective(electra_15, count_masked, head="rtd"),
    "replace-mlm": Objective(replace_mlm, count_masked, head="mlm"),
    "all-tokens-mlm": Objective(all_tokens_mlm, count_masked_and_tokens, head="copy_mlm"),
    "mlm": Objective(masked_language_modeling, count_masked, head=None, needs_generator=True),
    "adversarial": Objective(adversarial, count_masked_and_tokens, head="rtd", needs_generator=True, has_baseline=True),
    "frozen-rtd": Objective(
        frozen_generator_detection, count_masked_and_tokens, head="rtd", needs_generator=True, is_frozen=True
    ),
}


def mask_text(batch: Batch, electra: Electra, settings: Settings) -> Masked:
    """Step 1, by the run's seed; refuses text of another vocabulary than the model's."""
    for part in (electra.generator, electra.discriminator):
        entries = settings.vocabulary.size if part is None else part.encoder.config.vocab_size
        if settings.vocabulary.size != entries:
            raise ConfigError(
                f"the text has a vocabulary of {settings.vocabulary.size:,} entries but the model one of {entries:,}; "
                f"give Settings the vocabulary of the tokenizer that the model was built for"
            )
    return mask(batch, settings.vocabulary, settings, settings.seed)


def fill(electra: Electra, masked: Masked, batch: Batch, settings: Settings) -> Filled:
    """Steps 2 and 3: the generator guesses, and is sampled from; or tokens are drawn by their frequency."""
    if settings.frequencies is not None:
        return Filled(draw(settings.frequencies, masked, batch, settings), losses={})
    if settings.detour is None:
        return guess_and_sample(electra.require_generator(), masked, batch, settings)
    settings.detour.enter()
    filled = guess_and_sample(electra.require_generator(), masked, batch, settings)
    settings.detour.join()
    return filled


def guess_and_sample(generator: MaskedLanguageModel, masked: Masked, batch: Batch, settings: Settings) -> Filled:
    """What the generator puts where tokens were masked, and what it loses by it."""
    hidden = generator.read(masked.input_ids, **batch.encoder_inputs(), at=masked.positions)  # [B, M, D]
    if goes_in_one_pass(hidden, settings):
        return in_one_pass(generator, hidden, masked, batch, settings)
    guesses = generator.guess(hidden)  # [B, M, V]
    return Filled(sample(guesses, masked, batch, settings), {"generator": mlm_loss(guesses, masked)})


def guessing_loss(
    generator: MaskedLanguageModel, hidden: Tensor, masked: Masked, batch: Batch, settings: Settings
) -> Loss:
    """What is lost by guesses from hidden states [B, M, D], of which no sample is wanted."""
    if goes_in_one_pass(hidden, settings):  # the sample costs next to nothing
        return in_one_pass(generator, hidden, masked, batch, settings).losses["generator"]
    return mlm_loss(generator.guess(hidden), masked)


def goes_in_one_pass(hidden: Tensor, settings: Settings) -> bool:
    """Whether loss and samples can be had together: on a GPU in half precision, from one distribution."""
    return dispatch.can_fuse_mlm_head(hidden) and settings.temperature == 1 and not settings.disallow_correct


def in_one_pass(
    generator: MaskedLanguageModel, hidden: Tensor, masked: Masked, batch: Batch, settings: Settings
) -> Filled:
    """The same, with the logits read once."""
    states, table = generator.transform(hidden), generator.encoder.embeddings.token_table()
    keys = (row_keys(settings.seed, batch.step, batch.row_ids, purpose) for purpose in SAMPLING)
    losses, sampled = dispatch.mlm_loss_and_sample(states, table, generator.head.bias, masked.originals, *keys)
    return Filled(sampled, {"generator": mean_over(losses, masked.weights)})


def draw(frequencies: Tensor, masked: Masked, batch: Batch, settings: Settings) -> Tensor:
    """A token for each slot [B, M], by `frequencies` [V]."""
    keys = row_keys(settings.seed, batch.step, batch.row_ids, Purpose.SAMPLE_TOKEN)
    draws = random_uniform(keys, masked.positions.shape[1]).double()
    return torch.searchsorted(frequencies.double().cumsum(0), draws).clamp(max=len(frequencies) - 1)


@torch.no_grad()
def sample(guesses: Tensor, masked: Masked, batch: Batch, settings: Settings) -> Tensor:
    """x̂ ~ p_G at each slot [B, M], in fp32 whatever came: half precision overflows in the noise.

    In two draws, first a block of the vocabulary, then a token in it: the same distribution as one draw over all
    entries, from a hundredth of the noise.
    """
    logits = sampling_logits(guesses, masked, settings)  # [B, M, V]
    blocks = functional.pad(logits, (0, -logits.shape[2] % BLOCK), value=float("-inf")).unflatten(2, (-1, BLOCK))
    block_noise, token_noise = sampling_noise(guesses, batch, settings)
    block = (blocks.logsumexp(3) + block_noise).argmax(2)  # [B, M]
    within = blocks.gather(2, block[:, :, None, None].expand(-1, -1, 1, BLOCK)).squeeze(2)  # [B, M, BLOCK]
    return block * BLOCK + (within + token_noise).argmax(2)


def sampling_noise(guesses: Tensor, batch: Batch, settings: Settings) -> tuple[Tensor, Tensor]:
    """Gumbel noise for blocks of the vocabulary, and for tokens of the block that wins, for `guesses` [B, M, V].

    The highest of log-probabilities with Gumbel noise is a draw: [B, M, V / BLOCK] and [B, M, BLOCK]."""
    places, blocks = guesses.shape[1], -(-guesses.shape[2] // BLOCK)
    draws = zip(SAMPLING, (blocks, BLOCK), strict=True)
    keyed = ((row_keys(settings.seed, batch.step, batch.row_ids, purpose), entries) for purpose, entries in draws)
    first, second = (gumbel(keys, places * entries).unflatten(1, (places, entries)) for keys, entries in keyed)
    return first, second


def sampling_logits(guesses: Tensor, masked: Masked, settings: Settings) -> Tensor:
    """The logits [B, M, V] of the distribution that is sampled, which temperature and exclusion change."""
    logits = guesses.float() / settings.temperature
    return logits.scatter(2, masked.originals[:, :, None], float("-inf")) if settings.disallow_correct else logits


def corrupt(input_ids: Tensor, masked: Masked, sampled: Tensor, correct_sample_label: str = "original") -> Corrupted:
    """Write `sampled` [B, M] over `input_ids` [B, L] where tokens were masked."""
    is_used = masked.weights > 0
    corrupted = input_ids.scatter(1, masked.positions, torch.where(is_used, sampled, masked.originals))
    if correct_sample_label == "replaced":
        return Corrupted(corrupted, torch.zeros_like(input_ids, dtype=torch.bool).scatter(1, masked.positions, is_used))
    return Corrupted(corrupted, is_replaced=corrupted != input_ids)


def mlm_loss(guesses: Tensor, masked: Masked) -> Loss:
    """L_MLM: negative log-likelihood of the originals at the masked positions."""
    losses = functional.cross_entropy(guesses.float().flatten(0, 1), masked.originals.flatten(), reduction="none")
    return mean_over(losses, masked.weights.flatten())


def rtd_losses(verdicts: Tensor, corrupted: Corrupted) -> Tensor:
    """L_Disc of each token [B, L]: binary cross-entropy."""
    return functional.binary_cross_entropy_with_logits(
        verdicts.float(), corrupted.is_replaced.float(), reduction="none"
    )


def is_token(batch: Batch) -> Tensor:
    """1 at tokens, 0 at padding: [B, L]."""
    return (torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask).float()


def mean_over(losses: Tensor, weights: Tensor, weight: float = 1.0) -> Loss:
    """The mean of single losses over the places of weight 1, with a weight of its own among other losses."""
    return Loss((losses * weights).sum(), weights.sum(), weight)


def policy_loss(logits: Tensor, sampled: Tensor, advantages: Tensor, masked: Masked, settings: Settings) -> Loss:
    """REINFORCE: its gradient is, on average over samples, that of the expected payment, turned to a loss."""
    logs = logits.log_softmax(2)  # [B, M, V]
    chosen = logs.gather(2, sampled[:, :, None]).squeeze(2)  # [B, M]
    losses = -advantages * chosen
    if settings.entropy_bonus:
        losses = losses - settings.entropy_bonus * entropy(logs)
    return mean_over(losses, masked.weights)


def entropy(logs: Tensor) -> Tensor:
    """Of distributions given as log-probabilities [..., V], in nats; what cannot be adds nothing."""
    return -(logs.exp() * logs.masked_fill(logs == float("-inf"), 0.0)).sum(-1)


def baseline_loss(foretold: Tensor, rewards: Tensor, masked: Masked) -> Loss:
    """Cross-entropy between the foretold and the discriminator's probability of being right, exp(−reward)."""
    losses = functional.binary_cross_entropy_with_logits(foretold, (-rewards).exp(), reduction="none")
    return mean_over(losses, masked.weights)
