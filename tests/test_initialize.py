"""Initial weights: from runs, model folders and Hugging Face folders, unigram frequencies and sinusoids."""

import json
import shutil
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from conftest import WIDE
from transformers import BertConfig, BertForMaskedLM, BertModel

from electra.cli import main
from electra.config import build_config
from electra.data.shards import open_shards
from electra.errors import ConfigError, DataError
from electra.exporting.command import ExportConfig, export
from electra.huggingface.convert import merge_embedding_delta, read_huggingface_model
from electra.model.config import ElectraConfig, size_name_for_encoder
from electra.model.electra import Electra
from electra.model.storage import load_model, save_model
from electra.pretraining import initialize as initialize_module
from electra.pretraining.command import plan_and_check_phases, pretrain
from electra.pretraining.config import PretrainConfig
from electra.pretraining.initialize import read_initial_weights, set_cooccurrence_embeddings, sinusoidal_table
from electra.pretraining.recipes import recipe_settings
from electra.pretraining.task import PretrainingTask
from electra.runfolder import checkpoint_folders
from electra.training.checkpoint import find_model_folder
from electra.training.distributed import World
from electra.training.logging import read_metrics

VOCAB_SIZE = 22  # of the test shards
SIZE_FROM_INIT = dict.fromkeys(("layers", "width", "heads", "feedforward", "embedding_width", "generator_width"))
STATISTICS = {"unigram_output_bias": True, "sinusoidal_positions": True, "scale_init_by_width": True}


@pytest.fixture(scope="session")
def make_source(shards, tmp_path_factory):
    """Build a model folder with weights all different from zero and from each other; each of them once."""
    folders: dict[tuple[str, int], Path] = {}

    def build(sharing: str = "embeddings", width: int = 24) -> Path:
        if (sharing, width) not in folders:
            torch.manual_seed(5)
            wide = replace(WIDE, vocab_size=VOCAB_SIZE, width=width)
            narrow = replace(wide, width=8, heads=1, feedforward=16)
            electra = Electra(ElectraConfig(generator=narrow, discriminator=wide, sharing=sharing))
            with torch.no_grad():
                for parameter in electra.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            folders[sharing, width] = tmp_path_factory.mktemp("source") / "source"
            save_model(electra, folders[sharing, width], shards / "tokenizer")
        return folders[sharing, width]

    return build


@pytest.fixture
def source(make_source, tmp_path) -> Path:
    """A copy of a model folder."""
    return shutil.copytree(make_source(), tmp_path / "source")


@pytest.fixture(scope="session")
def bert(shards, tmp_path_factory):
    """Build a Hugging Face folder of BERT over the vocabulary of the test shards; one of each class."""
    folders: dict[type, Path] = {}

    def build(model_class: type = BertForMaskedLM) -> Path:
        if model_class not in folders:
            torch.manual_seed(3)
            size = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2}
            config = BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=32, **size)
            folders[model_class] = tmp_path_factory.mktemp("bert")
            model_class(config).save_pretrained(folders[model_class])
            for file in (shards / "tokenizer").iterdir():
                shutil.copy(file, folders[model_class])
        return folders[model_class]

    return build


def export_part(source: Path, part: str, folder: Path) -> Path:
    """One part of a model folder as a Hugging Face folder."""
    export(ExportConfig(model=source, output=folder / part, part=part))
    return folder / part


@pytest.fixture
def initialize(run_config, shards):
    """The model of a run's first step."""

    def build(**settings) -> Electra:
        config = run_config(**SIZE_FROM_INIT | STATISTICS | settings)
        [phase, *_] = plan_and_check_phases(config, open_shards(shards))
        model = PretrainingTask(phase, open_shards(shards), World(torch.device("cpu"))).model
        read_initial_weights(config, phase.model).load_into(model)
        return model

    return build


def whole(part) -> dict[str, torch.Tensor]:
    return merge_embedding_delta(part.state_dict())


def assert_weights(part, expected: dict[str, torch.Tensor], exclude: str = "-") -> None:
    """Assert that a part has these weights, except those whose names start with `exclude`."""
    weights = whole(part)
    for name, tensor in expected.items():
        if not name.startswith(exclude):
            torch.testing.assert_close(weights[name], tensor, atol=1e-7, rtol=0, msg=name)


