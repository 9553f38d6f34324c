"""`electra shard`: encode text into shards in parallel; a run that was killed can be resumed at any point.

This process reads the text, splits it into the texts of shards and writes the shards; workers encode a text at a time
and write nothing. Texts are determined by their size in bytes, so the shards depend neither on the number of workers
nor on interruptions.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any

from electra.config import command_line_words, flat_defaults, flat_values
from electra.data.corpus import Corpus, CorpusConfig, ReadStats, hash_document, parse_documents
from electra.data.encode import EncodeSettings, ShardText, encode_shard, split_into_shard_texts
from electra.data.files import escape_invalid_name, warn_skipped_files
from electra.data.parts import (
    Part,
    PartRecord,
    find_unfinished_parts,
    merge_parts,
    parse_part,
    read_part_record,
    remove_part_records,
)
from electra.data.shards import (
    INDEX,
    SHARD_NAME,
    SPLITS,
    TOKENIZER,
    UNFINISHED,
    ShardIndex,
    ShardInfo,
    open_shard_file,
    read_index,
    shard_file_name,
    shard_number,
    totals_by_split,
)
from electra.data.tokenizer import TOKENIZER_FILES, TextTokenizer, load_tokenizer
from electra.data.workers import count_usable_cores, map_in_order, map_on_ray
from electra.errors import ConfigError, DataError, check_range
from electra.formatting import format_count, join_first_names
from electra.progress import create_progress_bar
from electra.runfolder import (
    CHECKSUM,
    PARTIAL,
    check_same_settings,
    is_missing_or_empty,
    read_json,
    write_file,
    write_stored,
)
from electra.signals import explain_stop

FEW_DOCUMENTS = 10
VALIDATION_FRACTION, MIN_VALIDATION_DOCUMENTS, MAX_VALIDATION_FRACTION = 0.005, 100, 0.1
"""The default, and what it is for a small corpus: enough documents, but not too much of the text."""


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """Tokenize text into shards; run the same command again to resume."""

    source: CorpusConfig
    tokenizer: Path
    """A vocab.txt, a tokenizer.json, a folder with either, such as `electra tokenizer` writes, or `packaged`: that of
    the small English model in the package."""
    output: Path
    """Folder for the shards."""
    validation_fraction: float | None = None
    """Fraction of documents held out for validation, selected by a hash of their text; by default 0.005, or that of 100
    documents of a small corpus, at most a tenth."""
    shard_megabytes: float = 32
    """Minimum megabytes of text per shard, except for the last; a worker needs about four times as much memory."""
    part: str | None = None
    """Make only part I of N (I/N, such as 2/8) of the same shards; once all parts are in the folder, the index, too."""
    workers: int | None = None
    """Number of worker processes, by default one per core; does not affect the shards."""
    ray: str | None = None
    """Let a Ray cluster encode the text: its address, auto, or local to start Ray on this machine."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self):
        check_range(self, "validation_fraction", at_least=0, below=1)
        check_range(self, "shard_megabytes", "workers", above=0)
        parse_part(self.part)
        if self.ray is not None and self.workers is not None:
            raise ConfigError("give --workers or --ray, which uses all cores of the cluster, not both")

    def min_shard_bytes(self) -> int:
        return int(self.shard_megabytes * 1e6)

    def command_line(self) -> str:
        """The command line that makes these shards, all parts of them."""
        words = ["electra", "shard"]
        defaults = flat_defaults(ShardConfig)
        for name, value in flat_values(self).items():
            if value != defaults.get(name) and name not in ("part", "workers", "ray", "json"):
                words += command_line_words(name, value)
        return escape_invalid_name(shlex.join(words))


