"""Step 1 of the method: which positions are masked, and what the generator reads there.

A row has a fixed number of slots M; slots that a shorter row does not need have weight 0. So every batch has one shape.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from electra.data.loader import Batch
from electra.data.tokenizer import Vocabulary
from electra.errors import ConfigError
from electra.random import Number, Purpose, random_bits, random_uniform, row_keys

MILLION = 1_000_000
Count = Literal["paper", "released"]


@dataclass(frozen=True, kw_only=True)
class MaskedShare:
    """How much is masked."""

    mask_fraction: float = 0.15
    """Share of a row's tokens that is masked."""
    mask_count: Count = "released"
    """How many of n tokens: `paper` ceil(p·n); `released` max(1, round(p·n)), at most int((p + .005)·length)."""

    def __post_init__(self) -> None:
        if not 0 < self.mask_fraction < 1:
            raise ConfigError(f"mask_fraction is {self.mask_fraction}; it must lie between 0 and 1, usually 0.15")


@dataclass(frozen=True, kw_only=True)
class MaskingConfig(MaskedShare):
    """How much is masked, and with what."""

    whole_word_masking: bool = False
    """Mask all pieces of a word or none."""
    mask_token_probability: float = 1.0
    """Of the chosen positions, the share that becomes [MASK] (released code: .85; BERT: .8)."""
    random_token_probability: float = 0.0
    """Of the chosen positions, the share that becomes a random token (BERT: .1); the rest keeps its token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            self.mask_token_probability < 0
            or self.random_token_probability < 0
            or self.mask_token_probability + self.random_token_probability > 1
        ):
            raise ConfigError(
                f"mask_token_probability {self.mask_token_probability} and random_token_probability {self.random_token_probability} are shares of the chosen "
                f"positions; both must be at least 0, and their sum at most 1"
            )


@dataclass(frozen=True)
class Masked:
    """Text the generator reads, and what it is asked for."""

    input_ids: Tensor  # [B, L] disguised at the chosen positions: by [MASK], or by shares another token or none
    positions: Tensor  # [B, M] no position twice in a row
    originals: Tensor  # [B, M] the tokens that stood there
    weights: Tensor  # [B, M] 1 where a slot is used, 0 where not


def masked_count(tokens: Tensor, length: int, config: MaskedShare) -> Tensor:
    """k, how many positions are masked in rows with so many `tokens`: the only place that decides it."""
    if config.mask_count == "paper":
        return paper_count(tokens, config).clamp(min=1)
    return (tokens.float() * config.mask_fraction).round().long().clamp(1, slots(length, config))  # halves to even


def slots(length: int, config: MaskedShare) -> int:
    """M, the slots of a row: as many as a row of `length` tokens may have masked."""
    if config.mask_count == "paper":
        return max(1, paper_count(length, config))
    return max(1, int((config.mask_fraction + 0.005) * length))


def paper_count(tokens: Number, config: MaskedShare) -> Number:
    """⌈p·n⌉ in integers: floating point would make 8 of 0.07 · 100."""
    return -(-tokens * int(MILLION * config.mask_fraction + 0.001) // MILLION)  # never a millionth too many


def mask(batch: Batch, vocabulary: Vocabulary, config: MaskingConfig, seed: int) -> Masked:
    """Choose positions of each row, never [CLS], [SEP], [MASK] or padding, and hide their tokens."""
    positions, weights = choose(batch, vocabulary, config, seed)
    originals = batch.input_ids.gather(1, positions)
    shown = disguise(originals, row_keys(seed, batch.step, batch.row_ids, Purpose.DISGUISE), vocabulary, config)
    input_ids = batch.input_ids.scatter(1, positions, torch.where(weights > 0, shown, originals))
    return Masked(input_ids, positions, originals, weights)


def choose(batch: Batch, vocabulary: Vocabulary, config: MaskingConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Positions [B, M] without replacement, and their weights [B, M]: each token draws a lot, the highest are taken."""
    length = batch.input_ids.shape[1]
    wanted = masked_count(batch.lengths(), length, config)[:, None]  # [B, 1]
    lots = random_bits(row_keys(seed, batch.step, batch.row_ids, Purpose.MASK), length)  # [B, L]
    lots = lots * length + torch.arange(length, device=lots.device)  # no two alike
    is_maskable = maskable(batch, vocabulary)
    if config.whole_word_masking:
        is_maskable = maskable_words(batch, is_maskable, lots, wanted)
    lots, positions = lots.masked_fill(~is_maskable, -1).topk(min(slots(length, config), length), dim=1)
    is_used = (lots >= 0) & (torch.arange(lots.shape[1], device=lots.device) < wanted)
    return positions, is_used.float()


def maskable(batch: Batch, vocabulary: Vocabulary) -> Tensor:
    """Where a token may be masked: [B, L] bool."""
    is_maskable = torch.ones_like(batch.input_ids, dtype=torch.bool)
    for never in vocabulary.unmaskable():
        is_maskable = is_maskable & (batch.input_ids != never)
    return is_maskable if batch.attention_mask is None else is_maskable & batch.attention_mask.bool()


def maskable_words(batch: Batch, is_maskable: Tensor, lots: Tensor, wanted: Tensor) -> Tensor:
    """The tokens [B, L] of whole words, drawn by `lots`, that together have at most `wanted` tokens a row.

    A word that does not fit into what is left is passed over for the next that does, for three rounds. So a word of
    more pieces than a row may have masked is never masked: in rows of 20 tokens, at 15 %, words of 4 and more.
    """
    word = word_numbers(batch, is_maskable)
    sizes = torch.zeros_like(word).scatter_add(1, word, is_maskable.long())  # [B, L] by word number
    order = lots.argsort(1)
    sizes = sizes.gather(1, order)
    is_taken = torch.zeros_like(is_maskable)
    for _ in range(3):
        left = wanted - (sizes * is_taken).sum(1, keepdim=True)
        fits = ~is_taken & (sizes <= left)
        is_taken = is_taken | fits & ((sizes * fits).cumsum(1) <= left)
    is_taken = torch.zeros_like(is_taken).scatter(1, order, is_taken)
    return is_maskable & is_taken.gather(1, word)


def word_numbers(batch: Batch, is_maskable: Tensor) -> Tensor:
    """The number of the word each token belongs to [B, L]; a special token, and what follows it, starts a word."""
    if batch.is_continuation is None:
        raise ConfigError("whole-word masking needs batches that know which tokens continue a word")
    continues = batch.is_continuation & is_maskable
    continues[:, 1:] &= is_maskable[:, :-1]
    continues[:, 0] = False
    return (~continues).long().cumsum(1) - 1


def disguise(originals: Tensor, keys: Tensor, vocabulary: Vocabulary, config: MaskingConfig) -> Tensor:
    """What the generator sees at the chosen positions: [MASK], a random token, or the original, by their shares."""
    places = originals.shape[1]
    draw, token = random_uniform(keys, 2 * places).split(places, dim=1)  # each [B, M]
    random_token = (token * vocabulary.size).long()
    shown = torch.where(draw < config.mask_token_probability + config.random_token_probability, random_token, originals)
    return torch.where(draw < config.mask_token_probability, vocabulary.mask_id, shown)