@pytest.mark.parametrize("sharing", ["none", "embeddings", "disentangled"])
def test_a_pair_is_initialised_from_a_model_folder(make_source, initialize, sharing):
    source = load_model(make_source(sharing))
    model = initialize(init=make_source(sharing), sharing=sharing)
    assert_weights(model.generator, whole(source.generator))
    assert_weights(model.discriminator, whole(source.discriminator))


def test_a_pair_is_initialised_from_two_hugging_face_folders(make_source, initialize, tmp_path):
    source = load_model(make_source())
    folders = [export_part(make_source(), part, tmp_path) for part in ("discriminator", "generator")]
    model = initialize(init=folders[0], init_generator=folders[1])
    assert_weights(model.generator, whole(source.generator))
    assert_weights(model.discriminator, whole(source.discriminator))


@pytest.mark.parametrize("sharing", ["none", "embeddings", "all", "disentangled"])
def test_a_new_generator_is_added_to_a_discriminator(make_source, initialize, tmp_path, sharing):
    model = initialize(init=export_part(make_source(), "discriminator", tmp_path), sharing=sharing)
    expected = whole(load_model(make_source()).discriminator)
    assert_weights(model.discriminator, expected)
    embeddings = {name: tensor for name, tensor in expected.items() if name.startswith("encoder.embeddings.")}
    bias = "encoder.embeddings.norm.bias"
    assert torch.equal(whole(model.generator)[bias], embeddings[bias]) == (sharing != "none")
    if sharing != "none":
        assert_weights(model.generator, embeddings)
    assert model.generator.encoder.config.width == (24 if sharing == "all" else 12)  # half, as in --size tiny
    assert model.generator.head.bias.std() > 0.1  # unigram frequencies


def test_fresh_replaces_the_generator_of_a_pair(make_source, initialize):
    model = initialize(init=make_source(), init_generator="fresh", generator_width=16)
    assert model.generator.encoder.config.width == 16
    assert_weights(model.discriminator, whole(load_model(make_source()).discriminator))


@pytest.mark.parametrize("model_class", [BertModel, BertForMaskedLM])
def test_bert_becomes_a_discriminator_with_a_new_head(bert, initialize, model_class):
    model = initialize(init=bert(model_class))
    assert_weights(model.discriminator, read_huggingface_model(bert(model_class)).tensors, exclude="head")
    assert model.discriminator.head.dense.weight.shape == (32, 32)


def test_a_masked_language_model_keeps_its_head_for_every_mlm_objective(bert, initialize):
    expected = read_huggingface_model(bert()).tensors
    mlm = initialize(init=bert(), objective="mlm")
    assert mlm.discriminator is None
    assert_weights(mlm.generator, expected)
    for objective in ("replace-mlm", "all-tokens-mlm"):
        assert_weights(initialize(init=bert(), objective=objective).discriminator, expected)


def test_a_discriminator_becomes_a_masked_language_model_with_a_new_head(make_source, initialize):
    model = initialize(init=make_source(), objective="mlm")
    assert_weights(model.generator, whole(load_model(make_source()).discriminator), exclude="head")


@pytest.mark.parametrize("objective", ["electra-15", "adversarial", "frozen-rtd", "replace-mlm", "all-tokens-mlm"])
def test_a_pair_initialises_every_objective(make_source, initialize, objective):
    source = load_model(make_source("none"))
    model = initialize(init=make_source("none"), objective=objective, sharing="none")
    assert_weights(model.generator, whole(source.generator))
    assert_weights(model.discriminator, whole(source.discriminator), exclude="head" if "mlm" in objective else "-")


def test_without_a_generator_the_discriminator_of_a_pair_is_used(make_source, initialize):
    model = initialize(init=make_source(), generator="unigram")
    assert model.generator is None
    assert_weights(model.discriminator, whole(load_model(make_source()).discriminator))


def test_two_stage_training_starts_from_a_masked_language_model(bert, run_config):
    stages = {"phases": ("objective=mlm", "objective=frozen-rtd"), "sharing": "none", "steps": 2}
    config = run_config(init=bert(), init_generator=bert(), learning_rate=1e-12, **SIZE_FROM_INIT | stages)
    pretrain(config)
    model, expected = load_model(find_model_folder(config.output)), read_huggingface_model(bert()).tensors
    assert_weights(model.generator, expected)
    assert_weights(model.discriminator, expected, exclude="head")


