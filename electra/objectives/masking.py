"""Step 1 of the method: the masked positions, and the generator's input.

Each row has a fixed number M of mask slots, with weight 0 where a row masks fewer, so all batches have the same shape.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from electra.data.loader import Batch
from electra.data.tokenizer import Vocabulary
from electra.errors import ConfigError
from electra.objectives.config import MaskingConfig
from electra.random import Number, Purpose, random_bits, random_uniform

MILLION = 1_000_000
WHOLE_WORD_ROUNDS = 3


@dataclass(frozen=True)
class Masked:
    """The generator's input and the tokens it predicts."""

    input_ids: Tensor  # [B, L] with [MASK] (or a random or the original token) at the masked positions
    positions: Tensor  # [B, M] all different within a row
    labels: Tensor  # [B, M] the original tokens
    weights: Tensor  # [B, M] 1 in used mask slots, 0 in unused ones


def num_masked(num_tokens: Tensor, length: int, config: MaskingConfig) -> Tensor:
    """k, the number of masked positions in rows of `length` with `num_tokens` [B] tokens."""
    if config.mask_count == "paper":
        return ceil_fraction(num_tokens, config.mask_fraction).clamp(min=1)
    rounded = (num_tokens.float() * config.mask_fraction).round().long()  # halves to even
    return rounded.clamp(1, max_masked(length, config))


def max_masked(length: int, config: MaskingConfig) -> int:
    """M, the largest number of masked positions in a row of `length` tokens."""
    if config.mask_count == "paper":
        return max(1, ceil_fraction(length, config.mask_fraction))
    return max(1, int((config.mask_fraction + 0.005) * length))


def ceil_fraction(number: Number, fraction: float) -> Number:
    """⌈fraction · number⌉ in integer arithmetic: in floating point ⌈0.07 · 100⌉ is 8."""
    return -(-number * int(MILLION * fraction + 0.001) // MILLION)  # + 0.001: int() must not round 69999.99… down


def mask(batch: Batch, config: MaskingConfig, vocabulary: Vocabulary, seed: int) -> Masked:
    """Mask random positions of each row, never [CLS], [SEP], [MASK] or padding."""
    positions, weights = choose_masked_positions(batch, config, vocabulary, seed)
    labels = batch.input_ids.gather(1, positions)
    keys = batch.random_keys(seed, Purpose.MASK_REPLACEMENTS)
    replacements = mask_replacements(labels, keys, config, vocabulary)
    input_ids = batch.input_ids.scatter(1, positions, torch.where(weights > 0, replacements, labels))
    return Masked(input_ids, positions, labels, weights)


def choose_masked_positions(
    batch: Batch, config: MaskingConfig, vocabulary: Vocabulary, seed: int
) -> tuple[Tensor, Tensor]:
    """Positions [B, M] drawn without replacement, those with the highest random scores, and their weights [B, M]."""
    length = batch.input_ids.shape[1]
    count = num_masked(batch.lengths(), length, config)[:, None]  # [B, 1]
    scores = random_bits(batch.random_keys(seed, Purpose.MASK_POSITIONS), length)  # [B, L]
    scores = scores * length + torch.arange(length, device=scores.device)  # no ties
    is_maskable = maskable_tokens(batch, vocabulary)
    if config.whole_word_masking:
        is_maskable = select_words_to_mask(batch, is_maskable, scores, count)
    slots = min(max_masked(length, config), length)
    scores, positions = scores.masked_fill(~is_maskable, -1).topk(slots, dim=1)  # [B, M]
    is_used = (scores >= 0) & (torch.arange(slots, device=scores.device) < count)
    return positions, is_used.float()


def count_masked(batch: Batch, config: MaskingConfig, vocabulary: Vocabulary, seed: int) -> Tensor:
    """[] the number of masked positions, the sum of the weights of `mask`, without choosing them."""
    if config.whole_word_masking:
        return choose_masked_positions(batch, config, vocabulary, seed)[1].sum()
    count = num_masked(batch.lengths(), batch.input_ids.shape[1], config)  # [B]
    return torch.minimum(maskable_tokens(batch, vocabulary).sum(1), count).sum()


def maskable_tokens(batch: Batch, vocabulary: Vocabulary) -> Tensor:
    """[B, L] bool, False at special tokens and padding."""
    is_maskable = torch.ones_like(batch.input_ids, dtype=torch.bool)
    for special_id in vocabulary.unmaskable_ids():
        is_maskable = is_maskable & (batch.input_ids != special_id)
    return is_maskable if batch.attention_mask is None else is_maskable & batch.attention_mask.bool()


def select_words_to_mask(batch: Batch, is_maskable: Tensor, scores: Tensor, count: Tensor) -> Tensor:
    """[B, L] bool, True at the tokens of random words that have at most `count` tokens together.

    A word that exceeds the remaining count is skipped for the next that does not, in three rounds. A word with more
    pieces than the row may mask is therefore never masked: at 15 % of 20 tokens, words of 4 and more pieces.
    """
    words = word_indices(batch, is_maskable)
    sizes = torch.zeros_like(words).scatter_add(1, words, is_maskable.long())  # [B, L] by word index
    order = scores.argsort(1)
    sizes = sizes.gather(1, order)
    is_selected = torch.zeros_like(is_maskable)
    for _ in range(WHOLE_WORD_ROUNDS):
        remaining = count - (sizes * is_selected).sum(1, keepdim=True)
        fits = ~is_selected & (sizes <= remaining)
        is_selected = is_selected | fits & ((sizes * fits).cumsum(1) <= remaining)
    is_selected = torch.zeros_like(is_selected).scatter(1, order, is_selected)
    return is_maskable & is_selected.gather(1, words)


def word_indices(batch: Batch, is_maskable: Tensor) -> Tensor:
    """Index of each token's word within the row [B, L]; a special token and the token after it start a word."""
    if batch.is_continuation is None:
        raise ConfigError("whole-word masking needs Batch.is_continuation; set BatchLoader(whole_word_masking=True)")
    continues = batch.is_continuation & is_maskable
    continues[:, 1:] &= is_maskable[:, :-1]
    continues[:, 0] = False
    return (~continues).long().cumsum(1) - 1


def mask_replacements(labels: Tensor, keys: Tensor, config: MaskingConfig, vocabulary: Vocabulary) -> Tensor:
    """The generator's input [B, M] at the masked positions: [MASK], a random token, or the original."""
    slots = labels.shape[1]
    choice, token = random_uniform(keys, 2 * slots).split(slots, dim=1)  # each [B, M]
    random_token = (token * vocabulary.size).long()
    is_changed = choice < config.mask_token_probability + config.random_token_probability
    replacements = torch.where(is_changed, random_token, labels)
    return torch.where(choice < config.mask_token_probability, vocabulary.mask_id, replacements)
