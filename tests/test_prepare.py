"""`electra shard`: the same bytes for any number of workers and after any interruption; nothing half-written."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import error_message
from kills import kill_repeatedly

import electra
from electra import cli, runfolder
from electra.config import build_config
from electra.data import corpus, prepare
from electra.data.prepare import ShardConfig, shard
from electra.data.shards import open_shards, read_index
from electra.data.tokenizer import load_tokenizer
from electra.data.train_tokenizer import TokenizerConfig, train_tokenizer
from electra.data.workers import results_as_completed, wait_for_result
from electra.errors import ConfigError, DataError
from electra.runfolder import PARTIAL, lock_folder, write_file
from electra.signals import clean_up_on_stop_signals, defer_stop_signals

TOKENS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
]
FILES = 6


@pytest.fixture
def text(tmp_path) -> Path:
    """Six small files, each of which becomes a shard, and a vocabulary of letters."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(FILES):
        documents = (f"{word} of file {'abcdef'[number]}" for word in ("one", "two", "three", "four"))
        (folder / f"{number}.txt").write_text("\n\n".join(documents))
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    return folder


def write_random_words(folder: Path, files: int, words: int) -> Path:
    """Write a folder of files of random words, each a document, and beside it a vocabulary of letters."""
    draw, text = random.Random(0), folder / "text"
    text.mkdir()
    for number in range(files):
        documents = ("".join(draw.choices("abcdefghij", k=draw.randint(1, 9))) for _ in range(words))
        (text / f"{number:02d}.txt").write_text("\n\n".join(documents))
    (folder / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    return text


def config(text: Path, output: str = "shards", **settings) -> ShardConfig:
    defaults = {"corpus": str(text), "tokenizer": text.parent / "vocab.txt", "output": text.parent / output}
    return build_config(
        ShardConfig, **(defaults | {"shard_megabytes": 5e-5, "validation_fraction": 0.2, "workers": 1} | settings)
    )


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; the index without the command, which names the folder, and without its checksum."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    files["index.json"] = json.dumps(json.loads(files["index.json"]) | {"command": "", "checksum": 0}).encode()
    return files


def run_failing(capsys, *arguments) -> str:
    """Run a command that fails with exit code 2; returns its one-line error."""
    error = error_message(list(map(str, arguments)), capsys)
    assert error.count("\n") == 1
    return error


def command(settings: ShardConfig) -> list[str]:
    return [*settings.command_line().split()[1:], "--workers", str(settings.workers)]


def test_skipped_files_are_reported(text, capsys):
    (text / "notes.md").write_text("not read")
    shard(config(text))
    train_tokenizer(build_config(TokenizerConfig, corpus=str(text), output=text.parent / "vocab", vocab_size=80))
    warning = f"skipped in {text}: 1 .md; "
    assert [line.startswith(warning) for line in capsys.readouterr().err.splitlines()] == [True, True]


def test_the_number_of_workers_changes_no_byte(text):
    shard(config(text, "one", workers=1))
    shard(config(text, "three", workers=3))
    assert content(text.parent / "one") == content(text.parent / "three")
    assert len(content(text.parent / "one")) == FILES + 1 + 4


def test_adding_files_moves_no_document_to_another_split(text):
    shard(config(text, "before"))
    (text / "00-new.txt").write_text("one of file z")
    shard(config(text, "after"))
    before, after = (open_shards(text.parent / name) for name in ("before", "after"))
    held_out = [np.concatenate(shards.tokens_by_shard("validation")).tolist() for shards in (before, after)]
    assert 0 < len(held_out[0]) < before.index.totals_by_split("tokens")["train"]
    assert "".join(map(chr, held_out[0])) in "".join(map(chr, held_out[1]))


def test_an_interrupted_run_tells_what_is_kept(text, monkeypatch, capfd):
    writes = iter([write_file, write_file, interrupt])
    monkeypatch.setattr(prepare, "write_file", lambda *arguments: next(writes)(*arguments))
    with pytest.raises(KeyboardInterrupt):
        shard(config(text))
    assert capfd.readouterr().err == (
        f"2 finished shards are kept in {text.parent / 'shards'}; the same command continues\n"
    )


def interrupt(*arguments):
    raise KeyboardInterrupt


def test_interrupted_at_any_write_it_resumes_to_the_same_bytes(text, monkeypatch):
    """Interrupt just before or after the first rename, then the second, …, always in the same folder."""
    shard(config(text, "whole"))
    rename = os.replace
    renames_left = 0
    for stop in range(100):
        renames_left = stop // 2

        def stopping(source, target, is_before=stop % 2 == 0):
            nonlocal renames_left
            if renames_left == 0 and is_before:
                raise KeyboardInterrupt
            rename(source, target)
            if renames_left == 0:
                raise KeyboardInterrupt
            renames_left -= 1

        monkeypatch.setattr(os, "replace", stopping)
        try:
            shard(config(text))
            break
        except KeyboardInterrupt:
            continue
    assert 10 < stop < 99
    assert content(text.parent / "shards") == content(text.parent / "whole")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # forks: no new import of torch
def test_killed_at_random_times_it_resumes_to_the_same_bytes(tmp_path):
    settings = config(write_random_words(tmp_path, files=20, words=5000))
    kill_repeatedly(shard, settings, times=20, within=0.1)
    shard(settings)
    shard(config(tmp_path / "text", "uninterrupted"))
    assert content(settings.output) == content(tmp_path / "uninterrupted")


@contextmanager
def two_workers(folder: Path, tasks: int = 4):
    """A process group of `map_in_order` with two workers that are busy for long, with this number of tasks left."""
    script = (
        "import time, electra.data.workers as workers\n"
        "from electra.signals import clean_up_on_stop_signals\n"
        "with clean_up_on_stop_signals():\n"  # at the top level: workers do not run it again
        f"    for _ in workers.map_in_order(time.sleep, {[0, *[60] * tasks]}, 2): print('started', flush=True)\n"
    )
    (folder / "run.py").write_text(script)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    environment = os.environ | {"PYTHONPATH": str(Path(electra.__file__).parents[1])}
    with subprocess.Popen([sys.executable, folder / "run.py"], env=environment, **options) as process:
        assert process.stdout.readline() == "started\n"
        yield process


def test_workers_exit_when_their_parent_is_killed(tmp_path):
    with two_workers(tmp_path) as process:
        process.kill()
        process.wait()
        assert ends_within(process.pid, seconds=10)


@pytest.mark.parametrize(("to_group", "tasks"), [(True, 4), (False, 4), (False, 1)])
def test_a_stop_signal_ends_the_workers_at_once(tmp_path, to_group, tasks):
    """SIGHUP, which a closing terminal sends to all processes, and SIGTERM, which `kill` sends to one."""
    with two_workers(tmp_path, tasks) as process:
        time.sleep(0.2)  # until the next result is waited for
        os.killpg(process.pid, signal.SIGHUP) if to_group else process.terminate()
        _, errors = process.communicate(timeout=10)
        assert errors == f"electra: stopped by {'SIGHUP' if to_group else 'SIGTERM'}\n"
        assert ends_within(process.pid, seconds=5)  # the workers sleep for 60


def test_a_stop_signal_waits_while_locks_are_taken(capfd):
    reached = []

    def lock_and_stop() -> None:
        with defer_stop_signals():
            with defer_stop_signals():
                signal.raise_signal(signal.SIGTERM)
                reached.append("inner")
            reached.append("outer")
        reached.append("after")

    with pytest.raises(SystemExit, match="143"), clean_up_on_stop_signals():
        lock_and_stop()
    assert reached == ["inner", "outer"]
    assert capfd.readouterr().err == "electra: stopped by SIGTERM\n"
    with clean_up_on_stop_signals(), defer_stop_signals():  # nothing is left of it
        reached.append("next")
    assert reached[-1] == "next"


def test_waiting_for_a_result_ends_with_it_or_with_a_signal():
    future = Future()
    threading.Timer(0.2, lambda: future.set_exception(DataError("damaged"))).start()
    with pytest.raises(DataError, match="damaged"):
        wait_for_result(future)
    future = Future()
    future.set_result(5)
    assert wait_for_result(future) == 5
    futures = Future(), Future()
    futures[1].set_result(1)
    threading.Timer(0.2, futures[0].set_result, (0,)).start()
    assert list(results_as_completed(futures)) == [1, 0]
    for wait in (wait_for_result, lambda future: list(results_as_completed([future]))):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(SystemExit, match="143"), clean_up_on_stop_signals():
            wait(Future())


def ends_within(group: int, seconds: float) -> bool:
    """Whether all processes of a group end in time."""
    deadline = time.monotonic() + seconds
    while is_running := is_group_running(group):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return not is_running


def is_group_running(group: int) -> bool:
    """Whether any process of a group runs, zombies excluded."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return any(line.split()[0] == str(group) and line.split()[1][0] != "Z" for line in listed.splitlines())


def test_a_finished_run_makes_nothing_again(text):
    assert shard(config(text)).new_shards == FILES
    again = shard(config(text))
    assert again.new_shards == 0
    assert "existed already" in str(again)


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation_fraction": 0.5}, "--validation-fraction was 0.2 and is now 0.5"),
        ({"document_end": "line"}, "--document-end was blank-line and is now line"),
    ],
)
def test_other_settings_are_an_error_and_change_nothing(text, is_finished, change, message):
    shard(config(text))
    if not is_finished:
        unfinish(text.parent / "shards", missing=())
    before = {path: path.stat().st_mtime_ns for path in (text.parent / "shards").rglob("*")}
    with pytest.raises(ConfigError, match=f"{message}; .* start over: rm -r "):
        shard(config(text, **change))
    assert {path: path.stat().st_mtime_ns for path in (text.parent / "shards").rglob("*")} == before


def test_an_error_names_the_changed_file_of_the_corpus(text):
    shard(config(text))
    (text / "9.txt").write_text("more")
    with pytest.raises(ConfigError, match=r"corpus 9.txt was absent and is now 4 bytes"):
        shard(config(text))


@pytest.mark.parametrize("is_finished", [True, False])
def test_an_edit_that_keeps_the_size_of_a_file_is_noticed(text, is_finished):
    """Otherwise a resumed run would mix shards of two texts."""
    shard(config(text))
    if not is_finished:
        unfinish(text.parent / "shards", missing=("00001.safetensors", "00005.safetensors"))
    (text / "2.txt").write_text((text / "2.txt").read_text().replace("two", "six"))
    with pytest.raises(DataError, match=r"text of .* was changed after 00002.safetensors .* start over: rm -r "):
        shard(config(text))
    (text / "2.txt").write_text((text / "2.txt").read_text().replace("six", "two"))
    assert shard(config(text)).new_shards == (0 if is_finished else 1)  # 00001 was made before the error


def unfinish(output: Path, missing: tuple[str, ...]) -> None:
    """Turn a finished run into one that was killed before it made some shards."""
    settings = json.loads((output / "index.json").read_text())["settings"]
    (output / "unfinished.json").write_text(json.dumps(settings))
    for name in ("index.json", *missing):
        (output / name).unlink()


def test_a_damaged_shard_of_an_unfinished_run_is_made_again(text):
    shard(config(text, "whole"))
    shard(config(text))
    unfinish(text.parent / "shards", missing=("00001.safetensors",))
    damaged = text.parent / "shards" / "00003.safetensors"
    content_before = damaged.read_bytes()
    damaged.write_bytes(content_before[:-9] + b"\xff" + content_before[-8:])
    assert shard(config(text)).new_shards == 2
    assert content(text.parent / "shards") == content(text.parent / "whole")


def test_another_tokenizer_is_an_error(text):
    shard(config(text))
    (text.parent / "vocab.txt").write_text("\n".join([*TOKENS, "new"]) + "\n")
    with pytest.raises(ConfigError, match="tokenizer has other content"):
        shard(config(text))


def test_a_failure_before_the_first_shard_leaves_no_files(text, capsys):
    (text / "0.txt").write_bytes(b"caf\xe9")
    assert "kept" not in run_failing(capsys, *command(config(text, "new/shards", strict=True)))
    assert not (text.parent / "new").exists()
    (text.parent / "shards").mkdir()
    run_failing(capsys, *command(config(text, strict=True)))
    assert list((text.parent / "shards").iterdir()) == []


def test_a_run_killed_before_its_first_shard_may_be_replaced(text):
    shard(config(text))
    settings = json.loads((text.parent / "shards" / "index.json").read_text())["settings"]
    for path in (text.parent / "shards").glob("*.*"):
        path.unlink()
    (text.parent / "shards" / "unfinished.json").write_text(json.dumps(settings | {"tokenizer": "another"}))
    assert shard(config(text, strict=True)).new_shards == FILES


def test_a_run_with_a_finished_shard_is_not_replaced(text, capsys):
    (text / "5.txt").write_bytes(b"caf\xe9")
    kept = f"; 5 finished shards are kept in {text.parent / 'shards'}; run the same command"
    assert kept in run_failing(capsys, *command(config(text, strict=True)))
    (text / "5.txt").write_text("coffee")
    error = run_failing(capsys, *command(config(text, strict=True)))
    assert "corpus 5.txt was 4 bytes and is now 6 bytes; " in error
    assert error.strip().endswith(f"start over: rm -r {text.parent / 'shards'}")


def test_a_folder_with_other_files_is_an_error_and_not_changed(text):
    (text.parent / "shards").mkdir()
    (text.parent / "shards" / "thesis.doc").write_text("precious")
    with pytest.raises(ConfigError, match="contains other files; choose a new or empty folder"):
        shard(config(text))
    assert [path.name for path in (text.parent / "shards").iterdir()] == ["thesis.doc"]


def test_a_failed_first_run_removes_only_its_own_files(text):
    shard(config(text))
    unfinish(text.parent / "shards", missing=tuple(f"{number:05d}.safetensors" for number in range(FILES)))
    (text.parent / "shards/tokenizer/notes.txt").write_text("precious")
    (text / "0.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="not valid UTF-8"):
        shard(config(text, strict=True))
    left = {str(path.relative_to(text.parent / "shards")) for path in (text.parent / "shards").rglob("*")}
    assert left == {"tokenizer", "tokenizer/notes.txt"}


def test_files_that_are_not_partial_shards_are_never_removed(text):
    shard(config(text))
    for name in ("notes.partial", "notes/draft.partial", f"notes/index.json{PARTIAL}", f"notes{PARTIAL}"):
        (text.parent / "shards" / name).parent.mkdir(exist_ok=True)
        (text.parent / "shards" / name).write_text("precious")
    (text.parent / "shards" / f"00002.safetensors{PARTIAL}").write_bytes(b"left by a killed run")
    shard(config(text))
    left = {str(path.relative_to(text.parent / "shards")) for path in (text.parent / "shards").glob("**/*partial")}
    assert left == {"notes.partial", "notes/draft.partial", f"notes/index.json{PARTIAL}", f"notes{PARTIAL}"}


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("empty.txt", b"", "no text in"),
        ("binary.txt", b"PK\x03\x04\x00\x00", "binary.txt, line 1: NUL byte"),
        ("cut.txt.gz", b"\x1f\x8b\x08\x00\x00", "cut.txt.gz is damaged or truncated"),
        ("controls.txt", b"\x07\x08", "no document of"),
    ],
)
def test_invalid_text_is_a_one_line_error(text, capsys, name, data, error):
    (text.parent / "bad").mkdir()
    (text.parent / "bad" / name).write_bytes(data)
    assert error in run_failing(capsys, *command(config(text, corpus=str(text.parent / "bad"))))
    assert not (text.parent / "shards").exists()


def test_an_error_in_a_worker_is_a_one_line_error(text, capsys):
    (text / "5.txt").write_bytes(b"bad \xff")
    error = run_failing(capsys, *command(config(text, workers=2, strict=True)))
    assert "5.txt, line 1: not valid UTF-8" in error


def test_a_panic_of_the_tokenizers_library_is_a_one_line_error(text, capfd):
    tokenizer = json.loads(load_tokenizer(text.parent / "vocab.txt").library.to_str())
    slow = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    (text.parent / "slow.json").write_text(json.dumps(tokenizer | {"normalizer": slow}))
    (text / "0.txt").write_text("a" * 100 + "b")
    with pytest.raises(SystemExit, match="2"):
        cli.main(command(config(text, tokenizer=text.parent / "slow.json", workers=2)))
    assert "electra: the tokenizers library panicked (" in capfd.readouterr().err


def test_after_a_full_disk_the_run_can_be_resumed(text, capsys, monkeypatch):
    def full(handle):
        if len(list((text.parent / "shards").glob("*.safetensors"))) == 2:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(runfolder.os, "fsync", full)
        error = run_failing(capsys, *command(config(text)))
    assert "cannot write (No space left on device)" in error
    assert "00002.safetensors; 2 finished shards are kept in" in error
    assert not list((text.parent / "shards").rglob(f"*{PARTIAL}"))
    assert shard(config(text)).new_shards == FILES - 2


def test_missing_permission_is_a_one_line_error(text, capsys, monkeypatch):
    def deny(path, *arguments, **settings):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", deny)
    assert "Permission denied" in run_failing(capsys, *command(config(text)))


def test_two_runs_cannot_use_one_folder(text):
    with lock_folder(text.parent / "shards"), pytest.raises(ConfigError, match=r"is using .*shards"):
        shard(config(text))


def test_overlong_documents_are_cut(text, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 100)
    monkeypatch.setattr(corpus, "MAX_DOCUMENT_BYTES", 1000)
    (text / "long.txt").write_text("word " * 1000)
    (text / "short.txt").write_text("x")
    result = shard(config(text, validation_fraction=0))
    assert result.cut == 4
    assert result.documents["train"] == 4 * FILES + 5 + 1
    assert result.tokens["train"] > 4000


def test_names_that_are_not_utf8_are_escaped_in_the_index(text):
    name = os.fsdecode(b"caf\xe9.txt")
    (text / name).write_text("word")
    shard(config(text))
    index = read_index(text.parent / "shards")
    assert index.settings["corpus"]["caf\\xe9.txt"] == "4 bytes"
    assert shard(config(text)).new_shards == 0
    shard(config(text, "other", corpus=str(text / name)))
    assert "caf\\xe9.txt" in read_index(text.parent / "other").command


def test_the_result_can_be_printed_as_json(text, capsys):
    cli.main([*command(config(text)), "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["shards"] == FILES
    assert summary["documents"]["train"] + summary["documents"]["validation"] == 4 * FILES


@pytest.mark.parametrize(("documents", "expected"), [(2, 1), (50, 5), (300, 30), (1500, 100), (30_000, 150)])
def test_a_small_corpus_holds_out_a_hundred_documents_or_a_tenth(text, documents, expected):
    (text.parent / "corpus.txt").write_text("\n\n".join(f"word {number}" for number in range(documents)))
    source = str(text.parent / "corpus.txt")
    result = shard(config(text, corpus=source, validation_fraction=None, shard_megabytes=32))
    assert result.documents["validation"] == pytest.approx(expected, abs=25 if documents == 30_000 else 0)


@pytest.mark.parametrize(
    ("prefix", "megabytes", "expected"), [("", 32, 100), ("hub:", 32, 100), ("", 0.01, 100), ("hub:", 0.01, 10)]
)
def test_parquet_and_whole_hub_datasets_are_known_to_be_small(text, monkeypatch, prefix, megabytes, expected):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 1000)
    folder = text.parent / "data"
    folder.mkdir()
    rows = [{"text": f"word {number}"} for number in range(2000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    result = shard(config(text, corpus=f"{prefix}{folder}", validation_fraction=None, shard_megabytes=megabytes))
    assert (result.shards == 1) == (megabytes == 32)
    assert result.documents["validation"] == pytest.approx(expected, rel=0 if megabytes == 32 else 0.4)


def test_the_validation_fraction_is_estimated_from_several_files(text):
    """Long documents at the start, such as books before articles, do not make a large corpus a small one."""
    for number in range(1, FILES):
        (text / f"{number}.txt").write_text("\n\n".join(f"word {number} {document}" for document in range(30_000)))
    (text / "0.txt").write_text("\n\n".join(f"book {number} " + "long " * 4000 for number in range(20)))
    result = shard(config(text, validation_fraction=None, shard_megabytes=0.1))
    share = result.documents["validation"] / sum(result.documents.values())
    assert share == pytest.approx(0.005, rel=0.3)


def test_the_validation_fraction_of_several_shards_is_estimated(text):
    for file in range(FILES):
        (text / f"{file}.txt").write_text("\n\n".join(f"word {file} {number}" for number in range(500)))
    result = shard(config(text, validation_fraction=None))
    assert result.shards > 1
    assert 80 < result.documents["validation"] < 120
    assert shard(config(text, validation_fraction=None)).new_shards == 0


@pytest.mark.parametrize(("fraction", "missing"), [(None, "no validation text"), (0.999999, "no train text")])
def test_a_text_of_one_document_says_what_ends_documents(tmp_path, fraction, missing):
    (tmp_path / "text.txt").write_text("the cat sat\n" * 50)
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    result = str(shard(config(tmp_path / "text.txt", validation_fraction=fraction)))
    assert f"{missing}, which pre-training needs: there are too few documents" in result
    assert "--document-end line" in result
