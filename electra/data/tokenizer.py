"""Tokenizers: load them from their files, save them, and build BERT's from a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from electra.errors import ConfigError, DataError, check_range, report_panics
from electra.runfolder import convert_stored, read_bounded, read_json, write_file, write_json

SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
TOKENIZER_JSON, VOCAB_TXT, SETTINGS, SPECIAL_TOKENS_MAP = TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
SENTENCE_ENDS = (".", "!", "?", "…", "。", "！", "？", "।", "۔", "؟")
CONTINUATION_PREFIX = "##"
MAX_LENGTH = 10**9  # transformers writes 1e30 for an unlimited model_max_length
MAX_VOCABULARY = 1 << 22  # a larger id is damage, and would take much memory
MAX_GROWTH, MAX_REPLACEMENTS = 100, 3_000


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Size, special token ids and continuation tokens; the defaults are BERT's uncased English vocabulary."""

    size: int = 30522
    pad_id: int = 0
    unk_id: int = 100
    cls_id: int = 101
    sep_id: int = 102
    mask_id: int = 103
    is_continuation: tuple[bool, ...] = ()  # for each id, whether the token continues a word (##…)
    sentence_end_ids: tuple[int, ...] = ()  # punctuation that ends a sentence

    def __post_init__(self) -> None:
        check_range(self, "pad_id", "unk_id", "cls_id", "sep_id", "mask_id", at_least=0, below=self.size)
        if len(self.is_continuation) not in (0, self.size):
            raise ConfigError(f"is_continuation has {len(self.is_continuation):,} entries; expected {self.size:,}")

    def unmaskable_ids(self) -> tuple[int, ...]:
        """The ids that are never masked: [PAD], [CLS], [SEP], [MASK]."""
        return self.pad_id, self.cls_id, self.sep_id, self.mask_id


@dataclass(frozen=True)
class TextTokenizer:
    """A `tokenizers.Tokenizer` and its special tokens."""

    library: Tokenizer
    special_tokens: tuple[tuple[str, str], ...] = tuple(SPECIAL_TOKENS.items())  # (role, token)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary; raises if a special token is missing."""
        ids = self.check_vocabulary()
        size = max(ids.values()) + 1
        is_continuation = [False] * size
        for token, number in ids.items():
            is_continuation[number] = token.startswith(CONTINUATION_PREFIX)
        special_ids = {f"{role}_id": ids[token] for role, token in self.special_tokens}
        sentence_ends = tuple(ids[token] for token in SENTENCE_ENDS if token in ids)
        return Vocabulary(
            size=size, is_continuation=tuple(is_continuation), sentence_end_ids=sentence_ends, **special_ids
        )

    def check_vocabulary(self) -> dict[str, int]:
        """The ids of all tokens; raises if a special token is missing or an id is too large."""
        ids = self.library.get_vocab(with_added_tokens=True)
        missing = [token for _, token in self.special_tokens if token not in ids]
        if missing:
            raise DataError(f"the vocabulary lacks {', '.join(missing)}, which pre-training needs; add it")
        if max(ids.values()) >= MAX_VOCABULARY:
            raise DataError(f"an id is {max(ids.values()):,}; ids must be below {MAX_VOCABULARY:,}")
        return ids

    @property
    def component_settings(self) -> dict[str, Any]:
        """The library's description of normalizer, pre-tokenizer and model, which determine the ids."""
        description = json.loads(self.library.to_str())
        return {name: description[name] for name in ("normalizer", "pre_tokenizer", "model")}

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is equal for tokenizers that produce the same ids, whatever files they come from, and different
        for others."""
        added = [token for token in json.loads(self.library.to_str())["added_tokens"] if not token["special"]]
        parts = [self.component_settings, self.special_tokens, *([added] if added else [])]
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` and `transformers.AutoTokenizer` read."""
        folder.mkdir(parents=True, exist_ok=True)
        special_tokens = {f"{role}_token": token for role, token in self.special_tokens}
        ids = self.library.get_vocab(with_added_tokens=True)
        write_file(folder / TOKENIZER_JSON, self.library.to_str(pretty=True) + "\n")
        write_file(folder / VOCAB_TXT, "".join(f"{token}\n" for token in sorted(ids, key=ids.__getitem__)))
        write_json(folder / SETTINGS, self.transformers_config() | special_tokens)
        write_json(folder / SPECIAL_TOKENS_MAP, special_tokens)

    def transformers_config(self) -> dict[str, Any]:
        """The settings with which `transformers` builds an equal tokenizer."""
        if not self.is_bert_wordpiece():
            return {"tokenizer_class": "PreTrainedTokenizerFast"}
        normalizer = self.component_settings["normalizer"]
        return {
            "tokenizer_class": "ElectraTokenizer",
            "do_lower_case": normalizer["lowercase"],
            "strip_accents": normalizer["strip_accents"],
            "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
        }

    def is_bert_wordpiece(self) -> bool:
        """Whether this is BERT's tokenizer: split at spaces and punctuation, WordPiece within each word."""
        types = [(component or {}).get("type") for component in self.component_settings.values()]
        return types == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]


