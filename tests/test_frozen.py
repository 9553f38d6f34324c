"""Feature-based fine-tuning: only the head is trained, on hidden states of chosen layers, linear or with a BiLSTM."""

import json
import random

import pytest
import torch
from synthetic import ANIMALS, sentence, write_choices, write_rows
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import electra
from electra.errors import ConfigError
from electra.finetuning.config import FrozenConfig, TuningConfig
from electra.finetuning.frozen import BiLSTM
from electra.finetuning.storage import build_task_model, load_pretrained

QUICK = {"epochs": 12, "batch_size": 16, "learning_rate": 2e-2, "length": 32, "device": "cpu"}


@pytest.fixture(params=["encoder_folder", "modern_folder"])
def folder(request):
    return request.getfixturevalue(request.param)


def rows_with_padding() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    input_ids = torch.randint(5, 20, (3, 12), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.arange(12) < torch.tensor([[12], [7], [2]])
    return torch.where(attention_mask, input_ids, 0), attention_mask, torch.zeros_like(input_ids)


def test_bilstm_equals_that_of_torch_on_packed_sequences():
    torch.manual_seed(0)
    ours = BiLSTM(6, 8, dropout=0.0)
    theirs = torch.nn.LSTM(6, 4, num_layers=2, batch_first=True, bidirectional=True)
    weights = {}
    for layer, (rightward, leftward) in enumerate(zip(ours.forwards, ours.backwards, strict=True)):
        for suffix, lstm in (("", rightward), ("_reverse", leftward)):
            weights |= {name.replace("_l0", f"_l{layer}{suffix}"): value for name, value in lstm.state_dict().items()}
    theirs.load_state_dict(weights)
    hidden, lengths = torch.randn(3, 9, 6), torch.tensor([9, 5, 2])
    attention_mask = torch.arange(9) < lengths[:, None]
    packed = pack_padded_sequence(hidden, lengths, batch_first=True)
    expected, _ = pad_packed_sequence(theirs(packed)[0], batch_first=True)
    torch.testing.assert_close(ours(hidden, attention_mask)[attention_mask], expected[attention_mask])


def test_a_linear_head_gets_the_mean_of_the_concatenated_states_of_its_layers(folder):
    pretrained = load_pretrained(folder)
    model = build_task_model(pretrained, 3, seed=1, frozen=FrozenConfig(layers=(0, -1), bilstm=False))
    input_ids, attention_mask, segment_ids = rows_with_padding()
    model.head.eval()
    logits = model(input_ids, attention_mask, segment_ids)
    states = pretrained.encoder.eval().hidden_states(input_ids, attention_mask, segment_ids)
    hidden = torch.cat([states[0], states[-1]], dim=-1)
    means = torch.stack([row[mask].mean(0) for row, mask in zip(hidden, attention_mask, strict=True)])
    torch.testing.assert_close(logits, torch.nn.functional.linear(means, model.head.weight, model.head.bias))


def test_a_frozen_encoder_has_no_dropout_in_training(encoder_folder):
    model = build_task_model(load_pretrained(encoder_folder), 3, seed=1, frozen=FrozenConfig(layers=(), bilstm=True))
    for _ in range(2):
        training = {name.split(".")[1] for name, module in model.named_modules() if module.training and "." in name}
        assert training == {"bilstm", "dropout"}  # the last one is the head's
        model.train()
    assert not any(module.training for module in model.eval().modules())


@pytest.mark.parametrize("bilstm", [False, True])
def test_only_the_head_is_trained(folder, tmp_path, bilstm):
    train = write_rows(tmp_path / "train.jsonl", "classification", 120, seed=0)
    tuned = electra.finetune(model=folder, train=train, output=tmp_path / "out", frozen=True, bilstm=bilstm, **QUICK)
    assert tuned.median["dev"]["accuracy"] > 0.8
    before = load_pretrained(folder).encoder.state_dict()
    after = load_pretrained(tmp_path / "out/seed-1/model").encoder.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    evaluated = electra.evaluate(model=tmp_path / "out", input=train, device="cpu")
    assert evaluated.metrics["accuracy"] > 0.8
    with pytest.raises(ConfigError, match="was fine-tuned with --frozen, which cannot be exported"):
        electra.export(model=tmp_path / "out", output=tmp_path / "hf")


def test_a_model_with_a_frozen_encoder_can_be_fine_tuned_as_a_whole(folder, tmp_path):
    """The frozen encoder's states were pooled by their mean, which other classic models do not have."""
    train = write_rows(tmp_path / "train.jsonl", "classification", 40, seed=0)
    settings = QUICK | {"train": train, "epochs": 1}
    electra.finetune(model=folder, output=tmp_path / "frozen", frozen=True, **settings)
    electra.finetune(model=tmp_path / "frozen", output=tmp_path / "whole", **settings)
    config = json.loads((tmp_path / "whole/seed-1/model/config.json").read_text())
    assert (config["pooling"], config["frozen"]) == ("cls", None)


def test_choices_can_be_scored_by_features(encoder_folder, tmp_path):
    write_choices(tmp_path / "train.jsonl", 120, seed=0)
    names = {"kind": "choice", "text": "context", "text_b": "question", "train": tmp_path / "train.jsonl"}
    tuned = electra.finetune(model=encoder_folder, output=tmp_path / "out", frozen=True, **names, **QUICK)
    assert tuned.median["dev"]["accuracy"] > 0.9


def test_runs_of_one_seed_have_the_same_weights(encoder_folder, tmp_path):
    train = write_rows(tmp_path / "train.jsonl", "regression", 40, seed=0)
    settings = {"model": encoder_folder, "train": train, "frozen": True, "bilstm": True, **QUICK, "epochs": 1}
    for output in ("a", "b"):
        electra.finetune(**settings, output=tmp_path / output)
    first, second = ((tmp_path / output / "seed-1/model/model.safetensors").read_bytes() for output in "ab")
    assert first == second
    config = json.loads((tmp_path / "a/seed-1/model/config.json").read_text())
    assert config["frozen"] == {"layers": [], "bilstm": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": (1,)}, "--layers needs --frozen"),
        ({"bilstm": True}, "--bilstm needs --frozen"),
        ({"frozen": True, "optimizer": "muon"}, "--optimizer muon is for the layers of the encoder"),
    ],
)
def test_settings_that_contradict_each_other_are_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        TuningConfig(**settings)


def test_layers_that_the_encoder_lacks_are_an_error(encoder_folder):
    frozen = FrozenConfig(layers=(3,), bilstm=False)
    with pytest.raises(ConfigError, match=r"layers is 3; it must be numbers from 0 \(the embeddings\) to 2"):
        build_task_model(load_pretrained(encoder_folder), 2, seed=1, frozen=frozen)


def test_words_can_be_tagged_by_features(encoder_folder, tmp_path):
    generator = random.Random(0)
    with (tmp_path / "train.jsonl").open("w") as file:
        for _ in range(120):
            words = sentence(generator).split()
            file.write(json.dumps({"words": words, "tags": ["N" if word in ANIMALS else "O" for word in words]}) + "\n")
    files = {"train": tmp_path / "train.jsonl", "kind": "tags", "output": tmp_path / "out"}
    tuned = electra.finetune(model=encoder_folder, frozen=True, bilstm=True, **files, **QUICK | {"epochs": 4})
    assert tuned.median["dev"]["accuracy"] > 0.95
