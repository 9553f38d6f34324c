"""A pair beside guessing, token frequencies and bigram counts: on held-out text, and on a hundred sentences, each with
one replaced word that is obvious to a reader.

Bigram counts score a replaced token by its negative pointwise mutual information with its neighbours,
−log p(x | previous) / p(x) − log p(next | x) / p(next), smoothed towards the unigram distribution; a masked token is
predicted by p(x) times both ratios.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from electra.data.loader import Batch, validation_batches
from electra.data.packing import LoaderConfig, Packing
from electra.data.shards import Shards
from electra.data.tokenizer import TextTokenizer
from electra.model.electra import Electra
from electra.objectives.evaluation import (
    SEED,
    MaskedAndCorrupted,
    corrupt_with_unigram_samples,
    evaluate,
    mask_and_corrupt,
    roc_auc,
)
from electra.objectives.masking import Masked
from electra.objectives.objectives import ObjectiveContext
from electra.pretraining.token_counts import count_pairs, unigram_frequencies
from electra.serving.inference import Model

SENTENCES = Path(__file__).with_name("replaced_words.jsonl")
PSEUDO_COUNTS = (0.5, 2.0, 10.0, 50.0, 200.0)  # of smoothing; the best is taken
BATCH_ROWS = 32  # of held-out rows
RANDOM_AUC = "unigram_rtd_auc"
BASELINES = ("guessing", "token frequencies", "bigram counts")
COLUMNS = ["", *BASELINES, "before", "model"]
BETTER = (
    "Better than all baselines in each of them: the model uses more of a sentence than frequencies and neighbouring\n"
    "words, which is what counting knows."
)


@dataclass(frozen=True)
class BigramCounts:
    """Counts of the tokens and bigrams of a text."""

    bigrams: NDArray  # sorted: first · V + second
    bigram_counts: NDArray
    token_counts: NDArray  # [V]

    def frequencies(self) -> NDArray:
        """p(x), smoothed so that none is zero."""
        return (self.token_counts + 1) / (self.token_counts.sum() + len(self.token_counts))

    def joint_counts(self, first: NDArray, second: NDArray) -> NDArray:
        keys = first * len(self.token_counts) + second
        index = np.searchsorted(self.bigrams, keys).clip(max=len(self.bigrams) - 1)
        return np.where(self.bigrams[index] == keys, self.bigram_counts[index], 0)

    def mutual_information(self, first: NDArray, second: NDArray, joint: NDArray, smoothing: float) -> NDArray:
        """log p(second | first) / p(second)."""
        unigram = self.frequencies()[second]
        return np.log((joint + smoothing * unigram) / (self.token_counts[first] + smoothing) / unigram)

    def replaced_scores(self, input_ids: NDArray, smoothing: float) -> NDArray:
        """The score of each token of rows [B, L]; higher for tokens that are unusual beside their neighbours."""
        first, second = input_ids[:, :-1], input_ids[:, 1:]
        information = self.mutual_information(first, second, self.joint_counts(first, second), smoothing)
        scores = np.zeros(input_ids.shape)
        scores[:, 1:] -= information
        scores[:, :-1] -= information
        return scores


def count_bigrams(shards: Shards) -> BigramCounts:
    """The counts of the training text."""
    tokens, size = shards.tokens_by_shard("train"), shards.tokenizer.vocabulary.size
    return BigramCounts(*count_pairs(tokens, size), np.bincount(np.concatenate(tokens), minlength=size))


def evaluation_batches(shards: Shards, length: int, rows: int, packing: Packing = "packed") -> Iterator[Batch]:
    """The held-out rows of a run's evaluation on a CPU."""
    loader = LoaderConfig(length=length, batch_size=min(BATCH_ROWS, rows), packing=packing)
    return validation_batches(shards, loader, max_batches=-(-rows // loader.batch_size))


@torch.no_grad()
def evaluation_samples(
    shards: Shards, batches: Iterable[Batch], electra: Electra | None = None
) -> list[MaskedAndCorrupted]:
    """Batches corrupted by the samples of a run's evaluation: of its generator (`rtd_auc`) or, without a pair, of the
    unigram distribution (`unigram_rtd_auc`)."""
    context = ObjectiveContext(vocabulary=shards.tokenizer.vocabulary, seed=SEED)
    if electra is not None:
        return [mask_and_corrupt(electra, batch, context) for batch in batches]
    frequencies = unigram_frequencies(shards, torch.device("cpu"))
    return [corrupt_with_unigram_samples(batch, context, frequencies) for batch in batches]


def bigram_auc(counts: BigramCounts, samples: Sequence[MaskedAndCorrupted]) -> tuple[float, float]:
    """The AUC of bigram counts, and the smoothing it is highest with.

    The smoothing is chosen on these rows, which makes the baseline slightly too strong."""
    ids = torch.cat([each.corrupted.input_ids for each in samples]).numpy()
    labels = torch.cat([each.corrupted.is_replaced for each in samples]).numpy()
    return max((roc_auc(counts.replaced_scores(ids, each).ravel(), labels.ravel()), each) for each in PSEUDO_COUNTS)


def bigram_mlm_loss(counts: BigramCounts, samples: Sequence[MaskedAndCorrupted], mask_id: int) -> float:
    """The MLM loss of bigram counts at the masked positions, with the smoothing it is lowest with."""
    neighbours, labels = zip(*(neighbours_and_labels(each.masked, mask_id) for each in samples), strict=True)
    before, after = torch.cat(neighbours).T[:, :, None].numpy()  # each [N, 1]
    label_ids = torch.cat(labels).numpy()
    tokens = np.arange(len(counts.token_counts))[None]  # [1, V]
    joint_before, joint_after = counts.joint_counts(before, tokens), counts.joint_counts(tokens, after)  # [N, V]
    losses = []
    for smoothing in PSEUDO_COUNTS:
        from_before = counts.mutual_information(before, tokens, joint_before, smoothing)
        from_after = counts.mutual_information(tokens, after, joint_after, smoothing)
        logits = np.log(counts.frequencies()) + (before != mask_id) * from_before + (after != mask_id) * from_after
        log_probabilities = torch.from_numpy(logits).log_softmax(1)
        losses.append(-log_probabilities[np.arange(len(label_ids)), label_ids].mean().item())
    return min(losses)


def neighbours_and_labels(masked: Masked, mask_id: int) -> tuple[Tensor, Tensor]:
    """The tokens before and after the masked positions [N, 2], [MASK] after the end of a row, and the labels [N]."""
    is_used = masked.weights > 0
    padded = functional.pad(masked.input_ids, (1, 1), value=mask_id)  # [B, 1 + L + 1]
    neighbours = torch.stack([padded.gather(1, masked.positions), padded.gather(1, masked.positions + 2)], 2)
    return neighbours[is_used], masked.labels[is_used]


@dataclass(frozen=True)
class CorruptedSentence:
    text: str
    position: int  # index of the replaced word among the words separated by spaces
    original: str  # the word in whose place it is

    @property
    def replaced_word(self) -> str:
        return self.text.split()[self.position].strip(".,")


@dataclass(frozen=True)
class ReplacedWordsResult:
    """In how many sentences the replaced word has the highest probability of all words."""

    found: int
    sentences: int
    guessing: float  # expected number if a word of each sentence is drawn at random
    missed: list[str]  # the sentences, each with the word that was taken for the replaced one

    def __str__(self) -> str:
        lines = [f"{self.found} of {self.sentences} replaced words found; by guessing {self.guessing:.0f}"]
        return "\n".join([*lines, *(f"  {missed}" for missed in self.missed)])


def read_corrupted_sentences() -> list[CorruptedSentence]:
    lines = SENTENCES.read_text(encoding="utf-8").splitlines()
    return [msgspec.json.decode(line, type=CorruptedSentence) for line in lines]


def find_replaced_words(model: Model) -> ReplacedWordsResult:
    """Count in how many sentences the discriminator finds the replaced word."""
    return count_found(lambda text: word_scores(model.tokenizer, text, model.detect(text).replaced))


def count_found(score_words: Callable[[str], list[float]]) -> ReplacedWordsResult:
    """Count in how many sentences `score_words` gives the replaced word the highest score."""
    sentences, missed, guessing = read_corrupted_sentences(), [], 0.0
    for sentence in sentences:
        words, scores = sentence.text.split(), score_words(sentence.text)
        guessing += 1 / len(words)
        highest = max(range(len(words)), key=scores.__getitem__)
        if highest != sentence.position:
            missed.append(f"{words[highest].strip('.,')} instead of {sentence.replaced_word}: {sentence.text}")
    return ReplacedWordsResult(len(sentences) - len(missed), len(sentences), guessing, missed)


def word_scores(tokenizer: TextTokenizer, text: str, token_scores: list[float]) -> list[float]:
    """The highest score of the tokens of each word of a text; punctuation marks do not count."""
    starts = [index for index, character in enumerate(text) if index == 0 or text[index - 1].isspace()]
    scores = [float("-inf")] * len(starts)
    encoding = tokenizer.library.encode(text)
    for (start, end), score in zip(encoding.offsets, token_scores, strict=False):  # a long text is truncated
        if any(character.isalnum() for character in text[start:end]):
            word = sum(each <= start for each in starts) - 1
            scores[word] = max(scores[word], score)
    return scores


@dataclass(frozen=True)
class BaselineComparison:
    """A measure of a model beside those of its baselines."""

    name: str
    digits: int  # after the decimal point
    baselines: dict[str, float]
    model: float
    higher_is_better: bool
    before: float | None = None  # of the packaged model, before it was trained further

    def is_better(self) -> bool:
        """Whether the model is better than all baselines."""
        if self.higher_is_better:
            return self.model > max(self.baselines.values())
        return self.model < min(self.baselines.values())

    def cells(self) -> list[str]:
        """The row of this measure in a table with COLUMNS."""
        values = [*map(self.baselines.get, BASELINES), self.before, self.model]
        return [self.name, *("–" if value is None else f"{value:.{self.digits}f}" for value in values)]


def describe_comparisons(comparisons: list[BaselineComparison], has_before: bool) -> list[str]:
    """A table of all measures, and below it in words what they show."""
    rows = [COLUMNS, *(each.cells() for each in comparisons)]
    rows = rows if has_before else [row[:-2] + row[-1:] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    worse = [each.name for each in comparisons if not each.is_better()]
    verdict = f"Not better than all baselines: {'; '.join(worse)}." if worse else BETTER
    return [*lines, "", verdict]


def evaluate_held_out(model: Model, shards: Shards, batches: Sequence[Batch]) -> dict[str, float]:
    """The metrics of a model on held-out rows, as a run has them."""
    frequencies = unigram_frequencies(shards, model.device)
    return evaluate(model.electra, batches, frequencies, shards.tokenizer.vocabulary)


def compare_held_out(
    model: Model,
    shards: Shards,
    counts: BigramCounts,
    batches: Sequence[Batch],
    metrics: dict[str, float],
    before: dict[str, float],
) -> list[BaselineComparison]:
    """Held-out metrics of a run, and those before it, beside guessing, token frequencies and bigram counts."""
    vocabulary = shards.tokenizer.vocabulary
    samples = evaluation_samples(shards, batches, model.electra)
    random_tokens = evaluation_samples(shards, batches)
    rtd = {"guessing": 0.5, "bigram counts": bigram_auc(counts, samples)[0]}
    random_rtd = {"guessing": 0.5, "bigram counts": bigram_auc(counts, random_tokens)[0]}
    mlm = {"guessing": math.log(vocabulary.size), "token frequencies": metrics["unigram_mlm_loss"]}
    mlm["bigram counts"] = bigram_mlm_loss(counts, samples, vocabulary.mask_id)
    # AUCs of the samples of different generators do not compare, so that the first has no value before training
    return [
        BaselineComparison("RTD AUC, generator's samples", 3, rtd, metrics["rtd_auc"], True),
        BaselineComparison("RTD AUC, random tokens", 3, random_rtd, metrics[RANDOM_AUC], True, before.get(RANDOM_AUC)),
        BaselineComparison("MLM loss (lower is better)", 2, mlm, metrics["mlm_loss"], False, before.get("mlm_loss")),
    ]


def compare_replaced_words(
    model: Model, found_before: ReplacedWordsResult | None, counts: BigramCounts
) -> BaselineComparison:
    """The replaced words that the trained model and the packaged one find, beside guessing and bigram counts."""
    found = find_replaced_words(model)
    by_bigrams = find_replaced_words_by_bigrams(model.tokenizer, counts)
    baselines = {"guessing": found.guessing, "bigram counts": by_bigrams}
    before = None if found_before is None else found_before.found
    return BaselineComparison("replaced words found, of 100", 0, baselines, found.found, True, before)


def find_replaced_words_by_bigrams(tokenizer: TextTokenizer, counts: BigramCounts) -> int:
    """The most replaced words that bigram counts find with any smoothing."""

    def find(smoothing: float) -> int:
        def score_words(text: str) -> list[float]:
            ids = np.array([tokenizer.library.encode(text).ids])
            return word_scores(tokenizer, text, counts.replaced_scores(ids, smoothing)[0].tolist())

        return count_found(score_words).found

    return max(map(find, PSEUDO_COUNTS))