def test_training_continues_from_another_run(run_config):
    first = run_config("first", steps=100, learning_rate=5e-3, save_every=100, evaluate_every=100)
    reached = pretrain(first).metrics["mlm_loss"]
    second = run_config("second", init=first.output, log_every=1, **SIZE_FROM_INIT)
    assert pretrain(second).metrics["mlm_loss"] < reached + 0.1
    losses = [read_metrics(run / "metrics.jsonl")[0]["generator"] for run in (first.output, second.output)]
    assert losses[1] < losses[0] - 0.1
    record = json.loads((second.output / "config.json").read_text())
    assert record["pretraining"]["init"] == str(first.output)


def test_both_parts_come_from_one_checkpoint_of_a_run_that_trains(finished_run, run_config, shards, monkeypatch):
    config = run_config("new", init=finished_run, **SIZE_FROM_INIT)
    [phase] = plan_and_check_phases(config, open_shards(shards))
    first, second = checkpoint_folders(finished_run)
    newest = chain([first], repeat(second))
    monkeypatch.setattr(initialize_module, "find_model_folder", lambda run: next(newest))
    weights = read_initial_weights(config, phase.model)
    name = "encoder.embeddings.token.weight"
    assert torch.equal(weights.generator[name], weights.discriminator[name])


def test_trained_segments_are_kept_and_untrained_ones_copied(bert, finished_run, run_config):
    def segments(name: str, init: Path) -> torch.Tensor:
        config = run_config(name, init=init, learning_rate=1e-3, packing="packed", **SIZE_FROM_INIT)
        pretrain(config)
        return load_model(find_model_folder(config.output)).discriminator.encoder.embeddings.segment.weight

    trained = read_huggingface_model(bert()).tensors["encoder.embeddings.segment.weight"]
    kept = segments("bert", bert())
    torch.testing.assert_close(kept[1], trained[1], atol=1e-4, rtol=0)
    assert not torch.allclose(kept[0], trained[0], atol=1e-4)
    copied = segments("electra", finished_run)
    assert torch.equal(copied[0], copied[1])


@pytest.mark.parametrize("phases", [(), ("objective=rtd", "objective=electra-15")])
def test_a_resumed_run_does_not_read_the_initial_weights_again(make_source, source, run_config, phases):
    unbroken, resumed = (
        run_config(name, init=folder, phases=phases, dropout=0.1, **SIZE_FROM_INIT)
        for name, folder in (("unbroken", make_source()), ("resumed", source))
    )
    for config in (unbroken, resumed):
        pretrain(config)
    shutil.rmtree(source)
    shutil.rmtree(checkpoint_folders(resumed.output)[-1])
    assert pretrain(replace(resumed, resume=True)).step == 20
    weights = [(find_model_folder(config.output) / "model.safetensors").read_bytes() for config in (unbroken, resumed)]
    assert weights[0] == weights[1]


def test_a_run_without_a_checkpoint_starts_again_from_the_initial_weights(make_source, run_config):
    config = run_config(init=make_source(), steps=1, learning_rate=1e-12, packing="segment-pairs", **SIZE_FROM_INIT)
    pretrain(config)
    shutil.rmtree(config.output / "checkpoints")
    pretrain(replace(config, resume=True))
    expected = whole(load_model(make_source()).discriminator)
    assert_weights(load_model(find_model_folder(config.output)).discriminator, expected)


def dry_run(capsys, shards: Path, tmp_path: Path, flags: str) -> list[str]:
    """The summary that `electra pretrain --dry-run` prints."""
    command = f"pretrain --data {shards} --output {tmp_path}/run --steps 4 --length 16 --device cpu --dry-run {flags}"
    main(command.split())
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("sharing", "described"), [("none", "no shared weights"), ("disentangled", "shared embeddings, disentangled")]
)
def test_size_style_and_sharing_default_to_those_of_init(shards, make_source, tmp_path, capsys, sharing, described):
    [model, init, *_] = dry_run(capsys, shards, tmp_path, f"--init {make_source(sharing)}")
    with_default = dry_run(capsys, shards, tmp_path, f"--init {make_source(sharing)} --generator model")
    assert with_default[:2] == [model, init]
    assert model.startswith("classic: discriminator with 2 layers of width 24; generator with 2 layers of width 8")
    assert model.endswith(described)
    folder = make_source(sharing)
    assert init == f"discriminator initialised from {folder}; generator initialised from {folder}"


