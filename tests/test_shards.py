"""Shards: the same bytes however they were made, whole or named, never half-written."""

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from electra import cli, runfolder
from electra.data import corpus
from electra.data.prepare import ShardConfig, shard
from electra.data.shards import open_shards
from electra.data.tokenizer import TokenizerConfig, load_tokenizer, train_tokenizer, word_piece
from electra.errors import ConfigError, DataError
from electra.runfolder import PARTIAL, lock_folder

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


def config(text: Path, output: str = "shards", **settings) -> ShardConfig:
    defaults = {"corpus": str(text), "tokenizer": text.parent / "vocab.txt", "output": text.parent / output}
    return ShardConfig(**(defaults | {"shard_megabytes": 5e-5, "validation_fraction": 0.2, "workers": 1} | settings))


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; the index without the command, which names the folder."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found["index.json"] = json.dumps(json.loads(found["index.json"]) | {"command": ""}).encode()
    return found


def fails(capsys, *arguments) -> str:
    """The sentence a command ends with, which has exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(map(str, arguments)))
    assert stopped.value.code == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    return sentence


def command(settings: ShardConfig) -> list[str]:
    return [*settings.command().split()[1:], "--workers", str(settings.workers)]


def test_commands_that_read_a_folder_say_what_they_skip(text, capsys):
    (text / "notes.md").write_text("not read")
    shard(config(text))
    train_tokenizer(TokenizerConfig(corpus=str(text), output=text.parent / "vocab", vocab_size=80))
    said = f"skipped in {text}: 1 .md; "
    assert [line.startswith(said) for line in capsys.readouterr().err.splitlines()] == [True, True]


def test_documents_stand_end_to_end_and_end_with_a_separator(tmp_path, text):
    (tmp_path / "one.txt").write_text("ab c\n\n\n[SEP]")
    shard(config(tmp_path / "one.txt", tokenizer=tmp_path / "vocab.txt", output=tmp_path / "s", validation_fraction=0))
    shards = open_shards(tmp_path / "s")
    [tokens], [ends] = shards.tokens("train"), shards.ends("train")
    named = [TOKENS[token] for token in tokens]
    assert named == ["a", "##b", "c", "[SEP]", "[UNK]", "s", "##e", "##p", "[UNK]", "[SEP]"]
    assert ends.tolist() == [4, 10]
    assert tokens.dtype == np.uint16
    assert shards.index.shards[0].unknown == 2


def test_the_number_of_workers_changes_no_byte(text):
    shard(config(text, "one", workers=1))
    shard(config(text, "three", workers=3))
    assert content(text.parent / "one") == content(text.parent / "three")
    assert len(content(text.parent / "one")) == FILES + 1 + 4


def test_a_document_stays_in_its_split_when_files_are_added(text):
    shard(config(text, "before"))
    (text / "00-new.txt").write_text("one of file z")
    shard(config(text, "after"))
    before, after = (open_shards(text.parent / name) for name in ("before", "after"))
    held_out = [np.concatenate(shards.tokens("validation")).tolist() for shards in (before, after)]
    assert 0 < len(held_out[0]) < before.index.totals("tokens")["train"]
    assert "".join(map(chr, held_out[0])) in "".join(map(chr, held_out[1]))


def test_stopped_at_any_write_it_goes_on_to_the_same_bytes(text, monkeypatch):
    """The run is stopped just before or just after its first rename, then its second, …, always in the same folder."""
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


def test_twenty_kills_leave_no_trace(tmp_path):
    """Killed at random moments, mostly when it has written some shards more; what is finished is begun anew."""
    draw, kills = random.Random(0), 0
    settings = write_words(tmp_path, draw)
    run = [sys.executable, "-m", "electra", *command(settings)]
    while kills < 20:
        wanted = shards_in(settings.output) + draw.randint(0, 5)
        process = subprocess.Popen(run, stdout=subprocess.DEVNULL, start_new_session=True)
        while process.poll() is None and shards_in(settings.output) < wanted:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        if process.wait() == 0:
            shutil.rmtree(settings.output)
        else:
            kills += 1
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL, timeout=60)
    shard(config(tmp_path / "text", "whole"))
    assert content(settings.output) == content(tmp_path / "whole")


def write_words(folder: Path, draw: random.Random) -> ShardConfig:
    """Forty files of random words, one word a document, each file a shard."""
    (folder / "text").mkdir()
    for number in range(40):
        words = ("".join(draw.choices("abcdefghij", k=draw.randint(1, 9))) for _ in range(5000))
        (folder / "text" / f"{number:02d}.txt").write_text("\n\n".join(words))
    (folder / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    return config(folder / "text", workers=2)


def shards_in(folder: Path) -> int:
    return len(list(folder.glob("*.safetensors")))


def test_workers_end_when_their_parent_is_killed(tmp_path):
    script = (
        "import os, time, electra.data.workers as s\n"
        "if __name__ == '__main__':\n"
        "    for pid in s.in_order(os.getpgid, [0, 0, 0, 0, 0, 0], 2):\n"
        "        print('up', flush=True); time.sleep(60)\n"
    )
    (tmp_path / "run.py").write_text(script)
    process = subprocess.Popen([sys.executable, tmp_path / "run.py"], stdout=subprocess.PIPE, start_new_session=True)
    with process:
        process.stdout.readline()
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while group_lives(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not group_lives(process.pid)


def group_lives(group: int) -> bool:
    """Whether any process of a group still runs; one that has ended and was not waited for does not."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return any(line.split()[0] == str(group) and line.split()[1][0] != "Z" for line in listed.splitlines())


