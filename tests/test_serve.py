"""A trained model at work: detect, fill, embed, from Python and from the command line."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

import electra
from electra.cli import main
from electra.errors import ConfigError, DataError
from electra.export.command import ExportConfig, ImportConfig, export, import_model
from electra.pretraining.command import pretrain
from electra.serve.command import Shown, colored
from electra.serve.doctor import EXTRAS, extra
from electra.serve.inference import Detected
from electra.training.hardware import commit


@pytest.fixture
def run(run_config):
    config = run_config()
    pretrain(config)
    return config.output


def test_detect_gives_a_verdict_for_every_token(run):
    found = electra.load(run).detect("The cat sat.")
    assert found.tokens == ["[CLS]", "the", "cat", "sat", ".", "[SEP]"]
    assert len(found.replaced) == 6
    assert all(0 <= verdict <= 1 for verdict in found.replaced)


def test_detect_says_what_the_discriminator_says(run):
    model = electra.load(run)
    ids = torch.tensor([model.tokenizer.library.encode("the cat sat").ids])
    expected = model.electra.discriminator(ids)[0].sigmoid().tolist()
    assert model.detect("the cat sat").replaced == pytest.approx(expected, abs=1e-4)


def test_fill_gives_the_likeliest_tokens_for_each_blank(run):
    found = electra.load(run).fill("the [MASK] sat on [MASK]", count=3)
    assert [blank.position for blank in found.blanks] == [2, 5]
    for blank in found.blanks:
        assert len(blank.guesses) == 3
        assert list(blank.guesses.values()) == sorted(blank.guesses.values(), reverse=True)


def test_fill_without_a_blank_is_refused(run):
    with pytest.raises(ConfigError, match=r"there is no \[MASK\] in the text"):
        electra.load(run).fill("the cat sat")


def test_fill_with_no_guess_is_refused(run, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["fill", "--model", str(run), "the [MASK] sat", "--count", "0"])
    assert exit.value.code == 2
    assert "count is 0" in capsys.readouterr().err


def test_embed_pools_the_hidden_states(run):
    model = electra.load(run)
    ids = torch.tensor([model.tokenizer.library.encode("the cat").ids])
    hidden = model.electra.discriminator.encoder(ids)[0]
    assert model.embed(["the cat", "a dog"]).shape == (2, 32)
    assert model.embed([]).shape == (0, 32)
    torch.testing.assert_close(model.embed("the cat")[0], hidden.mean(0).detach())
    torch.testing.assert_close(model.embed("the cat", pooling="cls")[0], hidden[0].detach())


def test_a_text_longer_than_the_positions_is_cut_and_it_says_so(run):
    found = electra.load(run).detect("cat " * 1000)
    assert len(found.tokens) == 512
    assert found.is_truncated
    assert "cut to the model's positions" in colored(found)


def test_a_vector_of_a_cut_text_says_so(run, capsys):
    for text, is_cut in (("cat " * 1000, True), ("the cat", False)):
        main(["embed", "--model", str(run), text, "--json"])
        assert json.loads(capsys.readouterr().out)["is_truncated"] == is_cut
        main(["embed", "--model", str(run), text])
        assert ("cut to the model's positions" in capsys.readouterr().out) == is_cut


def test_a_blank_beyond_the_positions_is_told_from_none(run):
    with pytest.raises(ConfigError, match=r"the \[MASK\] lies beyond the 512 tokens that the model can read"):
        electra.load(run).fill("cat " * 1000 + "[MASK]")
    with pytest.raises(ConfigError, match=r"there is no \[MASK\] in the text"):
        electra.load(run).fill("cat " * 1000)


def test_where_nothing_looks_replaced_the_likeliest_is_named():
    assert str(Shown(["the", "cat"], [0.1, 0.4])) == "the cat\n(no token looks replaced; the likeliest is cat, 0.40)"


def test_suspicious_tokens_are_marked():
    assert colored(Detected(["the", "cat"], [0.1, 0.9])) == "the cat(0.90)"


def test_the_commands_answer_in_json(run, capsys):
    main(["detect", "--model", str(run), "the cat sat", "--json"])
    assert list(json.loads(capsys.readouterr().out))[:2] == ["tokens", "replaced"]
    main(["fill", "--model", str(run), "the [MASK] sat", "--json"])
    assert json.loads(capsys.readouterr().out)["blanks"][0]["position"] == 2
    main(["embed", "--model", str(run), "the cat sat", "--json"])
    assert len(json.loads(capsys.readouterr().out)["vector"]) == 32


def test_a_model_without_a_tokenizer_is_named(run):
    folder = sorted((run / "checkpoints").iterdir())[-1]
    for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink()
    with pytest.raises(DataError, match="has no tokenizer; copy the"):
        electra.load(run)


def test_another_models_tokenizer_is_refused(run):
    folder = sorted((run / "checkpoints").iterdir())[-1]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(100))]
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink()
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    with pytest.raises(DataError, match="the tokenizer has 105 entries but the model 22"):
        electra.load(run)


def test_an_empty_text_is_refused(run, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["detect", "--model", str(run), " "])
    assert exit.value.code == 2
    assert "the text is empty" in capsys.readouterr().err


def test_doctor_says_what_will_be_used(capsys):
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["torch"] == torch.__version__
    assert found["uses"]["device"] in ("cpu", "cuda")


def test_doctor_knows_all_extras_and_their_libraries():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    extras = {name: libraries for name, libraries in project["optional-dependencies"].items() if name != "dev"}
    named = {name: tuple(re.match(r"\w+", library)[0] for library in libraries) for name, libraries in extras.items()}
    assert {name: libraries for name, (libraries, _) in EXTRAS.items()} == named


def test_doctor_says_how_to_get_an_extra():
    assert extra(("pytest",), "tests") == f"tests: pytest {pytest.__version__}"
    assert extra(("no-such-library",), "nothing") == "nothing: pip install no-such-library"


def test_the_recorded_commit_is_never_another_repositorys(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "theirs"], check=True)
    theirs = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert commit() != theirs
    monkeypatch.setattr(electra, "__file__", str(tmp_path / "electra/__init__.py"))
    assert commit() is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "electra"\n')
    assert commit() == theirs


def test_a_bare_encoder_gives_no_verdicts(run, tmp_path):
    export(ExportConfig(model=run, output=tmp_path / "hf", part="encoder"))
    import_model(ImportConfig(source=tmp_path / "hf", output=tmp_path / "bare"))
    for folder in ("bare", "hf"):
        model = electra.load(tmp_path / folder)
        with pytest.raises(ConfigError, match="came as a bare encoder"):
            model.detect("the cat sat")
        assert model.embed("the cat sat").shape == (1, 32)


def test_a_hugging_face_folder_answers_as_the_run_it_came_from(run, tmp_path):
    for part in ("discriminator", "generator"):
        export(ExportConfig(model=run, output=tmp_path / part, part=part))
    ours, text = electra.load(run), "the [MASK] sat"
    assert electra.load(tmp_path / "discriminator").detect("the cat sat") == ours.detect("the cat sat")
    assert electra.load(tmp_path / "generator").fill(text) == ours.fill(text)


def test_a_text_that_is_not_utf_8_is_refused(run, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["embed", "--model", str(run), "caf\udce9"])
    assert exit.value.code == 2
    assert "not valid UTF-8" in capsys.readouterr().err


def test_a_folder_of_models_is_no_model(run, tmp_path):
    (tmp_path / "text").write_text("words")
    for path, sentence in (
        (run.parent, f"it has no config.json; it holds {run.name}"),
        (tmp_path / "text", "is a file"),
    ):
        with pytest.raises(DataError, match=sentence):
            electra.load(path)


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="has no checkpoint yet"):
        electra.load(tmp_path)
