"""`electra tokenizer`: train WordPiece on a corpus, with defaults that follow its text."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path

from rich.progress import Progress
from tokenizers import normalizers, trainers

from electra.data.corpus import Corpus, CorpusConfig, ReadStats
from electra.data.files import warn_skipped_files
from electra.data.tokenizer import CONTINUATION_PREFIX, SPECIAL_TOKENS, TextTokenizer, build_wordpiece_tokenizer
from electra.data.workers import call_in_thread
from electra.errors import ConfigError, check_range
from electra.formatting import format_count
from electra.progress import create_progress_bar
from electra.runfolder import create_folder_atomically
from electra.signals import explain_stop

MAX_LINE_CHARACTERS = 10_000  # the tokenizers library needs some hundred bytes per character of a text
CASED_FRACTION, ACCENTED_FRACTION = 0.2, 0.002
"""Fractions of capitalised words and accented letters from which they are kept. English Wikipedia has 0.16 and 0.0007,
German 0.28 and 0.012, Italian the fewest accents of the languages that need them: 0.0025."""
BYTES_PER_TOKEN, MIN_VOCAB_SIZE, MAX_VOCAB_SIZE = 1_000, 2_048, 30_522
"""The default size, with which an entry occurs about 200 times on average; the largest is that of BERT."""
WORD_STARTS = re.compile(r"(?<=[^\W\d_] )[^\W\d_]{2}")
"""Two letters of words that follow a word and a space, so not the first of a sentence."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Train a WordPiece tokenizer on text."""

    source: CorpusConfig
    output: Path
    """Folder to write: tokenizer.json, vocab.txt and the files that transformers.AutoTokenizer reads."""
    vocab_size: int | None = None
    """Size of the vocabulary, special and unused tokens included; by default one per kB of text, 2,048 to 30,522."""
    lowercase: bool | None = None
    """Lowercase the text; by default unless a fifth of the words within sentences are capitalised, as in German."""
    strip_accents: bool | None = None
    """Remove accents from letters; by default if the text is lowercased and less than 0.2 % of its letters have one."""
    split_chinese: bool = True
    """Treat every Chinese character as a word."""
    unused_tokens: int = 0
    """Number of tokens [unused0], [unused1], … reserved for later use."""
    character_coverage: float = 0.9999
    """Fraction of the text's characters that the vocabulary covers; words with rarer characters become [UNK]."""
    min_frequency: int = 2
    """Minimum number of occurrences of a token."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self):
        check_range(self, "unused_tokens", at_least=0)
        check_range(self, "min_frequency", at_least=1)
        check_range(self, "character_coverage", above=0, at_most=1)
        num_fixed = len(self.special_and_unused_tokens())
        if self.vocab_size is not None and self.vocab_size <= num_fixed:
            raise ConfigError(
                f"is {self.vocab_size}; it must be greater than {num_fixed}, the number of special and unused tokens",
                field="vocab_size",
            )

    def special_and_unused_tokens(self) -> list[str]:
        """The special and unused tokens, which have the first ids."""
        return [*SPECIAL_TOKENS.values(), *(f"[unused{number}]" for number in range(self.unused_tokens))]

    def create_tokenizer(self, tokens: list[str]) -> TextTokenizer:
        """A tokenizer with these settings and tokens."""
        assert self.lowercase is not None
        return build_wordpiece_tokenizer(
            tokens, lowercase=self.lowercase, strip_accents=self.strip_accents, split_chinese=self.split_chinese
        )


@dataclass(frozen=True)
class TokenizerResult:
    """The result of `electra tokenizer`."""

    output: str
    vocab_size: int
    lowercase: bool
    strip_accents: bool
    reasons: list[str]  # for the settings that were chosen by the text
    documents: int
    megabytes: float
    replaced: int  # invalid UTF-8 characters
    without_text: int  # rows whose text field is null or missing

    def __str__(self) -> str:
        notes = f"; {format_count(self.replaced, 'invalid character')} replaced" if self.replaced else ""
        notes += f"; {format_count(self.without_text, 'row')} without text skipped" if self.without_text else ""
        return (
            f"{self.output}: {self.vocab_size:,} tokens, trained on {format_count(self.documents, 'document')} "
            f"({self.megabytes:,.1f} MB){notes}" + "".join(f"\n  {reason}" for reason in self.reasons)
        )


def train_tokenizer(config: TokenizerConfig) -> TokenizerResult:
    """Train a tokenizer and write its folder; deterministic to the byte."""
    corpus = Corpus(config.source)
    warn_skipped_files(config.source.corpus)
    stopped = explain_stop(lambda: "nothing was written; the same command starts again")
    with stopped, create_folder_atomically(config.output) as draft, create_progress_bar() as progress:
        statistics = count_characters(corpus, progress)
        config, reasons = choose_case_and_accents(config, statistics)
        untrained = config.create_tokenizer(config.special_and_unused_tokens())
        alphabet = select_alphabet(statistics.characters, config.character_coverage, untrained)
        fixed = fixed_tokens(config, alphabet, untrained)
        if config.vocab_size is None:
            config = replace(config, vocab_size=default_vocab_size(statistics.num_bytes, len(fixed)))
            reasons.append(
                f"at most {config.vocab_size:,} tokens for {statistics.num_bytes / 1e6:,.1f} MB (--vocab-size)"
            )
        trainer = create_wordpiece_trainer(config, alphabet, fixed)
        call_in_thread(lambda: untrained.library.train_from_iterator(line_batches(corpus, progress), trainer))
        ids = untrained.library.get_vocab(with_added_tokens=False)
        tokenizer = config.create_tokenizer(sorted(ids, key=ids.__getitem__))
        tokenizer.save(draft)
    return TokenizerResult(
        output=str(config.output),
        vocab_size=tokenizer.vocabulary.size,
        lowercase=bool(config.lowercase),
        strip_accents=bool(config.lowercase if config.strip_accents is None else config.strip_accents),
        reasons=reasons,
        documents=statistics.documents,
        megabytes=statistics.num_bytes / 1e6,
        replaced=statistics.reading.replaced,
        without_text=statistics.reading.without_text,
    )


@dataclass
class TextStatistics:
    """Counts of a corpus, on which the defaults of its tokenizer depend."""

    characters: Counter[str] = field(default_factory=Counter)
    word_starts: Counter[str] = field(default_factory=Counter)
    documents: int = 0
    num_bytes: int = 0
    reading: ReadStats = field(default_factory=ReadStats)

    def capitalised_fraction(self) -> float:
        """Of the words within sentences; acronyms do not count."""
        capitalised = sum(count for start, count in self.word_starts.items() if start.istitle())
        return capitalised / max(1, self.word_starts.total())

    def accented_fraction(self) -> float:
        """Of the letters, those that the removal of accents would change: Korean syllables, Indian vowel signs, …"""
        strip, keep = (normalizers.BertNormalizer(lowercase=False, strip_accents=each) for each in (True, False))
        counts = self.characters
        accented = sum(counts[each] for each in counts if strip.normalize_str(each) != keep.normalize_str(each))
        return accented / max(1, sum(count for character, count in counts.items() if character.isalpha()))


def count_characters(corpus: Corpus, progress: Progress) -> TextStatistics:
    """Read a corpus and count its characters and words."""
    statistics = TextStatistics()
    progress.add_task("counting characters", total=sum(corpus.file_sizes()) or None)
    for document in corpus.read_documents(statistics.reading, progress):
        text = document.decode()
        statistics.characters.update(text)
        statistics.word_starts.update(WORD_STARTS.findall(text))
        statistics.documents += 1
        statistics.num_bytes += len(document)
    return statistics


def choose_case_and_accents(config: TokenizerConfig, statistics: TextStatistics) -> tuple[TokenizerConfig, list[str]]:
    """The config with `lowercase` and `strip_accents` as the text needs them if they are not given, and why."""
    reasons = []
    if config.lowercase is None:
        fraction = statistics.capitalised_fraction()
        config = replace(config, lowercase=fraction < CASED_FRACTION)
        choice = "lowercased" if config.lowercase else "case kept"
        reasons.append(f"{choice}: {fraction:.0%} of the words within sentences are capitalised (--[no-]lowercase)")
    if config.strip_accents is None:
        fraction = statistics.accented_fraction()
        config = replace(config, strip_accents=None if fraction < ACCENTED_FRACTION else False)  # None: as in BERT
        choice = "removed" if config.lowercase and fraction < ACCENTED_FRACTION else "kept"
        reasons.append(f"accents {choice}: {fraction:.2%} of the letters have one (--[no-]strip-accents)")
    return config, reasons


def select_alphabet(characters: Counter[str], coverage: float, untrained: TextTokenizer) -> list[str]:
    """The most frequent normalized characters that make up a fraction `coverage` of the text."""
    normalize = untrained.library.normalizer.normalize_str
    counts: Counter[str] = Counter()
    for character, count in characters.items():
        counts.update(dict.fromkeys(normalize(character).replace(" ", ""), count))
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    covered = list(accumulate(counts[character] for character in ranked))
    size = bisect_left(covered, coverage * covered[-1]) + 1 if covered else 0
    return sorted(ranked[:size])


def fixed_tokens(config: TokenizerConfig, alphabet: list[str], untrained: TextTokenizer) -> list[str]:
    """The special and unused tokens, and each character of the alphabet, also as the continuation of a word."""
    split = untrained.library.pre_tokenizer.pre_tokenize_str
    continuations = [CONTINUATION_PREFIX + character for character in alphabet if len(split(f"a{character}")) == 1]
    return [*config.special_and_unused_tokens(), *alphabet, *continuations]


def default_vocab_size(num_bytes: int, num_fixed: int) -> int:
    """The size for a text; at least half of the entries are of more than one character, also in Chinese."""
    return max(2 * num_fixed, MIN_VOCAB_SIZE, min(num_bytes // BYTES_PER_TOKEN, MAX_VOCAB_SIZE))


def create_wordpiece_trainer(
    config: TokenizerConfig, alphabet: list[str], fixed: list[str]
) -> trainers.WordPieceTrainer:
    """The library's trainer, with all characters passed as special tokens.

    Without them it would number the characters within words in hash map order, and merge equally frequent pairs in a
    different order each time. Every character also gets its ## form, so no word made of the alphabet is [UNK].
    """
    assert config.vocab_size is not None
    if len(fixed) > config.vocab_size:
        raise ConfigError(
            f"is {config.vocab_size:,}, but the {len(alphabet):,} characters of the text take {len(fixed):,} entries; "
            "increase it or decrease --character-coverage",
            field="vocab_size",
        )
    return trainers.WordPieceTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=fixed,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUATION_PREFIX,
        show_progress=False,
    )


def line_batches(corpus: Corpus, progress: Progress) -> Iterator[list[str]]:
    """The lines of the corpus in batches of a thousand, within which the library counts words in parallel."""
    progress.add_task("counting words", total=sum(corpus.file_sizes()) or None)
    lines = read_lines(corpus, progress)
    while batch := list(islice(lines, 1000)):
        yield batch
    progress.add_task("merging characters into tokens", total=None)


def read_lines(corpus: Corpus, progress: Progress) -> Iterator[str]:
    """The lines of all documents, long ones in parts."""
    for document in corpus.read_documents(ReadStats(), progress):
        for line in document.decode().split("\n"):
            for start in range(0, len(line), MAX_LINE_CHARACTERS):
                yield line[start : start + MAX_LINE_CHARACTERS]
