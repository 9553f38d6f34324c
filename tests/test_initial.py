"""Going on from other models: their weights arrive whole, and what does not fit leaves nothing behind."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import WIDE
from transformers import BertConfig, BertForMaskedLM, BertModel

from electra.cli import main
from electra.errors import ConfigError, DataError
from electra.export.command import export
from electra.export.config import ExportConfig
from electra.huggingface.convert import merge_embedding_delta
from electra.huggingface.folders import read_huggingface
from electra.model.config import ElectraConfig, size_for_encoder
from electra.model.electra import Electra
from electra.model.storage import load_model, save_model
from electra.pretraining.command import pretrain
from electra.pretraining.config import recipe_settings
from electra.runfolder import checkpoint_folders
from electra.training.checkpoint import model_folder
from electra.training.logging import read_metrics

ENTRIES = 22  # of the vocabulary of simple text
SIZE_OF_INIT = dict.fromkeys(("layers", "width", "heads", "feedforward", "embedding_width", "generator_width"))
STILL = {"steps": 1, "learning_rate": 1e-12, "log_every": 1}  # weights stay where they start
STARTS = {"unigram_output_bias": True, "sinusoidal_positions": True, "scale_init_by_width": True}


@pytest.fixture
def make_source(shards, tmp_path):
    """Build a model folder with weights all different from zero, and from each other."""

    def build(name: str = "source", sharing: str = "embeddings", width: int = 24) -> Path:
        torch.manual_seed(5)
        wide = replace(WIDE, vocab_size=ENTRIES, width=width)
        narrow = replace(wide, width=8, heads=1, feedforward=16)
        electra = Electra(ElectraConfig(generator=narrow, discriminator=wide, sharing=sharing))
        with torch.no_grad():
            for parameter in electra.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        save_model(electra, tmp_path / name, shards / "tokenizer")
        return tmp_path / name

    return build


def exported(source: Path, part: str) -> Path:
    """One part of a model folder as a Hugging Face folder."""
    folder = source.with_name(f"{source.name}-{part}")
    export(ExportConfig(model=source, output=folder, part=part))
    return folder


@pytest.fixture
def start(run_config):
    """Start a run that does not move, and give the model that it has at its end."""

    def build(output: str = "run", **departures) -> Electra:
        config = run_config(output, **SIZE_OF_INIT | STILL | STARTS | departures)
        pretrain(config)
        return load_model(model_folder(config.output))

    return build


def whole(part) -> dict[str, torch.Tensor]:
    return merge_embedding_delta(part.state_dict())


def assert_same(part, expected: dict[str, torch.Tensor], but: tuple[str, ...] = ()) -> None:
    """A part has these weights, as near as a step at a learning rate of 1e-12 leaves them."""
    found = whole(part)
    for name, tensor in expected.items():
        if not name.startswith(but or ("-",)):
            torch.testing.assert_close(found[name], tensor, atol=1e-7, rtol=0, msg=name)


@pytest.mark.parametrize("sharing", ["none", "embeddings", "disentangled"])
def test_a_pair_arrives_whole_whatever_new_weights_would_start_as(make_source, start, sharing):
    source = make_source(sharing=sharing)
    there, here = load_model(source), start(init=source, sharing=sharing, packing="segment-pairs")
    assert_same(here.generator, whole(there.generator))
    assert_same(here.discriminator, whole(there.discriminator))


def test_two_hugging_face_folders_are_a_pair(make_source, start):
    source = make_source()
    folders = {"init": exported(source, "discriminator"), "init_generator": exported(source, "generator")}
    there, here = load_model(source), start(**folders, packing="segment-pairs")
    assert_same(here.generator, whole(there.generator))
    assert_same(here.discriminator, whole(there.discriminator))


@pytest.mark.parametrize("sharing", ["none", "embeddings", "all", "disentangled"])
def test_a_new_generator_stands_beside_a_discriminator_that_arrives_whole(make_source, start, sharing):
    source = make_source()
    here = start(init=exported(source, "discriminator"), sharing=sharing, packing="segment-pairs")
    expected = whole(load_model(source).discriminator)
    assert_same(here.discriminator, expected)
    tables = {name: tensor for name, tensor in expected.items() if name.startswith("encoder.embeddings.")}
    shares_tables = torch.equal(here.generator.encoder.embeddings.norm.bias, tables["encoder.embeddings.norm.bias"])
    assert shares_tables == (sharing != "none")
    if shares_tables:
        assert_same(here.generator, tables)
    assert here.generator.encoder.config.width == (24 if sharing == "all" else 12)  # a half, as in tiny
    assert here.generator.head.bias.std() > 0.1  # started at the frequencies of tokens


def test_fresh_leaves_the_generator_of_a_pair_behind(make_source, start):
    source = make_source()
    here = start(init=source, init_generator="fresh", generator_width=16)
    assert here.generator.encoder.config.width == 16
    assert_same(here.discriminator, whole(load_model(source).discriminator), but=("encoder.embeddings.segment",))


def bert(kind, folder: Path, tokenizer: Path) -> Path:
    """A folder of BERT over the vocabulary of simple text."""
    torch.manual_seed(3)
    size = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2}
    kind(BertConfig(vocab_size=ENTRIES, max_position_embeddings=32, **size)).save_pretrained(folder)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM])
def test_bert_becomes_a_discriminator_with_a_new_head(shards, tmp_path, start, kind):
    folder = bert(kind, tmp_path / "bert", shards / "tokenizer")
    here = start(init=folder)
    expected = read_huggingface(folder).tensors
    assert_same(here.discriminator, expected, but=("head",))
    assert here.discriminator.head.dense.weight.shape == (32, 32)


def test_a_masked_language_model_goes_on_as_one_with_its_head(shards, tmp_path, start):
    folder = bert(BertForMaskedLM, tmp_path / "bert", shards / "tokenizer")
    here = start(init=folder, objective="mlm")
    assert here.discriminator is None
    assert_same(here.generator, read_huggingface(folder).tensors)


def test_a_discriminator_goes_on_as_a_masked_language_model_with_a_new_head(make_source, start):
    source = make_source()
    here = start(init=source, objective="mlm", packing="segment-pairs")
    assert_same(here.generator, whole(load_model(source).discriminator), but=("head",))


@pytest.mark.parametrize("objective", ["electra-15", "adversarial", "frozen-rtd", "replace-mlm", "all-tokens-mlm"])
def test_a_pair_goes_on_by_every_objective(make_source, start, objective):
    source = make_source(sharing="none")
    there, here = load_model(source), start(init=source, objective=objective, sharing="none", packing="segment-pairs")
    assert_same(here.generator, whole(there.generator))
    assert_same(here.discriminator, whole(there.discriminator), but=("head",) if "mlm" in objective else ())


def test_a_masked_language_model_becomes_a_corrector_with_its_head(shards, tmp_path, start):
    folder = bert(BertForMaskedLM, tmp_path / "bert", shards / "tokenizer")
    there = read_huggingface(folder).tensors
    assert_same(start(init=folder, objective="replace-mlm").discriminator, there)
    assert_same(start("second", init=tmp_path / "run", objective="all-tokens-mlm").discriminator, there)


def test_without_a_generator_the_discriminator_of_a_pair_goes_on(make_source, start):
    source = make_source()
    here = start(init=source, generator="unigram", packing="segment-pairs")
    assert here.generator is None
    assert_same(here.discriminator, whole(load_model(source).discriminator))


def test_two_stages_begin_with_a_masked_language_model(shards, tmp_path, start):
    folder = bert(BertForMaskedLM, tmp_path / "bert", shards / "tokenizer")
    stages = {"phases": ("objective=mlm", "objective=frozen-rtd"), "sharing": "none", "steps": 2}
    here, there = start(init=folder, init_generator=folder, **stages), read_huggingface(folder).tensors
    assert_same(here.generator, there)
    assert_same(here.discriminator, there, but=("head",))


def test_it_goes_on_where_the_other_run_stood(run_config):
    first = run_config("first", steps=150, learning_rate=5e-3, save_every=150, evaluate_every=150)
    reached = pretrain(first).metrics
    second = run_config("second", init=first.output, log_every=1, **SIZE_OF_INIT)
    assert pretrain(second).metrics["mlm_loss"] < reached["mlm_loss"] + 0.1
    beginnings = [read_metrics(run / "metrics.jsonl")[0]["generator"] for run in (first.output, second.output)]
    assert beginnings[1] < beginnings[0] - 0.2
    record = json.loads((second.output / "config.json").read_text())
    assert record["pretraining"]["init"] == str(first.output)


def test_segment_b_stays_as_pairs_taught_it_and_otherwise_follows_a(shards, tmp_path, run_config, start):
    folder = bert(BertForMaskedLM, tmp_path / "bert", shards / "tokenizer")
    taught = read_huggingface(folder).tensors["encoder.embeddings.segment.weight"]
    moving = {"steps": 20, "learning_rate": 1e-3, "packing": "packed"}
    kept = start(init=folder, **moving).discriminator.encoder.embeddings.segment.weight
    torch.testing.assert_close(kept[1], taught[1], atol=1e-4, rtol=0)
    assert not torch.allclose(kept[0], taught[0], atol=1e-4)
    pretrain(run_config("first"))
    follows = start("second", init=tmp_path / "first", **moving).discriminator.encoder.embeddings.segment.weight
    assert torch.equal(follows[0], follows[1])


@pytest.mark.parametrize("phases", [(), ("objective=rtd", "objective=electra-15")])
def test_resuming_does_not_read_it_again(make_source, run_config, phases):
    runs = []
    for name in ("whole", "part"):
        config = run_config(name, init=make_source(f"{name}-source"), phases=phases, dropout=0.1, **SIZE_OF_INIT)
        pretrain(config)
        runs.append(config)
    shutil.rmtree(runs[1].init.model)
    shutil.rmtree(checkpoint_folders(runs[1].output)[-1])
    assert pretrain(replace(runs[1], resume=True)).step == 20
    weights = [(model_folder(run.output) / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1]


def test_a_run_that_died_before_its_first_checkpoint_begins_again(make_source, run_config):
    config = run_config(init=make_source(), **SIZE_OF_INIT | STILL)
    pretrain(config)
    shutil.rmtree(config.output / "checkpoints")
    pretrain(replace(config, resume=True))
    expected = whole(load_model(config.init.model).discriminator)
    assert_same(load_model(model_folder(config.output)).discriminator, expected, but=("encoder.embeddings.segment",))


def test_the_style_is_that_of_the_folder(shards, make_source, tmp_path, capsys):
    given = f"pretrain --data {shards} --output {tmp_path}/run --init {make_source()} --steps 4 --length 16 --dry-run"
    main(given.split())
    assert capsys.readouterr().out.startswith(
        "classic: discriminator of 2 layers, 24 wide; generator of 2 layers, 8 wide"
    )
    with pytest.raises(SystemExit):
        main([*given.split(), "--style", "modern"])
    assert "--style modern cannot be: " in capsys.readouterr().err


@pytest.mark.parametrize(("sharing", "told"), [("none", "nothing shared"), ("disentangled", "shared, disentangled")])
def test_what_a_pair_shares_stays_shared(shards, make_source, tmp_path, capsys, sharing, told):
    source = make_source(sharing=sharing)
    main(f"pretrain --data {shards} --output {tmp_path}/run --init {source} --steps 4 --length 16 --dry-run".split())
    assert told in capsys.readouterr().out.splitlines()[0]


def test_a_dry_run_reads_what_the_run_would_start_with(shards, make_source, tmp_path, capsys):
    source = make_source()
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(SystemExit) as exit:
        main(
            f"pretrain --data {shards} --output {tmp_path}/run --init {source} --steps 4 --length 16 --dry-run".split()
        )
    assert exit.value.code == 2
    assert str(source / "model.safetensors") in capsys.readouterr().err


def test_it_is_said_what_a_run_starts_with(shards, make_source, tmp_path, capsys):
    source = make_source()
    given = (
        f"pretrain --data {shards} --output {tmp_path}/run --init {source} --steps 4 --length 16 --dry-run --device cpu"
    )
    for more, sentence in (("", f"generator: starts as {source}"), ("--init-generator fresh", "generator: new")):
        main([*given.split(), *more.split()])
        assert f"discriminator: starts as {source}; {sentence}" in capsys.readouterr().out.splitlines()
    main([*given.split(), "--objective", "mlm"])
    assert f"masked language model: starts as {source}, with a new head" in capsys.readouterr().out.splitlines()
    with pytest.raises(SystemExit):
        main([*given.split(), "--init-generator", "frsh"])
    assert "--init-generator is frsh, and there is no such folder; give one that holds a model, or fresh" in (
        capsys.readouterr().err
    )


def test_the_size_and_its_settings_come_from_the_folder(shards, make_source, tmp_path, capsys):
    source = make_source(width=264)
    command = f"pretrain --data {shards} --output {tmp_path}/run --init {source} --batch-size 4 --length 16 --steps 4 "
    command += "--evaluation-rows 8 --device cpu --save-every 2"
    main(command.split())
    record = json.loads((tmp_path / "run/config.json").read_text())
    assert record["pretraining"]["size"] == "base"
    assert record["pretraining"]["learning_rate"] == recipe_settings("fast", "base")["learning_rate"]
    assert record["model"]["discriminator"]["width"] == 264
    assert record["model"]["generator"]["dropout"] == recipe_settings("fast", "base")["dropout"]  # not the folder's
    shutil.rmtree(source)
    main([*command.split(), "--resume"])
    said = capsys.readouterr().out
    assert "finished: 4 steps" in said
    assert "was finished, its budget is spent: 4 steps" in said


@pytest.mark.parametrize(
    ("width", "size"), [(24, "tiny"), (256, "small"), (384, "base"), (768, "base"), (2048, "large")]
)
def test_settings_are_those_of_the_smallest_size_as_wide(width, size):
    assert size_for_encoder(replace(WIDE, width=width, heads=1)) == size


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"size": "base"}, "--size base cannot be: .*source is 24 wide, which goes with tiny; leave --size out"),
        ({"width": 32}, "--width 32 cannot be: the size is that of --init .*source; leave out"),
        ({"layers": 1, "heads": 2}, "--layers 1 and --heads 2 cannot be"),
        ({"generator_width": 16}, "--generator-width 16 cannot be: the generator is that of .*source"),
        ({"branch_from": Path("other")}, "--init and --branch-from both say where to start"),
        ({"objective": "mlm", "init_generator": "fresh"}, "--objective mlm trains one model"),
        ({"phases": ("objective=mlm", "objective=rtd")}, "begins with mlm, which trains a generator alone: --init .*"),
        ({"generator": "unigram", "init_generator": "fresh"}, "init_generator is fresh, which is for a generator"),
        ({"objective": "frozen-rtd", "sharing": "none", "init_generator": "fresh"}, "needs a generator that was trai"),
        ({"init": None, "init_generator": "fresh"}, "--init-generator fresh needs --init"),
        ({"length": 64}, "a row of 64 tokens is longer than the model's 32 positions"),
    ],
)
def test_flags_that_contradict_the_folder_are_refused_by_name(make_source, run_config, tmp_path, wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        pretrain(run_config(**SIZE_OF_INIT | {"init": make_source()} | wrong))
    assert not (tmp_path / "run").exists()


def without_tokenizer(folder: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        (folder / file).unlink()


def with_other_words(folder: Path) -> None:
    without_tokenizer(folder)
    words = [f"word{number}" for number in range(ENTRIES - 5)]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            without_tokenizer,
            "source has no tokenizer; copy the tokenizer.json or vocab.txt it was trained with into it",
        ),
        (with_other_words, "another tokenizer .* than the model's .*; make shards with the model's: electra shard"),
        (cut, "model.safetensors is truncated or damaged"),
        (shutil.rmtree, "there is no folder .*source"),
    ],
)
def test_a_folder_that_will_not_do_is_named_before_anything_is_written(
    make_source, run_config, tmp_path, damage, sentence
):
    source = make_source()
    damage(source)
    with pytest.raises(DataError, match=sentence):
        pretrain(run_config(init=source, **SIZE_OF_INIT))
    assert not (tmp_path / "run").exists()


def test_a_table_longer_than_its_tokenizer_is_named(shards, tmp_path, run_config):
    padded = replace(WIDE, vocab_size=24)
    electra = Electra(ElectraConfig(generator=None, discriminator=padded, sharing="none"))
    save_model(electra, tmp_path / "padded", shards / "tokenizer")
    with pytest.raises(
        DataError, match=r"a table of 24 entries but a tokenizer of 22; .*resize_token_embeddings\(22\)"
    ):
        pretrain(run_config(init=tmp_path / "padded", **SIZE_OF_INIT))


def test_a_generator_that_is_none_is_refused(make_source, run_config):
    source = make_source()
    with pytest.raises(DataError, match=r"holds no generator; give the folder of one .* or --init-generator fresh"):
        pretrain(run_config(init=source, init_generator=exported(source, "discriminator"), **SIZE_OF_INIT))


def test_tables_that_differ_are_not_made_one(make_source, run_config, tmp_path):
    source = make_source(sharing="none")
    with pytest.raises(ConfigError, match="different weights where --sharing embeddings wants the same; choose --shar"):
        pretrain(run_config(init=source, **SIZE_OF_INIT))
    assert not (tmp_path / "run").exists()
