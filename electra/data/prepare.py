"""`electra shard`: text to shards, as fast as words can be looked up, and safe to kill at any moment.

This process reads, cuts the text into units and writes; workers encode one unit at a time and touch no files. A unit is
a number of bytes of text and becomes one shard, so neither the number of workers nor a restart changes any byte.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from itertools import accumulate, chain
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from electra.data.corpus import Block, Corpus, CorpusConfig, Counts, documents_of, is_validation
from electra.data.files import say_skipped
from electra.data.progress import meter
from electra.data.shards import (
    INDEX,
    SPLITS,
    TOKENIZER,
    UNFINISHED,
    Index,
    Shard,
    Shards,
    Split,
    describe,
    most_frequent,
    read_index,
    shard_bytes,
    shard_name,
)
from electra.data.tokenizer import TextTokenizer, load_tokenizer
from electra.data.wordpiece import TextEncoder, encoder_for
from electra.data.workers import in_order
from electra.errors import ConfigError, DataError
from electra.runfolder import (
    CHECKSUM,
    check_same_settings,
    is_empty,
    lock_folder,
    read_json,
    remove_partial,
    write_file,
    write_json,
)

UNCOVERED_WORDS = 1000
"""Words with [UNK] that each shard remembers."""


@dataclass(frozen=True, kw_only=True)
class ShardConfig(CorpusConfig):
    """Turn text into shards of tokens; killed and started again, it goes on."""

    tokenizer: Path
    """A vocab.txt, a tokenizer.json, or a folder with either, such as `electra tokenizer` writes."""
    output: Path
    """The folder for the shards."""
    validation_fraction: float = 0.005
    """The share of documents held out, chosen by their text."""
    shard_megabytes: float = 32
    """Text in each shard; a worker needs about four times as much memory."""
    workers: int | None = None
    """Processes that encode; one for each core if not given. Changes no byte of the result."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self):
        if not 0 <= self.validation_fraction < 1:
            raise ConfigError(f"validation_fraction is {self.validation_fraction}; it must be at least 0 and below 1")
        for name in ("shard_megabytes", "workers"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"{name} is {value}; it must be above 0")

    def processes(self) -> int:
        """How many workers there are."""
        return self.workers or len(os.sched_getaffinity(0))

    def command(self) -> str:
        """The command line of these settings."""
        words = ["electra", "shard"]
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default and field.name not in ("workers", "json"):
                flag = "--" + field.name.replace("_", "-")
                words += [flag] if value is True else [flag, str(value)]
        return shlex.join(words)


@dataclass(frozen=True)
class Sharded:
    """What `electra shard` made."""

    output: str
    shards: int
    documents: dict[str, int]
    tokens: dict[str, int]
    megabytes: float
    seconds: float
    made: int  # shards made in this run; the others were there
    replaced: int
    cut: int

    def __str__(self) -> str:
        notes = [
            f"{self.output}: {sum(self.tokens.values()):,} tokens of {sum(self.documents.values()):,} documents in "
            f"{self.shards} shards ({self.tokens['validation']:,} tokens for validation)"
        ]
        notes += [f"{self.made} shards made in {self.seconds:.1f} s"] if self.made else ["all was there already"]
        if not self.tokens["validation"]:
            notes.append("nothing is held out: pre-training needs some, so give a larger --validation-fraction (0.05)")
        notes += [f"{self.replaced:,} invalid characters replaced"] if self.replaced else []
        notes += [f"overlong documents cut at {self.cut:,} places"] if self.cut else []
        return "; ".join(notes)


@dataclass(frozen=True)
class Unit:
    """The text of one shard."""

    number: int
    blocks: list[Block]
    position: int  # bytes on disk of the corpus up to its end


@dataclass(frozen=True)
class Encoded:
    """One shard as its worker hands it back."""

    shard: Shard
    content: bytes
    position: int  # that of its unit


def shard(config: ShardConfig) -> Sharded:
    """Make the shards that are missing or damaged, then the index."""
    began = monotonic()
    tokenizer, corpus = load_tokenizer(config.tokenizer), Corpus(config)
    say_skipped(config.corpus)
    units = cut_units(corpus, int(config.shard_megabytes * 1e6))
    first = next(units)  # raises if there is no text, before anything is written
    settings = settings_of(config, corpus, tokenizer)
    with lock_folder(config.output):
        before = prepare(config.output, settings)
        with clearing_up(config.output):
            kept = kept_in(config.output, before)
            tokenizer.save(config.output / TOKENIZER)
            if before is not None and len(kept) == len(before.shards):
                return summary(config, before, 0, monotonic() - began)
            new = make_shards(config, chain([first], units), kept, tokenizer, corpus)
            shards = sorted([*kept.values(), *new], key=lambda shard: shard.name)
            after = Index(settings=settings, command=config.command(), shards=shards)
            finish(config, before, after)
            return summary(config, after, len(new), monotonic() - began)


def cut_units(corpus: Corpus, size: int) -> Iterator[Unit]:
    """The corpus in units of at least `size` bytes, the last one less."""
    number, blocks, held, position = 0, [], 0, 0
    before = dict(zip(map(str, corpus.paths()), accumulate(corpus.sizes(), initial=0), strict=False))
    for block in corpus.blocks():
        blocks.append(block)
        held += len(block)
        position = before.get(block.name, 0) + block.position
        if held >= size:
            yield Unit(number, blocks, position)
            number, blocks, held = number + 1, [], 0
    if blocks:
        yield Unit(number, blocks, position)