@dataclass(frozen=True)
class ShardResult:
    """The result of `electra shard`."""

    output: str
    shards: int
    documents: dict[str, int]  # by split
    tokens: dict[str, int]  # by split
    seconds: float
    new_shards: int  # shards made by this run; the others existed
    replaced: int  # invalid UTF-8 characters
    cut: int  # splits of overlong documents
    without_text: int  # rows whose text field is null or missing
    unfinished_parts: list[int]  # parts that must be finished before the shards can be used

    def __str__(self) -> str:
        documents = format_count(sum(self.documents.values()), "document")
        held_out = format_count(self.documents["validation"], "document")
        notes = [
            f"{self.output}: {sum(self.tokens.values()):,} tokens in {documents} "
            f"({held_out} with {self.tokens['validation']:,} tokens for validation)",
            f"made {self.new_shards} of {format_count(self.shards, 'shard')} in {self.seconds:.1f} s"
            if self.new_shards
            else f"{format_count(self.shards, 'shard')} existed already",
        ]
        if self.unfinished_parts:
            numbers = join_first_names([str(number) for number in self.unfinished_parts], 8)
            notes.append(f"parts to be finished before the shards can be used: {numbers}")
        elif empty := [split for split in SPLITS if not self.tokens[split]]:
            notes.append(f"no {empty[0]} text, which pre-training needs: {self.describe_remedy()}")
        notes += [f"{format_count(self.replaced, 'invalid character')} replaced"] if self.replaced else []
        notes += [f"overlong documents cut in {format_count(self.cut, 'place')}"] if self.cut else []
        notes += [f"{format_count(self.without_text, 'row')} without text skipped"] if self.without_text else []
        return "; ".join(notes)

    def describe_remedy(self) -> str:
        """What to do if a split is empty."""
        count = sum(self.documents.values())
        if count >= FEW_DOCUMENTS:
            return "give another --validation-fraction (0.05)"
        return (
            f"there are too few documents to hold one out, {count}; in .txt files they end at blank lines, and with "
            "--document-end line at each line"
        )


def shard(config: ShardConfig) -> ShardResult:
    """Make the shards that are missing or damaged, then the index."""
    start_time, command = monotonic(), config.command_line()
    tokenizer = load_tokenizer(config.tokenizer)
    corpus = Corpus(config.source)
    warn_skipped_files(config.source.corpus)
    texts = split_into_shard_texts(corpus, config.min_shard_bytes())
    first = next(texts)  # raises before anything is written if there is no text
    if config.validation_fraction is None:
        config = replace(config, validation_fraction=choose_validation_fraction(config, corpus, first))
    settings = content_settings(config, corpus, tokenizer)
    part = parse_part(config.part)
    with part.lock(config.output):
        with part.lock_shared_files(config.output):
            recorded = prepare_output_folder(config.output, settings, part)
        with explain_stop(lambda: describe_kept(config.output)), clean_up_on_failure(config.output, part):
            finished = find_finished_shards(config.output, recorded, part)
            with part.lock_shared_files(config.output):
                tokenizer.save(config.output / TOKENIZER)
            new = []
            if recorded is None or len(finished) < len(recorded.shards) or corpus.is_newer_than(recorded.path):
                new = write_missing_shards(config, part, chain([first], texts), finished, tokenizer, corpus)
            made = sorted([*finished.values(), *new], key=lambda shard: shard_number(shard.name))
            with part.lock_shared_files(config.output):
                index, unfinished_parts = write_record_or_index(config, part, settings, command, made)
            shards = made if index is None else index.shards
            return ShardResult(
                output=str(config.output),
                shards=len(shards),
                documents=totals_by_split(shards, "documents"),
                tokens=totals_by_split(shards, "tokens"),
                seconds=monotonic() - start_time,
                new_shards=len(new),
                replaced=sum(shard.replaced for shard in shards),
                cut=sum(shard.cut for shard in shards),
                without_text=sum(shard.without_text for shard in shards),
                unfinished_parts=unfinished_parts,
            )


def write_record_or_index(
    config: ShardConfig, part: Part, settings: dict[str, Any], command: str, made: list[ShardInfo]
) -> tuple[ShardIndex | None, list[int]]:
    """Write the index, or if parts are not finished yet, the record of this one; returns the index and these parts."""
    old_index = read_index(config.output) if (config.output / INDEX).exists() else None
    if old_index is not None:
        shards = [*made, *(shard for shard in old_index.shards if not part.contains(shard.name))]
    elif part.is_whole:
        shards = made
    else:
        write_stored(part.record_path(config.output), asdict(PartRecord(settings, made)))
        if unfinished_parts := find_unfinished_parts(config.output, part.count):
            return None, unfinished_parts
        shards = merge_parts(config.output, part.count, settings)
    shards.sort(key=lambda shard: shard_number(shard.name))
    index = ShardIndex(settings=settings, command=command, shards=shards)
    check_and_write_index(config, old_index, index)
    return index, []