def build_wordpiece_tokenizer(
    tokens: list[str], *, lowercase: bool, strip_accents: bool | None = None, split_chinese: bool = True
) -> TextTokenizer:
    """BERT's tokenizer with these tokens, in the order of their ids."""
    ids = {token: number for number, token in enumerate(tokens)}
    library = Tokenizer(models.WordPiece(ids, unk_token=SPECIAL_TOKENS["unk"], max_input_chars_per_word=100))
    library.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=split_chinese
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX)
    library.add_special_tokens([token for token in SPECIAL_TOKENS.values() if token in ids])
    cls, sep = SPECIAL_TOKENS["cls"], SPECIAL_TOKENS["sep"]
    if cls in ids and sep in ids:
        library.post_processor = processors.BertProcessing((sep, ids[sep]), (cls, ids[cls]))
    return TextTokenizer(library)


def load_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of a vocab.txt, a tokenizer.json, or a folder with either; raises if a special token is missing."""
    candidates = [path / TOKENIZER_JSON, path / VOCAB_TXT] if path.is_dir() else [path]
    file = next((file for file in candidates if file.is_file()), None)
    if file is None:
        missing = f"neither {TOKENIZER_JSON} nor {VOCAB_TXT} in {path}" if path.is_dir() else f"no tokenizer at {path}"
        raise DataError(f"{missing}; expected a {VOCAB_TXT}, a {TOKENIZER_JSON} or a folder with either")
    try:
        content = read_bounded(file).decode()
    except UnicodeDecodeError:
        raise DataError(f"{file} is not a tokenizer: it is not text in UTF-8") from None
    try:
        tokenizer = load_tokenizer_json(file, content) if file.suffix == ".json" else load_vocab_txt(file, content)
        tokenizer.check_vocabulary()
    except DataError as error:
        raise DataError(str(error) if str(file.parent) in str(error) else f"{file}: {error}") from None
    return tokenizer


class AddedToken(msgspec.Struct):
    content: str


class TokenizerSettings(msgspec.Struct):
    """What is read from tokenizer_config.json and special_tokens_map.json; None: not set."""

    pad_token: str | AddedToken | None = None
    unk_token: str | AddedToken | None = None
    cls_token: str | AddedToken | None = None
    sep_token: str | AddedToken | None = None
    mask_token: str | AddedToken | None = None
    do_lower_case: bool | None = None
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool | None = None
    model_max_length: int | float | None = None

    def special_token(self, role: str) -> str | None:
        token = getattr(self, f"{role}_token")
        return token.content if isinstance(token, AddedToken) else token


def read_settings_beside(file: Path, name: str) -> TokenizerSettings:
    """The settings in the file `name` of the same folder, if there is one."""
    neighbor = file.with_name(name)
    return convert_stored(read_json(neighbor) if neighbor.exists() else {}, TokenizerSettings, neighbor)


def read_trained_length(folder: Path) -> int | None:
    """Tokens of the longest rows that the model in a folder was trained on: model_max_length of its tokenizer."""
    length = read_settings_beside(folder / TOKENIZER_JSON, SETTINGS).model_max_length
    return None if length is None or not 1 <= length < MAX_LENGTH else int(length)


def load_tokenizer_json(file: Path, content: str) -> TextTokenizer:
    """The tokenizer of a tokenizer.json, with the special tokens that the files beside it name."""
    try:
        with report_panics():
            library = Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{file} is not a file of the tokenizers library ({error})") from None
    library.no_truncation()
    library.no_padding()
    check_growth(library)
    settings = [read_settings_beside(file, name) for name in (SPECIAL_TOKENS_MAP, SETTINGS)]
    named = {role: next(filter(None, (each.special_token(role) for each in settings)), None) for role in SPECIAL_TOKENS}
    tokenizer = TextTokenizer(
        library, tuple((role, named[role] or default) for role, default in SPECIAL_TOKENS.items())
    )
    add_cls_and_sep(tokenizer)
    return tokenizer


def add_cls_and_sep(tokenizer: TextTokenizer) -> None:
    """Let the library encode texts as [CLS] text [SEP], as models are trained, where its file does not add them."""
    library, vocabulary, tokens = tokenizer.library, tokenizer.vocabulary, dict(tokenizer.special_tokens)
    if adds_cls_and_sep(library, vocabulary):
        return
    with report_panics():
        adds_nothing = not library.encode("").ids
    bert = processors.BertProcessing((tokens["sep"], vocabulary.sep_id), (tokens["cls"], vocabulary.cls_id))
    keeps_others = library.post_processor is not None and adds_nothing  # it changes offsets only
    library.post_processor = processors.Sequence([library.post_processor, bert]) if keeps_others else bert


def adds_cls_and_sep(library: Tokenizer, vocabulary: Vocabulary) -> bool:
    """Whether the library encodes texts as [CLS] text [SEP]."""
    with report_panics():
        return library.encode("").ids == [vocabulary.cls_id, vocabulary.sep_id]


def complete_tokenizer_files(folder: Path) -> None:
    """Add to the tokenizer files in a folder what `transformers` needs to read the same tokens as `load_tokenizer`:
    the lowercasing that a lone vocab.txt implies, and the [CLS] and [SEP] that a tokenizer.json lacks."""
    tokenizer, file = load_tokenizer(folder), folder / TOKENIZER_JSON
    if file.exists():
        library = Tokenizer.from_file(str(file))
        library.no_truncation()
        library.no_padding()
        if not adds_cls_and_sep(library, tokenizer.vocabulary):
            write_file(file, tokenizer.library.to_str(pretty=True) + "\n")
    elif read_settings_beside(file, SETTINGS).do_lower_case is None:
        settings = read_json(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
        vocabulary = (folder / VOCAB_TXT).read_bytes()
        tokenizer.save(folder)
        given = {name: value for name, value in settings.items() if value is not None}
        write_json(folder / SETTINGS, read_json(folder / SETTINGS) | given)
        write_file(folder / VOCAB_TXT, vocabulary)  # ids are line numbers, also of repeated tokens


def check_growth(library: Tokenizer) -> None:
    """Raise if the normalizer or the decoder may make a text much longer: nested replacements could fill the memory."""
    for component in filter(None, (library.normalizer, library.decoder)):
        steps = list(find_replacements(json.loads(component.__getstate__())))
        texts = [" ", *(old for old, _ in steps)]
        if len(texts) > MAX_REPLACEMENTS or sum(map(len, texts)) > 100 * MAX_REPLACEMENTS:
            raise DataError(f"it has more than {MAX_REPLACEMENTS:,} replacements, or too long ones")
        if any(is_growing(text, steps) for text in texts):
            raise DataError(f"its replacements could make a text over {MAX_GROWTH} times as long")


def find_replacements(component: Any) -> Iterator[tuple[str, str]]:
    """Yield (pattern, replacement) of each Replace and Prepend step; pattern is "" for a regular expression."""
    match component:
        case {"type": "Replace", "pattern": pattern, "content": content}:
            yield pattern.get("String", ""), content
        case {"type": "Prepend", "prepend": content}:
            yield "", content
        case {"normalizers": steps} | {"decoders": steps}:
            for step in steps:
                yield from find_replacements(step)


def is_growing(text: str, steps: list[tuple[str, str]]) -> bool:
    """Whether replacements make a text much longer, if regular expressions match every character."""
    limit = MAX_GROWTH * max(1, len(text))
    for old, new in steps:
        size = len(text) + text.count(old) * (len(new) - len(old)) if old else len(text) * max(1, len(new))
        if size > limit:
            return True
        text = text.replace(old, new) if old else text * max(1, len(new))
    return False


def load_vocab_txt(file: Path, content: str) -> TextTokenizer:
    """The WordPiece tokenizer of a vocab.txt; without other settings it is cased if the vocabulary has capitals."""
    tokens = [line.rstrip("\r") for line in content.split("\n")]
    tokens = tokens[:-1] if tokens[-1] == "" else tokens
    settings = read_settings_beside(file, SETTINGS)
    has_capitals = any(token != token.lower() for token in tokens if not token.startswith("["))
    return build_wordpiece_tokenizer(
        tokens,
        lowercase=not has_capitals if settings.do_lower_case is None else settings.do_lower_case,
        strip_accents=settings.strip_accents,
        split_chinese=settings.tokenize_chinese_chars is not False,
    )
