"""Tokenizers: learn WordPiece from a corpus, or take one that exists; what later stages know of its vocabulary."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from electra.data.corpus import Corpus, CorpusConfig, Counts
from electra.data.files import say_skipped
from electra.errors import ConfigError, DataError
from electra.runfolder import write_file

SPECIALS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
CONTINUES = "##"
LONGEST_LINE = 10_000  # characters; the library needs some hundred bytes for each character of a text


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Size and special token ids. The defaults are BERT's and ELECTRA's uncased English vocabulary."""

    size: int = 30522
    pad_id: int = 0
    unk_id: int = 100
    cls_id: int = 101
    sep_id: int = 102
    mask_id: int = 103
    is_continuation: tuple[bool, ...] = ()  # of each id: whether it is a word's second or later piece

    def __post_init__(self) -> None:
        for name in ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id"):
            if not 0 <= getattr(self, name) < self.size:
                raise ConfigError(f"{name} {getattr(self, name)} is not in the vocabulary of {self.size:,} entries")
        if len(self.is_continuation) not in (0, self.size):
            raise ConfigError(f"is_continuation tells of {len(self.is_continuation):,} ids, not of {self.size:,}")

    def unmaskable(self) -> tuple[int, ...]:
        """The ids that are never masked: [PAD], [CLS], [SEP], [MASK]."""
        return self.pad_id, self.cls_id, self.sep_id, self.mask_id


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer of the `tokenizers` library and the names of its special tokens."""

    library: Tokenizer
    specials: tuple[tuple[str, str], ...] = tuple(SPECIALS.items())

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The facts later stages read; raises if a special token they need is missing."""
        tokens = self.library.get_vocab(with_added_tokens=True)
        missing = [name for _, name in self.specials if name not in tokens]
        if missing:
            raise DataError(
                f"the vocabulary has no {', '.join(missing)}, which pre-training needs; add it to the tokens"
            )
        size = max(tokens.values()) + 1
        continues = [False] * size
        for token, number in tokens.items():
            continues[number] = token.startswith(CONTINUES)
        ids = {f"{role}_id": tokens[name] for role, name in self.specials}
        return Vocabulary(size=size, is_continuation=tuple(continues), **ids)

    @property
    def parts(self) -> dict[str, Any]:
        """The library's description of how text becomes ids."""
        whole = json.loads(self.library.to_str())
        return {part: whole[part] for part in ("normalizer", "pre_tokenizer", "model")}

    @cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give the same ids, whichever files they came from."""
        return sha256(json.dumps([self.parts, self.specials], sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files that `transformers.AutoTokenizer` and this module load."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            write_file(folder / name, content.encode())

    def files(self) -> dict[str, str]:
        """The content of each file of a tokenizer's folder."""
        names = {f"{role}_token": name for role, name in self.specials}
        tokens = self.library.get_vocab(with_added_tokens=True)
        return {
            "tokenizer.json": self.library.to_str(pretty=True) + "\n",
            "vocab.txt": "".join(f"{token}\n" for token in sorted(tokens, key=tokens.__getitem__)),
            "tokenizer_config.json": json.dumps(self.settings() | names, indent=2) + "\n",
            "special_tokens_map.json": json.dumps(names, indent=2) + "\n",
        }

    def settings(self) -> dict[str, Any]:
        """What `transformers` must know to build an equal tokenizer."""
        if not self.is_bert():
            return {"tokenizer_class": "PreTrainedTokenizerFast"}
        normalizer = self.parts["normalizer"]
        return {
            "tokenizer_class": "ElectraTokenizer",
            "do_lower_case": normalizer["lowercase"],
            "strip_accents": normalizer["strip_accents"],
            "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
        }

    def is_bert(self) -> bool:
        """Whether text becomes ids as in BERT: words end at spaces and punctuation, WordPiece inside each."""
        kinds = [(part or {}).get("type") for part in self.parts.values()]
        return kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]


def word_piece(
    tokens: list[str], *, lowercase: bool, strip_accents: bool | None = None, split_chinese: bool = True
) -> TextTokenizer:
    """BERT's tokenizer with these tokens, in the order of their ids."""
    numbers = {token: number for number, token in enumerate(tokens)}
    library = Tokenizer(models.WordPiece(numbers, unk_token=SPECIALS["unk"], max_input_chars_per_word=100))
    library.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=split_chinese
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=CONTINUES)
    present = {role: name for role, name in SPECIALS.items() if name in numbers}
    library.add_special_tokens(list(present.values()))
    if "cls" in present and "sep" in present:
        cls, sep = ((SPECIALS[role], numbers[SPECIALS[role]]) for role in ("cls", "sep"))
        library.post_processor = processors.BertProcessing(sep, cls)
    return TextTokenizer(library)


