"""Rows that a generator corrupted once: an RTD loss that does not depend on a run's own generator."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from electra.cli import main
from electra.config import build_config
from electra.data.shards import open_shards
from electra.data.tokenizer import read_trained_length
from electra.errors import ConfigError, DataError
from electra.model.electra import Electra
from electra.model.storage import load_model
from electra.objectives.evaluation import evaluate
from electra.pretraining import corrupt
from electra.pretraining.command import pretrain
from electra.pretraining.config import CorruptConfig, PretrainConfig
from electra.pretraining.corrupt import HeldOutRows, read_corrupted_rows, write_corrupted_rows
from electra.pretraining.held_out import held_out_batches
from electra.pretraining.token_counts import unigram_frequencies
from electra.training.checkpoint import find_model_folder
from electra.training.distributed import World
from electra.training.logging import read_metrics


@pytest.fixture
def corrupt_config(finished_run, shards, tmp_path):
    def build(**settings) -> CorruptConfig:
        defaults = {"model": finished_run, "data": shards, "output": tmp_path / "rows.safetensors", "device": "cpu"}
        return build_config(CorruptConfig, **defaults | {"rows": 64, "length": 16} | settings)

    return build


def test_masked_tokens_are_replaced_by_samples_and_the_others_are_kept(corrupt_config, shards):
    result = write_corrupted_rows(corrupt_config())
    rows = read_corrupted_rows(result.output, open_shards(shards), positions=16)
    is_replaced = rows.input_ids != rows.corrupted_ids
    assert (result.rows, result.length) == tuple(is_replaced.shape) == (64, 16)
    assert 1 <= is_replaced.sum(1).max() <= 2  # 15 % of 16 tokens
    assert result.replaced_fraction == pytest.approx(is_replaced.float().mean().item())


@pytest.mark.parametrize(("rows", "rows_per_batch"), [(20, [20]), (50, [32, 18]), (51, [32, 19]), (64, [32, 32])])
def test_as_many_rows_are_written_as_asked_for(corrupt_config, shards, monkeypatch, rows, rows_per_batch):
    monkeypatch.setattr(corrupt, "CORRUPTED_ROWS_PER_BATCH", 32)
    source = HeldOutRows(rows=rows, length=16, packing="packed")
    assert [batch.num_rows for batch in source.read(open_shards(shards), torch.device("cpu"))] == rows_per_batch
    result = write_corrupted_rows(corrupt_config(rows=rows))
    assert result.rows == len(read_corrupted_rows(result.output, open_shards(shards), positions=16).input_ids) == rows


@pytest.mark.parametrize("packing", ["packed", "examples"])
def test_metrics_equal_those_of_an_evaluation_with_the_same_generator(
    corrupt_config, finished_run, run_config, shards, packing
):
    opened, cpu = open_shards(shards), torch.device("cpu")
    electra = load_model(find_model_folder(finished_run)).eval()
    batches = held_out_batches(run_config(evaluation_rows=32, packing=packing), opened, cpu)
    expected = evaluate(electra, batches, unigram_frequencies(opened, cpu), opened.tokenizer.vocabulary)
    result = write_corrupted_rows(corrupt_config(rows=32, packing=packing))
    rows = read_corrupted_rows(result.output, opened, positions=16)
    with torch.no_grad():
        assert rows.evaluate(electra, opened.tokenizer, World(cpu)) == pytest.approx(result.metrics)
    actual = result.metrics
    assert actual["fixed_rtd_loss"] == pytest.approx(expected["rtd_loss"], rel=1e-5)
    assert actual["fixed_rtd_auc"] == pytest.approx(expected["rtd_auc"], rel=1e-5)


def test_a_run_is_evaluated_on_the_rows(corrupt_config, run_config, shards):
    result = write_corrupted_rows(corrupt_config())
    config = run_config(corrupted_rows=result.output, steps=2, evaluate_every=1)
    pretrain(config)
    evaluations = [line for line in read_metrics(config.output / "metrics.jsonl") if line["kind"] == "validation"]
    rows = read_corrupted_rows(result.output, open_shards(shards), positions=16)
    electra = load_model(find_model_folder(config.output)).eval()
    with torch.no_grad():
        expected = rows.evaluate(electra, open_shards(shards).tokenizer, World(torch.device("cpu")))
    assert evaluations[-1]["fixed_rtd_loss"] == pytest.approx(expected["fixed_rtd_loss"], rel=1e-4)
    assert evaluations[0]["fixed_rtd_loss"] != evaluations[-1]["fixed_rtd_loss"]


def test_a_run_is_resumed_from_another_folder(corrupt_config, run_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = run_config(corrupted_rows=write_corrupted_rows(corrupt_config()).output.relative_to(tmp_path), steps=2)
    pretrain(config)
    monkeypatch.chdir("/")
    extended = build_config(PretrainConfig, output=config.output, resume=True, steps=3)
    assert "fixed_rtd_loss" in pretrain(extended).metrics


def test_a_model_without_discriminator_has_no_metrics(corrupt_config, shards, make_pair):
    result = write_corrupted_rows(corrupt_config())
    opened = open_shards(shards)
    rows = read_corrupted_rows(result.output, opened, positions=16)
    electra = load_model(find_model_folder(corrupt_config(output=result.output.with_name("other")).model))
    electra.discriminator = None
    assert isinstance(electra, Electra)
    assert rows.evaluate(electra, opened.tokenizer, World(torch.device("cpu"))) == {}


def test_rows_are_never_overwritten(corrupt_config):
    write_corrupted_rows(corrupt_config())
    with pytest.raises(ConfigError, match="exists already"):
        corrupt_config()


def test_equal_rows_are_equal_files(corrupt_config, tmp_path):
    paths = [tmp_path / f"{number}.safetensors" for number in range(6)]  # metadata had one of six orders
    files = {write_corrupted_rows(corrupt_config(output=path, rows=8)).output.read_bytes() for path in paths}
    assert len(files) == 1


def test_rows_are_as_long_as_those_that_the_generator_was_trained_on(corrupt_config, finished_run, tmp_path, capsys):
    assert write_corrupted_rows(corrupt_config(length=None, rows=8)).length == read_trained_length(
        find_model_folder(finished_run)
    )
    assert capsys.readouterr().err == ""
    write_corrupted_rows(corrupt_config(length=24, rows=8, output=tmp_path / "long.safetensors"))
    assert "was trained on rows of up to 16 tokens" in capsys.readouterr().err


def test_rows_longer_than_the_positions_are_refused_before_training(corrupt_config, run_config):
    path = write_corrupted_rows(corrupt_config(length=24, rows=8)).output
    config = run_config(corrupted_rows=path, positions=16, steps=2)
    with pytest.raises(DataError, match="rows of 24 tokens, longer than the model's 16 positions"):
        pretrain(config)
    assert not config.output.exists()


def test_rows_of_another_tokenizer_are_an_error(corrupt_config, shards):
    path = write_corrupted_rows(corrupt_config()).output
    change_metadata(path, tokenizer="another")
    with pytest.raises(DataError, match="another tokenizer"):
        read_corrupted_rows(path, open_shards(shards), positions=16)


def test_rows_of_other_text_are_an_error(corrupt_config, shards):
    path = write_corrupted_rows(corrupt_config()).output
    change_metadata(path, rows="32")  # as if the shards had other rows
    with pytest.raises(DataError, match="other text"):
        read_corrupted_rows(path, open_shards(shards), positions=16)


def change_metadata(path, **changes) -> None:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, metadata=metadata | changes)


def test_the_file_holds_replaced_tokens_only(corrupt_config, shards):
    result = write_corrupted_rows(corrupt_config())
    tensors, rows = load_file(result.output), read_corrupted_rows(result.output, open_shards(shards), positions=16)
    assert tensors.keys() == {"indices", "token_ids"}
    assert not (rows.input_ids.flatten()[tensors["indices"].long()] == tensors["token_ids"]).any()


def test_damaged_rows_are_an_error(corrupt_config, shards):
    path = write_corrupted_rows(corrupt_config()).output
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is damaged .*checksum differs"):
        read_corrupted_rows(path, open_shards(shards), positions=16)


def test_other_files_are_an_error(finished_run, shards):
    path = find_model_folder(finished_run) / "model.safetensors"
    with pytest.raises(DataError, match="no corrupted rows"):
        read_corrupted_rows(path, open_shards(shards), positions=16)


def test_the_command_prints_the_result_as_json(corrupt_config, capsys):
    config = corrupt_config()
    flags = ["--model", config.model, "--data", config.data, "--output", config.output, "--rows", 32, "--length", 16]
    main(["corrupt", *map(str, flags), "--device", "cpu", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == 32
    assert 0 < printed["metrics"]["fixed_rtd_auc"] <= 1
