"""Inference with trained models: detect, fill and embed, from Python and from the command line."""

import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import error_message

import electra
from electra.cli import main
from electra.errors import ConfigError, DataError
from electra.serving.inference import Detection
from electra.training import hardware
from electra.training.hardware import git_commit


@pytest.fixture(scope="module")
def model(finished_run):
    return electra.load(finished_run)


@pytest.fixture
def damaged_run(finished_run, tmp_path) -> Path:
    """A copy of the run whose last checkpoint has no tokenizer."""
    copy = tmp_path / "run"
    shutil.copytree(finished_run, copy)
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (last_checkpoint(copy) / name).unlink()
    return copy


def last_checkpoint(run: Path) -> Path:
    return sorted((run / "checkpoints").iterdir())[-1]


def test_detect_returns_the_discriminators_probability_of_every_token(model):
    detection = model.detect("The cat sat.")
    assert detection.tokens == ["[CLS]", "the", "cat", "sat", ".", "[SEP]"]
    ids = torch.tensor([model.tokenizer.library.encode("The cat sat.").ids])
    expected = model.electra.discriminator(ids)[0].sigmoid().tolist()
    assert detection.replaced == pytest.approx(expected, abs=1e-4)


def test_fill_returns_the_most_likely_tokens_for_each_mask(model):
    predictions = model.fill("the [MASK] sat on [MASK]", count=3)
    assert [mask.position for mask in predictions.masks] == [2, 5]
    for mask in predictions.masks:
        assert len(mask.tokens) == 3
        assert list(mask.tokens.values()) == sorted(mask.tokens.values(), reverse=True)


@pytest.mark.parametrize("call", ["detect", "fill", "embed"])
def test_outputs_that_are_not_finite_are_no_answer(finished_run, call):
    model = electra.load(finished_run)
    for parameter in model.electra.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(DataError, match="are not finite"):
        getattr(model, call)("the [MASK] sat")


def test_fill_needs_a_mask_within_the_trained_length(model):
    with pytest.raises(ConfigError, match=r"the \[MASK\] of the text is after the first 16 tokens"):
        model.fill("cat " * 1000 + "[MASK]")
    for text in ("the cat sat", "cat " * 1000):
        with pytest.raises(ConfigError, match=r"the text has no \[MASK\]"):
            model.fill(text)


def test_fill_needs_a_positive_count(finished_run, capsys):
    message = error_message(["fill", "--model", str(finished_run), "the [MASK] sat", "--count", "0"], capsys)
    assert "--count is 0" in message


def test_embed_pools_the_hidden_states(model):
    ids = torch.tensor([model.tokenizer.library.encode("the cat").ids])
    hidden = model.electra.discriminator.encoder(ids)[0]
    assert model.embed(["the cat", "a dog"]).shape == (2, 32)
    assert model.embed([]).shape == (0, 32)
    torch.testing.assert_close(model.embed("the cat")[0], hidden.mean(0).detach())
    torch.testing.assert_close(model.embed("the cat", pooling="cls")[0], hidden[0].detach())


@pytest.mark.parametrize("method", ["detect_batch", "fill_batch", "embed"])
def test_a_text_that_is_no_string_is_refused(model, method):
    with pytest.raises(DataError, match="text 2 holds a int; a text must be a string"):
        getattr(model, method)(["a [MASK]", 1])


def test_texts_are_truncated_to_the_trained_length(finished_run, model, capsys):
    """The run has 512 positions, of which rows of 16 tokens train 16."""
    detection = model.detect("cat " * 1000)
    assert detection.tokens == ["[CLS]", *["cat"] * 14, "[SEP]"]
    assert detection.is_truncated
    assert "truncated" in str(detection)
    for text, is_truncated in (("cat " * 1000, True), ("the cat", False)):
        main(["embed", "--model", str(finished_run), text, "--json"])
        assert json.loads(capsys.readouterr().out)["is_truncated"] == is_truncated
        main(["embed", "--model", str(finished_run), text])
        assert ("truncated" in capsys.readouterr().out) == is_truncated


def test_likely_replaced_tokens_are_marked():
    assert str(Detection(["the", "cat"], [0.1, 0.9], is_truncated=False)) == "the cat(0.90)"
    unmarked = "the cat\n(no token is likely replaced; the most likely is cat, 0.40)"
    assert str(Detection(["the", "cat"], [0.1, 0.4], is_truncated=False)) == unmarked


def test_the_commands_print_json(finished_run, capsys):
    main(["detect", "--model", str(finished_run), "the cat sat", "--json"])
    assert list(json.loads(capsys.readouterr().out))[:2] == ["tokens", "replaced"]
    main(["fill", "--model", str(finished_run), "the [MASK] sat", "--json"])
    assert json.loads(capsys.readouterr().out)["masks"][0]["position"] == 2
    main(["embed", "--model", str(finished_run), "the cat sat", "--json"])
    assert len(json.loads(capsys.readouterr().out)["vector"]) == 32