def load_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer in a vocab.txt, a tokenizer.json, or a folder with either; raises unless it can be trained with."""
    if not path.exists():
        raise ConfigError(f"there is no tokenizer at {path}; give a vocab.txt, a tokenizer.json or a folder with one")
    candidates = [path / "tokenizer.json", path / "vocab.txt"] if path.is_dir() else [path]
    file = next((file for file in candidates if file.exists()), None)
    if file is None:
        raise DataError(f"there is neither tokenizer.json nor vocab.txt in {path}")
    tokenizer = load_json(file) if file.suffix == ".json" else load_vocabulary(file)
    try:
        assert tokenizer.vocabulary
    except DataError as error:
        raise DataError(f"{file}: {error}") from None
    return tokenizer


def load_json(file: Path) -> TextTokenizer:
    """The tokenizer in a tokenizer.json, with the names of special tokens from the files beside it."""
    try:
        library = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{file} is not a tokenizer of the tokenizers library ({error})") from None
    library.no_truncation()
    library.no_padding()
    named = neighbour(file, "tokenizer_config.json") | neighbour(file, "special_tokens_map.json")
    return TextTokenizer(library, tuple((role, special_name(named, role)) for role in SPECIALS))


def special_name(named: dict[str, Any], role: str) -> str:
    """The token that plays a role: what the files say, else BERT's."""
    value = named.get(f"{role}_token") or SPECIALS[role]
    return value["content"] if isinstance(value, dict) else value