def test_the_summary_names_new_parts(shards, make_source, tmp_path, capsys):
    folder = make_source()
    fresh = dry_run(capsys, shards, tmp_path, f"--init {folder} --init-generator fresh")
    assert f"discriminator initialised from {folder}; generator new" in fresh
    mlm = dry_run(capsys, shards, tmp_path, f"--init {folder} --objective mlm")
    assert f"masked language model initialised from {folder} with a new head" in mlm


def test_recipe_settings_follow_the_size_of_init(shards, make_source, source, tmp_path, capsys):
    shutil.rmtree(source)
    shutil.copytree(make_source(width=264), source)
    command = f"pretrain --data {shards} --output {tmp_path}/run --init {source} --batch-size 4 --length 16 --steps 2 "
    command += "--evaluation-rows 8 --device cpu"
    main(command.split())
    record, expected = json.loads((tmp_path / "run/config.json").read_text()), recipe_settings("fast", "medium")
    assert record["pretraining"]["size"] == "medium"
    assert record["pretraining"]["learning_rate"] == expected["learning_rate"]
    assert record["model"]["discriminator"]["width"] == 264
    assert record["model"]["generator"]["dropout"] == expected["dropout"]  # not that of the folder
    shutil.rmtree(source)
    main([*command.split(), "--resume"])
    output = capsys.readouterr().out
    assert "finished: 2 steps" in output
    assert "already finished" in output


@pytest.mark.parametrize(
    ("width", "size"), [(24, "tiny"), (256, "small"), (384, "medium"), (768, "base"), (2048, "large")]
)
def test_an_encoder_has_the_settings_of_the_smallest_size_of_its_width(width, size):
    assert size_name_for_encoder(replace(WIDE, width=width, heads=1)) == size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "base"}, "source has width 24, for which --size is tiny, not base"),
        ({"style": "modern", "sinusoidal_positions": False}, "source is classic, not --style modern"),
        ({"layers": 1, "heads": 2}, "--layers 1 and --heads 2 cannot be combined with --init .*source"),
        ({"generator_width": 16}, "cannot change the generator of .*source"),
        ({"branch_from": Path("other")}, "--init and --branch-from both set the initial weights"),
        (
            {"phases": ("objective=mlm", "objective=rtd")},
            "starts with mlm, .* --init .*source must be a masked language",
        ),
        ({"objective": "frozen-rtd", "sharing": "none", "init_generator": "fresh"}, "needs a trained generator"),
        ({"objective": "mlm", "init_generator": "fresh"}, "--objective mlm trains one model"),
        ({"init": None, "init_generator": "fresh"}, "--init-generator fresh needs --init"),
        ({"init_generator": Path("frsh")}, "--init-generator: there is no folder frsh"),
        ({"length": 64}, "64"),
    ],
)
def test_settings_that_contradict_the_initial_model_are_reported(make_source, run_config, tmp_path, settings, message):
    with pytest.raises((ConfigError, DataError), match=message):
        pretrain(run_config(**SIZE_FROM_INIT | {"init": make_source()} | settings))
    assert not (tmp_path / "run").exists()


def remove_tokenizer(folder: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        (folder / file).unlink()


def replace_tokenizer(folder: Path) -> None:
    remove_tokenizer(folder)
    (folder / "checksums.json").unlink(missing_ok=True)
    words = [f"word{number}" for number in range(VOCAB_SIZE - 5)]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")


def truncate_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_tokenizer, "source has no tokenizer"),
        (replace_tokenizer, "tokenizer"),
        (truncate_weights, "model.safetensors"),
        (shutil.rmtree, "there is no folder .*source"),
    ],
)
@pytest.mark.parametrize("is_dry", [False, True])
def test_unusable_folders_are_reported_before_anything_is_written(source, run_config, damage, message, is_dry):
    damage(source)
    config = run_config(init=source, dry_run=is_dry, **SIZE_FROM_INIT)
    with pytest.raises(DataError, match=message):
        pretrain(config)
    assert not config.output.exists()


def test_embeddings_of_another_size_than_the_vocabulary_are_reported(shards, tmp_path, run_config):
    padded = Electra(ElectraConfig(generator=None, discriminator=replace(WIDE, vocab_size=24), sharing="none"))
    save_model(padded, tmp_path / "padded", shards / "tokenizer")
    with pytest.raises(DataError, match=r"24 token embeddings but its tokenizer 22 .*resize_token_embeddings\(22\)"):
        pretrain(run_config(init=tmp_path / "padded", **SIZE_FROM_INIT))