def test_finished_shards_are_recognised(text):
    assert shard(config(text)).made == FILES
    again = shard(config(text))
    assert again.made == 0
    assert "all was there already" in str(again)


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing"])
def test_only_a_damaged_shard_is_made_again(text, damage):
    shard(config(text))
    before = content(text.parent / "shards")
    file = text.parent / "shards" / "00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink() if damage == "missing" else file.write_bytes(data[:-5] if damage == "cut" else data)
    if damage == "flipped":
        assert open_shards(text.parent / "shards").damaged() == ["00003.safetensors"]
    else:
        with pytest.raises(DataError, match=r"damaged in .*: 00003.safetensors; this makes only what is damaged again"):
            open_shards(text.parent / "shards")
    assert shard(config(text)).made == 1
    assert content(text.parent / "shards") == before


def test_the_command_in_the_sentence_makes_a_damaged_shard_again(text, capsys):
    shard(config(text))
    before = content(text.parent / "shards")
    (text.parent / "shards" / "00002.safetensors").write_bytes(b"")
    sentence = fails(capsys, "inspect", text.parent / "shards")
    arguments = sentence.strip().partition("again: electra ")[2].split()
    cli.main(arguments)
    assert content(text.parent / "shards") == before


def test_the_command_is_for_where_the_shards_lie_now(text, capsys):
    shard(config(text))
    moved = (text.parent / "shards").rename(text.parent / "moved shards")
    (moved / "00002.safetensors").write_bytes(b"")
    words = shlex.split(fails(capsys, "inspect", moved).partition("again: ")[2])
    assert words[words.index("--output") + 1] == str(moved)


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation_fraction": 0.5}, "--validation-fraction was 0.2 and is now 0.5"),
        ({"document_end": "line"}, "--document-end was blank-line and is now line"),
    ],
)
def test_other_settings_are_refused_and_nothing_is_touched(text, is_finished, change, message):
    shard(config(text))
    if not is_finished:
        settings = json.loads((text.parent / "shards" / "index.json").read_text())["settings"]
        (text.parent / "shards" / "unfinished.json").write_text(json.dumps(settings))
        (text.parent / "shards" / "index.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in (text.parent / "shards").rglob("*")}
    with pytest.raises(ConfigError, match=f"{message}; .* start over: rm -r "):
        shard(config(text, **change))
    assert {path: path.stat().st_mtime_ns for path in (text.parent / "shards").rglob("*")} == before


def test_a_changed_corpus_is_named_by_its_file(text):
    shard(config(text))
    (text / "9.txt").write_text("more")
    with pytest.raises(ConfigError, match=r"corpus 9.txt was absent and is now 4 bytes"):
        shard(config(text))


def test_another_tokenizer_is_named_by_the_folder_of_the_first(text):
    shard(config(text))
    (text.parent / "vocab.txt").write_text("\n".join([*TOKENS, "new"]) + "\n")
    with pytest.raises(ConfigError, match="tokenizer has other content"):
        shard(config(text))


def test_a_run_that_fails_before_its_first_shard_leaves_nothing(text, capsys):
    (text / "0.txt").write_bytes(b"caf\xe9")
    assert "kept" not in fails(capsys, *command(config(text, "new/shards", strict=True)))
    assert not (text.parent / "new").exists()
    (text.parent / "shards").mkdir()
    fails(capsys, *command(config(text, strict=True)))
    assert list((text.parent / "shards").iterdir()) == []


def test_a_run_that_was_killed_before_its_first_shard_may_be_begun_anew(text):
    (text.parent / "shards").mkdir()
    (text.parent / "shards" / "unfinished.json").write_text('{"tokenizer": "another"}')
    assert shard(config(text, strict=True)).made == FILES


def test_a_run_that_finished_a_shard_is_not_replaced_by_another(text, capsys):
    (text / "5.txt").write_bytes(b"caf\xe9")
    kept = f"; 5 finished shards are kept in {text.parent / 'shards'}, and the same command on the same text goes on"
    assert kept in fails(capsys, *command(config(text, strict=True)))
    (text / "5.txt").write_text("coffee")
    sentence = fails(capsys, *command(config(text, strict=True)))
    assert "corpus 5.txt was 4 bytes and is now 6 bytes; " in sentence
    assert sentence.strip().endswith(f"start over: rm -r {text.parent / 'shards'}")


def test_a_folder_with_other_files_is_left_alone(text):
    (text.parent / "shards").mkdir()
    (text.parent / "shards" / "thesis.doc").write_text("precious")
    with pytest.raises(ConfigError, match="shards holds other files; choose a new or empty folder"):
        shard(config(text))
    assert [path.name for path in (text.parent / "shards").iterdir()] == ["thesis.doc"]


def test_shards_of_another_tokenizer_are_refused(text):
    shard(config(text))
    shards = open_shards(text.parent / "shards")
    shards.require_tokenizer(load_tokenizer(text.parent / "vocab.txt"))
    with pytest.raises(DataError, match=r"made with another tokenizer \(57 entries, .* than the model's \(58 entries"):
        shards.require_tokenizer(word_piece([*TOKENS, "new"], lowercase=True))


def test_missing_and_unfinished_shards_are_told_apart(tmp_path):
    with pytest.raises(DataError, match=r"no shards in .*; make shards with: electra shard .* --output shards/$"):
        open_shards(tmp_path)
    (tmp_path / "unfinished.json").write_text("{}")
    with pytest.raises(DataError, match="are unfinished; run the command that makes them again"):
        open_shards(tmp_path)


def test_what_stands_in_place_of_shards_is_named(tmp_path):
    (tmp_path / "text.txt").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    for name, said in (
        ("text.txt", r"text.txt is a file, and shards are a folder; .* --corpus .*text.txt --output shards/$"),
        ("run", "run is a run or a model, not a folder of shards; .* --corpus … --output shards/$"),
        ("nope", "^there is no folder .*nope; .* --corpus … --output shards/$"),
    ):
        with pytest.raises(DataError, match=said):
            open_shards(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("empty.txt", b"", "there is no text in"),
        ("binary.txt", b"PK\x03\x04\x00\x00", "binary.txt, line 1: a NUL byte"),
        ("cut.txt.gz", b"\x1f\x8b\x08\x00\x00", "cut.txt.gz is damaged or cut short"),
        ("controls.txt", b"\x07\x08", "no document of"),
    ],
)
def test_bad_text_ends_in_one_sentence(text, capsys, name, data, sentence):
    (text.parent / "bad").mkdir()
    (text.parent / "bad" / name).write_bytes(data)
    assert sentence in fails(capsys, *command(config(text, corpus=str(text.parent / "bad"))))
    assert not (text.parent / "shards").exists()