def load_vocabulary(file: Path) -> TextTokenizer:
    """The WordPiece tokenizer of a vocab.txt; a vocabulary with capital letters is taken as cased."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise DataError(f"{file} is not a vocabulary: vocab.txt has one token a line in UTF-8") from None
    tokens = [line.rstrip("\r") for line in lines]
    tokens = tokens[:-1] if tokens[-1] == "" else tokens
    settings = neighbour(file, "tokenizer_config.json")
    has_capitals = any(token != token.lower() for token in tokens if not token.startswith("["))
    return word_piece(
        tokens,
        lowercase=settings.get("do_lower_case", not has_capitals),
        strip_accents=settings.get("strip_accents"),
        split_chinese=settings.get("tokenize_chinese_chars", True),
    )


def neighbour(file: Path, name: str) -> dict[str, Any]:
    """The JSON of a file that lies beside another, or nothing."""
    beside = file.with_name(name)
    return json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(CorpusConfig):
    """Learn a WordPiece vocabulary from text."""

    output: Path
    """The folder to write: tokenizer.json, vocab.txt and what transformers.AutoTokenizer reads beside them."""
    vocab_size: int = 30_522
    """Entries of the vocabulary, special tokens and reserved slots included."""
    lowercase: bool = True
    """Lowercase all text."""
    strip_accents: bool | None = None
    """Take accents off letters; if neither is said, exactly when text is lowercased, as BERT does."""
    split_chinese: bool = True
    """Make every Chinese character a word of its own."""
    reserved: int = 0
    """Slots [unused0], [unused1], … kept free for tokens of your own."""
    character_coverage: float = 0.9999
    """The share of the text whose characters get entries; words with rarer characters become [UNK]."""
    min_frequency: int = 2
    """How often a piece must occur to get an entry."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self):
        for name, least in (("reserved", 0), ("min_frequency", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 < self.character_coverage <= 1:
            raise ConfigError(f"character_coverage is {self.character_coverage}; it must be above 0 and at most 1")
        if self.vocab_size <= len(self.special_tokens()):
            raise ConfigError(
                f"vocabulary size {self.vocab_size} leaves no room beside {len(self.special_tokens())} special tokens "
                "and reserved slots; give a larger --vocab-size"
            )

    def special_tokens(self) -> list[str]:
        """The entries that are not learned; they come first."""
        return [*SPECIALS.values(), *(f"[unused{slot}]" for slot in range(self.reserved))]

    def tokenizer(self, tokens: list[str]) -> TextTokenizer:
        """A tokenizer with these settings and tokens."""
        return word_piece(
            tokens, lowercase=self.lowercase, strip_accents=self.strip_accents, split_chinese=self.split_chinese
        )


@dataclass(frozen=True)
class Learned:
    """What `electra tokenizer` made."""

    output: str
    vocabulary: int
    characters: int
    documents: int
    megabytes: float
    replaced: int
    fingerprint: str

    def __str__(self) -> str:
        replaced = f", {self.replaced:,} invalid characters replaced" if self.replaced else ""
        return (
            f"{self.output}: {self.vocabulary:,} entries learned from {self.documents:,} documents, "
            f"{self.megabytes:,.1f} MB{replaced}"
        )


def train_tokenizer(config: TokenizerConfig) -> Learned:
    """Learn the vocabulary and write its folder; the same text gives the same bytes."""
    if config.output.exists() and not config.output.is_dir():
        raise ConfigError(f"{config.output} is a file; --output must be a folder")
    if config.output.exists() and any(config.output.iterdir()):
        raise ConfigError(f"{config.output} is not empty; choose another --output, or remove it to learn anew")
    corpus = Corpus(config)
    say_skipped(config.corpus)
    known = characters(corpus, config)
    seen = Seen()
    learner = config.tokenizer(config.special_tokens())
    learner.library.train_from_iterator(seen.batches(corpus), trainer(config, known, learner))
    numbers = learner.library.get_vocab(with_added_tokens=False)
    tokenizer = config.tokenizer(sorted(numbers, key=numbers.__getitem__))
    tokenizer.save(config.output)
    return Learned(
        output=str(config.output),
        vocabulary=tokenizer.vocabulary.size,
        characters=len(known),
        documents=seen.documents,
        megabytes=seen.size / 1e6,
        replaced=seen.counts.replaced,
        fingerprint=tokenizer.fingerprint,
    )


def characters(corpus: Corpus, config: TokenizerConfig) -> list[str]:
    """The fewest characters, as they look when normalised, that make up `character_coverage` of the text."""
    raw: Counter[str] = Counter()
    for document in corpus.documents(Counts()):
        raw.update(document.decode())
    normalise = config.tokenizer(config.special_tokens()).library.normalizer.normalize_str
    counts: Counter[str] = Counter()
    for character, count in raw.items():
        counts.update(dict.fromkeys(normalise(character).replace(" ", ""), count))
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    covered = list(accumulate(counts[character] for character in ranked))
    enough = bisect_left(covered, config.character_coverage * covered[-1]) + 1 if covered else 0
    return sorted(ranked[:enough])


def trainer(config: TokenizerConfig, known: list[str], learner: TextTokenizer) -> trainers.WordPieceTrainer:
    """The library's trainer, told every character beforehand.

    Left alone it numbers characters inside words in the order of a hash map, and equally frequent pairs are then merged
    in another order each time. Every known character also gets both its forms, so that no word of them is [UNK].
    """
    split = learner.library.pre_tokenizer.pre_tokenize_str
    inside = [CONTINUES + character for character in known if len(split(f"a{character}")) == 1]
    fixed = [*config.special_tokens(), *known, *inside]
    if len(fixed) > config.vocab_size:
        raise ConfigError(
            f"vocabulary size {config.vocab_size:,} is too small for {len(known):,} characters, which take "
            f"{len(fixed):,} entries; give a larger --vocab-size or a smaller --character-coverage"
        )
    return trainers.WordPieceTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=fixed,
        initial_alphabet=known,
        limit_alphabet=len(known),
        continuing_subword_prefix=CONTINUES,
        show_progress=False,
    )


@dataclass
class Seen:
    """What the trainer has read."""

    documents: int = 0
    size: int = 0
    counts: Counts = field(default_factory=Counts)

    def batches(self, corpus: Corpus) -> Iterator[list[str]]:
        """Lines of the documents, a thousand at a time: the library counts words in parallel within a batch."""
        lines = self.lines(corpus)
        while batch := list(islice(lines, 1000)):
            yield batch

    def lines(self, corpus: Corpus) -> Iterator[str]:
        """Lines of the documents, long ones in pieces."""
        for document in corpus.documents(self.counts):
            self.documents += 1
            self.size += len(document)
            for line in document.decode().split("\n"):
                for start in range(0, len(line), LONGEST_LINE):
                    yield line[start : start + LONGEST_LINE]