@contextmanager
def clearing_up(output: Path) -> Iterator[None]:
    """If anything goes wrong, leave nothing that a second run does not go on with, and say so of what is left."""
    try:
        yield
    except BaseException as error:
        if (output / INDEX).exists():
            raise
        kept = len(list(output.glob("*.safetensors")))
        if not kept:
            shutil.rmtree(output / TOKENIZER, ignore_errors=True)
            (output / UNFINISHED).unlink(missing_ok=True)
        if not kept or not isinstance(error, DataError | OSError):
            raise
        said = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
        raise DataError(
            f"{said}; {kept} finished shards are kept in {output}, and the same command on the same text goes on there"
        ) from None


def settings_of(config: ShardConfig, corpus: Corpus, tokenizer: TextTokenizer) -> dict[str, Any]:
    """All that decides the bytes of the shards."""
    names = ("text_field", "document_end", "strict", "validation_fraction", "shard_megabytes")
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    return settings | {"tokenizer": CHECKSUM + tokenizer.fingerprint, "corpus": corpus.identity()}


def prepare(output: Path, settings: dict[str, Any]) -> Index | None:
    """The index, if the output has one; raises if the output holds anything but a run with these settings.

    A run that finished no shard has nothing to protect, so another may take its place.
    """
    index = read_index(output) if (output / INDEX).exists() else None
    is_begun = (output / UNFINISHED).exists()
    if index is not None:
        check_same_settings(output, index.settings, settings)
        (output / UNFINISHED).unlink(missing_ok=True)
    elif is_begun and any(output.glob("*.safetensors")):
        check_same_settings(output, read_json(output / UNFINISHED), settings)
    elif not is_begun and not is_empty(output):
        raise ConfigError(f"{output} holds other files; choose a new or empty folder for --output")
    else:
        write_json(output / UNFINISHED, settings)
    remove_partial(output)
    return index


def kept_in(output: Path, index: Index | None) -> dict[str, Shard]:
    """The shards that are there and whole, by their names."""
    if index is None:
        return {path.name: describe(path.name, path.read_bytes()) for path in output.glob("*.safetensors")}
    damaged = Shards(output, index).damaged()
    return {shard.name: shard for shard in index.shards if shard.name not in damaged}


def make_shards(
    config: ShardConfig, units: Iterable[Unit], kept: dict[str, Shard], tokenizer: TextTokenizer, corpus: Corpus
) -> list[Shard]:
    """Encode and write every unit whose shard is not kept."""
    made = []
    encode = partial(encode_unit, config, tokenizer.fingerprint)
    todo = (unit for unit in units if shard_name(unit.number) not in kept)
    with meter(sum(corpus.sizes())) as progress:
        for encoded in in_order(encode, todo, config.processes()):
            write_file(config.output / encoded.shard.name, encoded.content)
            progress.update(encoded.position, encoded.shard.text_bytes, sum(encoded.shard.tokens.values()))
            made.append(encoded.shard)
    return made


@lru_cache(maxsize=1)
def encoder_of(folder: Path, fingerprint: str) -> TextEncoder:
    """The worker's encoder, kept from unit to unit for the words it has met."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.fingerprint == fingerprint
    return encoder_for(tokenizer)


def encode_unit(config: ShardConfig, fingerprint: str, unit: Unit) -> Encoded:
    """The shard of one unit; runs in a worker and touches no files."""
    encoder = encoder_of(config.output / TOKENIZER, fingerprint)
    encoder.uncovered.clear()
    counts, type = Counts(), np.dtype(encoder.type)
    documents = encode_documents(config, encoder, unit, counts)
    facts = {
        "text_bytes": sum(map(len, unit.blocks)),
        "unknown": sum(count(encoder.unk_id, ids, type) for split in SPLITS for ids in documents[split]),
        "uncovered": most_frequent(encoder.uncovered, UNCOVERED_WORDS),
        **asdict(counts),
    }
    content = shard_bytes(documents, facts, type)
    return Encoded(describe(shard_name(unit.number), content), content, unit.position)


def encode_documents(config: ShardConfig, encoder: TextEncoder, unit: Unit, counts: Counts) -> dict[Split, list[bytes]]:
    """The ids of the unit's documents, each in its split."""
    encoded: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
    for block in unit.blocks:
        documents = list(documents_of(block, config, counts))
        for document, ids in zip(documents, encoder.encode(documents), strict=True):
            if ids:
                is_held_out = is_validation(document, config.validation_fraction)
                encoded["validation" if is_held_out else "train"].append(ids)
    return encoded


def count(token: int, ids: bytes, type: np.dtype) -> int:
    """How often a token is among ids."""
    return int(np.count_nonzero(np.frombuffer(ids, type) == token))


def finish(config: ShardConfig, before: Index | None, after: Index) -> None:
    """Write the index, the last of all; a repair must have given the bytes that were there before."""
    if before is not None and before.shards != after.shards:
        changed = [new.name for old, new in zip(before.shards, after.shards, strict=False) if old != new]
        raise DataError(f"{', '.join(changed)} came out unlike before, so the text has changed; start over elsewhere")
    if not any(after.totals("tokens").values()):
        for shard in after.shards:
            (config.output / shard.name).unlink()
        raise DataError(f"no document of {config.corpus} has any token; is it text?")
    write_file(config.output / INDEX, after.as_json())
    (config.output / UNFINISHED).unlink(missing_ok=True)


def summary(config: ShardConfig, index: Index, made: int, seconds: float) -> Sharded:
    """What the command reports."""
    return Sharded(
        output=str(config.output),
        shards=len(index.shards),
        documents=index.totals("documents"),
        tokens=index.totals("tokens"),
        megabytes=index.total("text_bytes") / 1e6,
        seconds=seconds,
        made=made,
        replaced=index.total("replaced"),
        cut=index.total("cut"),
    )
