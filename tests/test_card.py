"""Model cards state what was trained and measured, and their code loads the model; encoders load elsewhere."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from synthetic import write_choices
from transformers_models import add_noise

import electra
from electra.finetuning.config import TaskConfig
from electra.finetuning.job import read_job_result
from electra.finetuning.kinds import KINDS, define_task
from electra.finetuning.storage import load_pretrained, save_finetuned_model
from electra.pretraining.command import pretrain
from electra.runfolder import read_json, write_stored

TEXTS = ["the big cat sat on the mat .", "the dog ran in the house . the small bird flew over the tree .", "cat"]


def read_card(folder: Path) -> tuple[dict, str]:
    """The metadata and the text of a model card."""
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


def run_python_blocks(card: str, folder: Path) -> dict:
    """Run the code of a card, in which the folder has a placeholder; returns its variables."""
    variables: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block.replace("path/to/this/folder", str(folder)), variables)
    return variables


@pytest.fixture(scope="session")
def encoder_export(finished_run, tmp_path_factory) -> Path:
    """The encoder of a run for transformers and sentence-transformers."""
    folder = tmp_path_factory.mktemp("encoder") / "my-encoder"
    electra.export(model=finished_run, part="encoder", training_data="Simple sentences (CC0).", output=folder)
    return folder


def test_a_card_states_text_training_and_held_out_metrics(encoder_export):
    metadata, card = read_card(encoder_export)
    assert metadata["library_name"] == "transformers"
    assert metadata["pipeline_tag"] == "feature-extraction"
    assert "sentence-transformers" in metadata["tags"]
    assert card.startswith("\n# my-encoder\n")
    assert "Simple sentences (CC0)." in card
    assert re.search(r"text +\| text\.txt: .* 1,\d{3} documents, [\d,]+ tokens", card)
    assert re.search(r"trained on +\| 2,560 tokens in 20 steps", card)  # 20 steps of 8 rows of 16 tokens
    assert re.search(r"rtd_auc +\| 0\.\d+", card)


def test_a_card_states_the_settings_of_the_last_phase(run_config, tmp_path):
    phases = ("fraction=0.5", "fraction=0.5,length=12,objective=electra-15")
    config = run_config(steps=4, phases=phases)
    pretrain(config)
    electra.export(model=config.output, part="encoder", output=tmp_path / "encoder")
    card = read_card(tmp_path / "encoder")[1]
    assert re.search(r"objective +\| electra-15, recipe", card)
    assert re.search(r"rows +\| 12 tokens", card)
    assert re.search(rf"phases +\| {' '.join(phases)} ", card)


def test_the_code_in_the_card_of_an_encoder_runs(encoder_export):
    variables = run_python_blocks(read_card(encoder_export)[1], encoder_export)
    assert type(variables["model"]).__name__ == "ElectraModel"
    assert variables["vectors"].shape == (2, 32)


@pytest.mark.parametrize("style", ["classic", "modern"])
def test_sentence_transformers_gives_the_vectors_of_embed(encoder_export, modern_folder, finished_run, tmp_path, style):
    from sentence_transformers import SentenceTransformer

    source, folder = finished_run, encoder_export
    if style == "modern":
        source, folder = modern_folder, tmp_path / "modern"
        electra.export(model=source, part="encoder", output=folder)
    vectors = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(vectors, electra.load(source, device="cpu").embed(TEXTS), atol=1e-5)


def test_the_card_of_a_fine_tuned_model_has_its_dev_metrics(finetuned, tmp_path):
    electra.export(model=finetuned.output, output=tmp_path / "hf")
    metadata, card = read_card(tmp_path / "hf")
    assert metadata["pipeline_tag"] == "text-classification"
    assert "240 train rows, 60 dev rows" in card
    results = [read_job_result(finetuned.output / f"seed-{seed}" / "result.json") for seed in (1, 2)]
    best = max(result.metrics["dev"]["accuracy"] for result in results)
    assert re.search(rf"accuracy +\| {100 * best:.2f} ", card)
    assert "## Pre-training" not in card  # the encoder is not of a run
    run_python_blocks(card, tmp_path / "hf")


def test_a_card_without_training_because_of_a_damaged_file_is_reported(finetuned, tmp_path, capsys):
    shutil.copytree(finetuned.output, tmp_path / "tuned")
    for result in (tmp_path / "tuned").glob("seed-*/result.json"):
        result.write_text(result.read_text().replace('"steps": ', '"steps": 1'))
    electra.export(model=tmp_path / "tuned/seed-1/model", output=tmp_path / "hf")
    assert "## Fine-tuning" not in read_card(tmp_path / "hf")[1]
    error = capsys.readouterr().err
    assert "the model card does not say how the model was trained" in error
    assert "seed-1/result.json is damaged" in error


def test_a_card_without_training_because_of_values_of_another_type_is_reported(finished_run, tmp_path, capsys):
    shutil.copytree(finished_run, tmp_path / "run")
    record = read_json(tmp_path / "run/config.json")
    write_stored(tmp_path / "run/config.json", record | {"environment": {"device": 1e308}})
    electra.export(model=tmp_path / "run", output=tmp_path / "hf")
    assert "is damaged or of another version" in capsys.readouterr().err


def test_a_card_without_training_because_of_a_missing_file_is_reported(finished_run, tmp_path, capsys):
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "run/config.json").unlink()
    electra.export(model=tmp_path / "run", output=tmp_path / "hf")
    assert "run has no config.json" in capsys.readouterr().err


def test_a_model_that_left_its_run_has_a_card_without_training(finished_run, tmp_path, capsys):
    [*_, checkpoint] = sorted((finished_run / "checkpoints").iterdir())
    shutil.copytree(checkpoint, tmp_path / "model")
    electra.export(model=tmp_path / "model", output=tmp_path / "hf")
    _, card = read_card(tmp_path / "hf")
    assert "## Pre-training" not in card
    assert "ElectraForPreTraining" in card
    assert capsys.readouterr().err == ""


def test_text_training_and_license_of_a_model_folder_with_a_card_are_carried_over(finished_run, tmp_path):
    [*_, checkpoint] = sorted((finished_run / "checkpoints").iterdir())
    shutil.copytree(checkpoint, tmp_path / "model")
    sections = "# A model\n\nAbout.\n\n## Text\n\nOld books.\n\n## Pre-training\n\nTen steps.\n\n## Other\n\nElse.\n"
    (tmp_path / "model/README.md").write_text(f"---\nlanguage: en\nlicense: cc0-1.0\ntags: [x]\n---\n\n{sections}")
    electra.export(model=tmp_path / "model", output=tmp_path / "hf")
    metadata, card = read_card(tmp_path / "hf")
    assert (metadata["language"], metadata["license"]) == ("en", "cc0-1.0")
    assert "## Text\n\nOld books.\n\n## Pre-training\n\nTen steps.\n\n## How to load it" in card
    electra.export(model=tmp_path / "model", training_data="New books.", output=tmp_path / "other")
    assert "## Text\n\nNew books.\n\n## Pre-training\n\nTen steps." in read_card(tmp_path / "other")[1]


def test_the_code_in_the_card_of_an_onnx_folder_runs_for_long_texts(finished_run, tmp_path):
    electra.export(model=finished_run, to="onnx", output=tmp_path / "onnx")
    card = (tmp_path / "onnx/README.md").read_text()
    [logits] = run_python_blocks(card.replace('"A text."', '"A text. " * 100'), tmp_path / "onnx")["outputs"]
    assert logits.shape == (1, electra.load(finished_run, device="cpu").trained_length)


def test_the_code_in_the_card_of_an_onnx_folder_runs(finished_run, tmp_path):
    electra.export(model=finished_run, to="onnx", output=tmp_path / "onnx")
    metadata, card = read_card(tmp_path / "onnx")
    assert metadata["library_name"] == "transformers.js"
    [logits] = run_python_blocks(card, tmp_path / "onnx")["outputs"]
    assert logits.shape == (1, len(electra.load(finished_run, device="cpu").detect("A text.").tokens))
    assert read_json(tmp_path / "onnx/config.json")["architectures"] == ["ElectraForPreTraining"]


@pytest.mark.parametrize("columns", [{"text": "context", "text_b": "question"}, {}])
def test_the_code_in_the_card_of_a_multiple_choice_model_scores_two_choices(encoder_folder, tmp_path, columns):
    write_choices(tmp_path / "rows.jsonl", 20, seed=0)
    task = define_task(TaskConfig(train=tmp_path / "rows.jsonl", kind="choice", **columns))
    pretrained = load_pretrained(encoder_folder)
    (tmp_path / "model").mkdir()
    torch.manual_seed(0)
    model = add_noise(KINDS["choice"].model(task)(pretrained.encoder, task.num_labels))
    save_finetuned_model(model, task, 32, tmp_path / "model", pretrained.folder)
    texts = {"A text.": "the big cat sat", "A choice.": "on the mat .", "Another choice.": "the dog"}
    context, *choices = texts.values()
    row = {"context": context, "question": "", "choices": choices}
    [expected] = electra.load(tmp_path / "model", device="cpu").predict([row])
    assert abs(expected["probabilities"][0] - 0.5) > 0.01
    for to in ("huggingface", "onnx"):
        electra.export(model=tmp_path / "model", to=to, output=tmp_path / to)
        card = (tmp_path / to / "README.md").read_text()
        for text, other in texts.items():
            card = card.replace(text, other)
        logits = run_python_blocks(card, tmp_path / to)["outputs"][0]
        probabilities = torch.as_tensor(logits).softmax(-1).tolist()
        assert probabilities == [pytest.approx(expected["probabilities"], abs=1e-3)]


def test_the_card_says_what_the_logits_of_a_discriminator_mean(finished_run, modern_folder, tmp_path):
    """Two for each token in the modern style, whose class is ModernBertForTokenClassification."""
    for name, model, meaning in (("classic", finished_run, "The sigmoid"), ("modern", modern_folder, "The softmax")):
        electra.export(model=model, output=tmp_path / name)
        assert meaning in read_card(tmp_path / name)[1]