def choose_validation_fraction(config: ShardConfig, corpus: Corpus, first: ShardText) -> float:
    """VALIDATION_FRACTION, or for a small corpus the fraction that selects enough documents."""
    blocks = (parse_documents(block, config.source, ReadStats()) for block in first.blocks)
    hashes = sorted({hash_document(document) for documents in blocks for document in documents})
    is_whole = sum(map(len, first.blocks)) < config.min_shard_bytes()  # only the last shard is smaller
    if not is_whole and corpus.is_hub:  # of unknown size
        return VALIDATION_FRACTION
    is_whole = is_whole or first.position >= sum(corpus.file_sizes())
    num_documents = len(hashes) if is_whole else corpus.estimate_documents()
    share = min(MIN_VALIDATION_DOCUMENTS / max(1, num_documents), MAX_VALIDATION_FRACTION)
    if share <= VALIDATION_FRACTION or len(hashes) < 2:
        return VALIDATION_FRACTION
    return hashes[ceil(share * len(hashes))] if is_whole else share


def content_settings(config: ShardConfig, corpus: Corpus, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Everything that determines the content of the shards."""
    names = ("text_field", "document_end", "encoding", "strict", "validation_fraction", "shard_megabytes")
    settings = {name: flat_values(config)[name] for name in names}
    return settings | {"tokenizer": CHECKSUM + tokenizer.fingerprint, "corpus": corpus.hub_name_or_file_sizes()}


@dataclass(frozen=True)
class Recorded:
    """The shards of this part that a previous run finished, and the file that lists them."""

    shards: list[ShardInfo]
    path: Path
    is_index: bool


def prepare_output_folder(output: Path, settings: dict[str, Any], part: Part) -> Recorded | None:
    """What a previous run finished, if it did; raises unless the folder is empty or a run with these settings."""
    index = read_index(output) if (output / INDEX).exists() else None
    started = settings if part.is_whole else settings | {"part": f"I/{part.count}"}
    unfinished = read_json(output / UNFINISHED) if (output / UNFINISHED).exists() else {}
    is_started = unfinished.keys() - {"part"} == settings.keys()  # otherwise the file is not of electra shard
    if index is not None:
        check_same_settings(output, index.settings, settings)
    elif is_started and (shard_files(output) or "part" in (started | unfinished)):
        check_same_settings(output, unfinished, started)
    elif is_started or is_missing_or_empty(output):  # a run without any finished shard may be replaced
        write_stored(output / UNFINISHED, started)
    else:
        raise ConfigError(f"{output} contains other files; choose a new or empty folder for --output")
    if index is not None and is_started:
        remove_unfinished_marks(output)
    for path in [*output.glob(f"*{PARTIAL}"), *(output / TOKENIZER).glob(f"*{PARTIAL}")]:
        name = path.name.removesuffix(PARTIAL)
        is_own_shard = SHARD_NAME.fullmatch(name) and part.contains(name)
        if is_own_shard or name in (INDEX, UNFINISHED, part.record_path(output).name, *TOKENIZER_FILES):
            path.unlink()
    if index is not None:
        return Recorded(part.select(index.shards), output / INDEX, is_index=True)
    record = read_part_record(output, part, settings)
    return None if record is None else Recorded(record.shards, part.record_path(output), is_index=False)


def remove_unfinished_marks(output: Path) -> None:
    """Remove the files that the index replaces."""
    remove_part_records(output)
    (output / UNFINISHED).unlink(missing_ok=True)


@contextmanager
def clean_up_on_failure(output: Path, part: Part) -> Iterator[None]:
    """On an error in a first run, remove its files if no shard is finished; if some are, print how to resume."""
    try:
        yield
    except BaseException as error:
        if (output / INDEX).exists() or not part.is_whole:  # other parts may be running
            raise
        num_shards = len(shard_files(output))
        if not num_shards:
            for path in (output / UNFINISHED, *(output / TOKENIZER / name for name in TOKENIZER_FILES)):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # missing, or with other files
                (output / TOKENIZER).rmdir()
        if not num_shards or not isinstance(error, DataError | OSError):
            raise
        message = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
        raise DataError(
            f"{message}; {describe_finished(num_shards, output)}; run the same command on the same text to resume"
        ) from None


def describe_kept(output: Path) -> str:
    """What is kept of a run that was stopped."""
    num_shards = len(shard_files(output))
    kept = describe_finished(num_shards, output) if num_shards else "no shard is finished yet"
    return f"{kept}; the same command continues"


def describe_finished(num_shards: int, output: Path) -> str:
    return f"{format_count(num_shards, 'finished shard')} {'is' if num_shards == 1 else 'are'} kept in {output}"


def find_finished_shards(output: Path, recorded: Recorded | None, part: Part) -> dict[str, ShardInfo]:
    """The undamaged shards of a part by name; the others are made again.

    Raises if a file is neither listed in the index nor recognisable as a shard: it may not be ours."""
    finished = {}
    for path in shard_files(output):
        if not part.contains(path.name):
            continue
        try:
            file = open_shard_file(path, advice=" or no shard; move it away and repeat the command")
        except DataError:
            if recorded is None or not recorded.is_index:
                raise
            continue
        with suppress(DataError):
            file.verify_all()
            finished[path.name] = file.read_info()
    return (
        finished
        if recorded is None
        else {each.name: each for each in recorded.shards if finished.get(each.name) == each}
    )


def shard_files(output: Path) -> list[Path]:
    """The files of a folder that are named as shards."""
    return [path for path in output.glob("*.safetensors") if SHARD_NAME.fullmatch(path.name)]


def missing_texts(
    config: ShardConfig, part: Part, texts: Iterable[ShardText], finished: dict[str, ShardInfo]
) -> Iterator[ShardText]:
    """The texts of a part without a finished shard; raises if a finished shard was made from another text."""
    others = dict(finished)
    for text in texts:
        name = shard_file_name(text.number)
        shard = others.pop(name, None)
        if not part.contains(name):
            continue
        if shard is None:
            yield text
        elif shard.text_checksum != text.checksum():
            others[shard.name] = shard
            break
    if others:
        raise DataError(
            f"the text of {config.source.corpus} was changed after {min(others)} was made from it; choose another "
            f"--output, or start over: rm -r {shlex.quote(str(config.output))}"
        )


def write_missing_shards(
    config: ShardConfig,
    part: Part,
    texts: Iterable[ShardText],
    finished: dict[str, ShardInfo],
    tokenizer: TextTokenizer,
    corpus: Corpus,
) -> list[ShardInfo]:
    """Encode and write every shard of a part that is not finished."""
    new: list[ShardInfo] = []
    assert config.validation_fraction is not None
    library, special_tokens = tokenizer.library.to_str(), tokenizer.special_tokens
    settings = EncodeSettings(config.source, config.validation_fraction, library, special_tokens)
    encode = partial(encode_shard, settings)
    missing = missing_texts(config, part, texts, finished)
    start_time = monotonic()
    with create_progress_bar() as bar:
        task = bar.add_task("reading", total=sum(corpus.file_sizes()) or None)
        if config.ray is None:
            results = map_in_order(encode, missing, config.workers or count_usable_cores())
        else:
            results = map_on_ray(encode, missing, config.ray)
        position = 0
        for encoded in results:
            write_file(config.output / encoded.info.name, encoded.content)
            new.append(encoded.info)
            description = describe_progress(new, monotonic() - start_time)
            position = max(position, encoded.position)
            bar.update(task, completed=position, description=description)
    return new


def check_and_write_index(config: ShardConfig, old_index: ShardIndex | None, index: ShardIndex) -> None:
    """Write the index last; raises if shards that were made again are not what they were."""
    if old_index is not None and old_index.shards != index.shards:
        changed = [new.name for old, new in zip(old_index.shards, index.shards, strict=False) if old != new]
        what = ", ".join(changed) or "the number of shards"
        raise DataError(f"{what} changed because the text changed; start again with another --output")
    if not any(index.totals_by_split("tokens").values()):
        for shard in index.shards:
            (config.output / shard.name).unlink()
        raise DataError(f"no document of {config.source.corpus} has any tokens; check that it is text")
    write_file(config.output / INDEX, index.to_json())
    remove_unfinished_marks(config.output)


def describe_progress(shards: list[ShardInfo], seconds: float) -> str:
    megabytes = sum(shard.text_bytes for shard in shards) / 1e6
    tokens = sum(sum(shard.tokens.values()) for shard in shards)
    return f"{megabytes:,.0f} MB  {megabytes / seconds:.1f} MB/s  {tokens / 1e6:,.1f}M tokens"