@pytest.mark.parametrize("is_piped", [False, True])
def test_texts_come_from_the_lines_of_a_file_or_of_standard_input(
    finished_run, model, tmp_path, capsys, monkeypatch, is_piped
):
    content = "the cat sat\n\nthe dog ran\r\n".encode("utf-8-sig")
    (tmp_path / "texts").write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    main(
        ["detect", "--model", str(finished_run), "--json", *([] if is_piped else ["--input", str(tmp_path / "texts")])]
    )
    results = json.loads(capsys.readouterr().out)["results"]
    assert [each["replaced"] for each in results] == [
        model.detect(text).replaced for text in ("the cat sat", "", "the dog ran")
    ]


def test_blank_lines_have_results_without_predictions(finished_run, tmp_path, capsys):
    (tmp_path / "texts").write_text("the [MASK] sat\n\nthe [MASK] ran\n")
    main(["fill", "--model", str(finished_run), "--json", "--input", str(tmp_path / "texts")])
    results = json.loads(capsys.readouterr().out)["results"]
    assert [len(each["masks"]) for each in results] == [1, 0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[MASK]\nno mask\n", "line 2: the text has no"),
        (b"\n", "contains no text"),
        (b"caf\xe9", "is not text in UTF-8"),
    ],
)
def test_lines_that_are_no_texts_are_reported(finished_run, tmp_path, capsys, content, message):
    (tmp_path / "texts").write_bytes(content)
    assert message in error_message(f"fill --model {finished_run} --input {tmp_path}/texts", capsys)
    assert "leave out one" in error_message(f"fill --model {finished_run} [MASK] --input texts", capsys)


@pytest.mark.parametrize("path", ["", "seed-1", "seed-1/model"])
def test_a_fine_tuned_model_predicts(finetuned, tmp_path, path):
    rows = [json.loads(line) for line in finetuned.dev.read_text().splitlines()]
    predictions = electra.load(finetuned.output / path, device="cpu").predict([row["text"] for row in rows])
    if path:
        electra.predict(model=finetuned.output / path, input=finetuned.dev, output=tmp_path / "out.jsonl", device="cpu")
        written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [row | each for row, each in zip(rows, predictions, strict=True)] == written
    else:
        assert sum(row["label"] == each["prediction"] for row, each in zip(rows, predictions, strict=True)) > 50


def test_a_model_of_single_texts_predicts_no_pairs(finetuned):
    model = electra.load(finetuned.output, device="cpu")
    assert model.predict([]) == []
    with pytest.raises(ConfigError, match="needs one text per row"):
        model.predict("a text", ["another"])


def test_a_model_without_a_tokenizer_is_reported(damaged_run):
    with pytest.raises(DataError, match="has no tokenizer"):
        electra.load(damaged_run)


def test_the_tokenizer_of_another_model_is_reported(damaged_run):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(100))]
    (last_checkpoint(damaged_run) / "checksums.json").unlink()
    (last_checkpoint(damaged_run) / "vocab.txt").write_text("\n".join(words) + "\n")
    with pytest.raises(DataError, match=r"105 .*22"):
        electra.load(damaged_run)


@pytest.mark.parametrize(("text", "message"), [(" ", "the text is empty"), ("caf\udce9", "not valid UTF-8")])
def test_texts_that_are_empty_or_not_utf_8_are_reported(finished_run, capsys, text, message):
    assert message in error_message(["embed", "--model", str(finished_run), text], capsys)


def test_a_bare_encoder_can_only_embed(finished_run, tmp_path):
    electra.export(model=finished_run, output=tmp_path / "hf", part="encoder")
    electra.import_model(from_=tmp_path / "hf", output=tmp_path / "bare")
    for folder in ("bare", "hf"):
        model = electra.load(tmp_path / folder)
        with pytest.raises(ConfigError, match="without a replaced token detection head"):
            model.detect("the cat sat")
        assert model.embed("the cat sat").shape == (1, 32)


def test_an_exported_model_gives_the_same_results_as_its_run(finished_run, model, tmp_path):
    for part in ("discriminator", "generator"):
        electra.export(model=finished_run, output=tmp_path / part, part=part)
    assert electra.load(tmp_path / "discriminator").detect("the cat sat") == model.detect("the cat sat")
    assert electra.load(tmp_path / "generator").fill("the [MASK] sat") == model.fill("the [MASK] sat")


def test_a_folder_without_a_model_is_reported(finished_run, tmp_path):
    (tmp_path / "text").write_text("words")
    with pytest.raises(DataError, match=finished_run.name):
        electra.load(finished_run.parent)
    with pytest.raises(DataError, match="is a file"):
        electra.load(tmp_path / "text")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="has no checkpoint yet"):
        electra.load(tmp_path)


def test_the_recorded_commit_is_not_that_of_another_repository(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "other"], check=True)
    other = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert git_commit() != other
    monkeypatch.setattr(hardware, "__file__", str(tmp_path / "electra/training/hardware.py"))
    assert git_commit() is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "electra"\n')
    assert git_commit() == other