def test_a_worker_s_complaint_is_one_sentence_too(text, capsys):
    (text / "5.txt").write_bytes(b"bad \xff")
    sentence = fails(capsys, *command(config(text, workers=2, strict=True)))
    assert "5.txt, line 1: not valid UTF-8" in sentence


def test_a_full_disk_ends_in_one_sentence_and_the_rerun_goes_on(text, capsys, monkeypatch):
    def full(handle):
        if len(list((text.parent / "shards").glob("*.safetensors"))) == 2:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(runfolder.os, "fsync", full)
        sentence = fails(capsys, *command(config(text)))
    assert "cannot write (No space left on device)" in sentence
    assert "00002.safetensors; 2 finished shards are kept in" in sentence
    assert not list((text.parent / "shards").rglob(f"*{PARTIAL}"))
    assert shard(config(text)).made == FILES - 2


def test_no_permission_ends_in_one_sentence(text, capsys, monkeypatch):
    def refuse(path, *arguments, **settings):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "Permission denied" in fails(capsys, *command(config(text)))


def test_two_runs_never_write_into_one_folder(text):
    with lock_folder(text.parent / "shards"), pytest.raises(ConfigError, match=r"is using .*shards"):
        shard(config(text))


def test_a_one_word_document_and_an_overlong_one_are_sharded(text, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK", 100)
    monkeypatch.setattr(corpus, "LONGEST", 1000)
    (text / "long.txt").write_text("word " * 1000)
    (text / "short.txt").write_text("x")
    result = shard(config(text, validation_fraction=0))
    assert result.cut == 4
    assert result.documents["train"] == 4 * FILES + 5 + 1
    assert result.tokens["train"] > 4000


def test_the_summary_is_json_when_asked(text, capsys):
    cli.main([*command(config(text)), "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["shards"] == FILES
    assert summary["documents"]["train"] + summary["documents"]["validation"] == 4 * FILES
