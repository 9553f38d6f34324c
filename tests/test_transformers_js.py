"""transformers.js, in node, loads exported folders and gives our logits."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import electra
from electra.finetuning.storage import load_finetuned_model
from electra.model.storage import load_model

FOLDER = Path(__file__).parent / "transformers_js"
IS_INSTALLED = shutil.which("node") is not None and (FOLDER / "node_modules").is_dir()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not IS_INSTALLED, reason="node or transformers.js is missing: run tests/install_browser_and_node"
    ),
]
TEXTS = ["the big cat sat on the mat .", "the dog ran in the house . the small bird flew over the tree ."]


def outputs_in_node(class_name: str, folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    """Token ids and outputs of the texts, as transformers.js computes them."""
    command = ["node", str(FOLDER / "outputs.mjs"), class_name, str(folder), dtype, *TEXTS]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER)
    assert ended.returncode == 0, ended.stderr
    return {name: torch.tensor(values) for name, values in json.loads(ended.stdout).items()}


@pytest.mark.parametrize("style", ["classic", "modern"])
def test_discriminators_have_our_logits(encoder_folder, modern_folder, tmp_path, style):
    source = encoder_folder if style == "classic" else modern_folder
    electra.export(model=source, to="onnx", int8=True, output=tmp_path / "model")
    discriminator = load_model(source).eval().require_discriminator()
    tokenizer = electra.load(source, device="cpu").tokenizer
    for dtype, tolerance in (("fp32", 1e-4), ("q8", 0.5)):
        outputs = outputs_in_node("AutoModel", tmp_path / "model", dtype)
        rows = [encoding.ids for encoding in tokenizer.library.encode_batch(TEXTS)]
        for number, row in enumerate(rows):
            assert outputs["input_ids"][number, : len(row)].tolist() == row
            with torch.no_grad():
                expected = discriminator(torch.tensor([row]))[0]
            logits = outputs["logits"][number, : len(row)]
            actual = logits if style == "classic" else logits[:, 1] - logits[:, 0]
            assert (actual - expected).abs().max() < tolerance
            assert expected.std() > 0.1


def test_classifiers_have_our_logits(finetuned, tmp_path):
    electra.export(model=finetuned.output, to="onnx", output=tmp_path / "model")
    outputs = outputs_in_node("AutoModelForSequenceClassification", tmp_path / "model", "fp32")
    models = [load_finetuned_model(each)[0] for each in sorted(finetuned.output.glob("seed-*/model"))]
    input_ids = outputs["input_ids"]
    with torch.no_grad():
        expected = [each(input_ids, input_ids != 0, torch.zeros_like(input_ids)) for each in models]
    assert min((outputs["logits"] - each).abs().max() for each in expected) < 1e-4  # that of the better seed
