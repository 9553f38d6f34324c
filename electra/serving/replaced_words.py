"""A hundred sentences, each with one replaced word that is obvious to a reader, and how many of them a model finds."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from electra.data.tokenizer import TextTokenizer
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