def test_a_folder_without_a_generator_is_reported(make_source, run_config, tmp_path):
    discriminator = export_part(make_source(), "discriminator", tmp_path)
    with pytest.raises(DataError, match=r"holds no generator .* or --init-generator fresh"):
        pretrain(run_config(init=make_source(), init_generator=discriminator, **SIZE_FROM_INIT))


def test_different_weights_cannot_be_shared(make_source, run_config, tmp_path):
    with pytest.raises(ConfigError, match="different weights, which --sharing embeddings would share"):
        pretrain(run_config(init=make_source("none"), **SIZE_FROM_INIT))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("objective", ["rtd", "replace-mlm"])
def test_the_unigram_output_bias_predicts_the_frequencies_of_tokens(run_config, shards, objective):
    config = run_config(unigram_output_bias=True, objective=objective)
    [phase] = plan_and_check_phases(config, open_shards(shards))
    task = PretrainingTask(phase, open_shards(shards), World(torch.device("cpu")))
    parts = [task.model.generator] + ([task.model.discriminator] if objective == "replace-mlm" else [])
    for part in parts:
        torch.testing.assert_close(part.head.bias.softmax(0), task.unigram, atol=0.01, rtol=0.1)


def test_sinusoids_depend_on_the_distance_of_positions():
    table = sinusoidal_table(64, 32)
    similarity = table @ table.T
    for distance in (0, 1, 5):
        diagonal = similarity.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert similarity[10, 10] > similarity[10, 11] > similarity[10, 14]


@pytest.mark.parametrize("sharing", ["embeddings", "none", "disentangled"])
def test_sinusoidal_positions_have_the_scale_of_the_default_initialisation(run_config, shards, sharing):
    [phase] = plan_and_check_phases(run_config(sinusoidal_positions=True, sharing=sharing), open_shards(shards))
    model = PretrainingTask(phase, open_shards(shards), World(torch.device("cpu"))).model
    for encoder in (model.generator.encoder, model.discriminator.encoder):
        embeddings = encoder.embeddings.base or encoder.embeddings
        table, std = embeddings.position.weight.detach(), encoder.config.init_std
        torch.testing.assert_close(table / std / 2**0.5, sinusoidal_table(*table.shape))
        assert table.square().mean().sqrt() == pytest.approx(std, rel=0.01)


def test_cooccurrence_embeddings_are_set_on_the_device_of_the_model(make_pair, monkeypatch):
    model = make_pair().to("meta")  # where a tensor on the CPU raises an error as on a GPU
    table = model.generator.encoder.embeddings.token.weight
    vectors = torch.zeros(table.shape)
    monkeypatch.setattr("electra.pretraining.initialize.cooccurrence_vectors", lambda shards, width: vectors)
    set_cooccurrence_embeddings(model, None)
    assert table.is_meta


@pytest.mark.parametrize("sharing", ["embeddings", "none", "disentangled"])
def test_cooccurrence_embeddings_have_the_scale_of_the_default_initialisation(run_config, shards, sharing):
    [phase] = plan_and_check_phases(run_config(cooccurrence_embeddings=True, sharing=sharing), open_shards(shards))
    model = PretrainingTask(phase, open_shards(shards), World(torch.device("cpu"))).model
    for encoder in (model.generator.encoder, model.discriminator.encoder):
        embeddings = encoder.embeddings.base or encoder.embeddings
        table, std = embeddings.token.weight.detach(), encoder.config.init_std
        assert table[5:].square().mean().sqrt() == pytest.approx(std, rel=0.2)
        assert table.isfinite().all()
    if sharing == "disentangled":
        assert not model.discriminator.encoder.embeddings.token.weight.any()


@pytest.mark.parametrize("recipe", ["fast", "faithful"])
@pytest.mark.parametrize("size", ["tiny", "small", "medium", "base", "large"])
def test_cooccurrence_embeddings_are_for_short_runs_on_a_cpu(recipe, size):
    config = build_config(PretrainConfig, data="shards", output="run", recipe=recipe, size=size)
    assert config.init.cooccurrence_embeddings == ((recipe, size) == ("fast", "tiny"))
