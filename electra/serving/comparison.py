"""A pair beside guessing, token frequencies and bigram counts: on held-out text, and on a hundred sentences, each with
one replaced word that is obvious to a reader."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from electra.data.loader import Batch
from electra.data.shards import Shards
from electra.data.tokenizer import TextTokenizer
from electra.objectives.evaluation import evaluate
from electra.pretraining.bigrams import (
    PSEUDO_COUNTS,
    BigramCounts,
    bigram_auc,
    bigram_mlm_loss,
    evaluation_samples,
)
from electra.pretraining.token_counts import unigram_frequencies
from electra.serving.inference import Model

SENTENCES = Path(__file__).with_name("replaced_words.jsonl")


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


RANDOM_AUC = "unigram_rtd_auc"
BASELINES = ("guessing", "token frequencies", "bigram counts")
COLUMNS = ["", *BASELINES, "before", "model"]
BETTER = (
    "Better than all baselines in each of them: the model uses more of a sentence than frequencies and neighbouring\n"
    "words, which is what counting knows."
)


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
    samples, random_tokens = (evaluation_samples(shards, batches, pair) for pair in (model.electra, None))
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
