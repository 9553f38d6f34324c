"""Benchmarks run, and compare equal work."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers_models import add_noise

import electra
from electra.pretraining.command import pretrain as pretrain_model
from electra.runfolder import checkpoint_folders


@pytest.fixture
def pretrain(monkeypatch):
    """benchmarks/pretrain.py as a module, on the CPU."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = importlib.import_module("pretrain")
    monkeypatch.setattr(module, "matmul_flops", lambda device: 1e12)
    return module


@pytest.fixture
def run(pretrain, shards, capsys):
    """The JSON that benchmarks/pretrain.py prints."""

    def run_json(flags: str) -> dict:
        pretrain.main(f"--data {shards} {flags} --json".split())
        return json.loads(capsys.readouterr().out)

    return run_json


@pytest.mark.slow
def test_both_contenders_have_the_same_parameters_and_first_losses(run):
    report = run("--shapes tiny:4x16 --dropout 0.1 --steps 2 --peers eager --modes eager --forward 1")
    peer, electra = report["measurements"]
    assert peer["parameters"] == electra["parameters"]
    assert [check.split(":")[0] for check in report["checks"]] == ["equal work"]
    assert peer["speedup"] == 1
    assert electra["speedup"] == pytest.approx(peer["step_seconds"] / electra["step_seconds"])
    assert report["forward"][0]["difference"] < 1e-5


@pytest.mark.slow
def test_a_profile_covers_the_whole_step_and_recognises_matmuls(run):
    report = run("--shapes tiny:4x64 --dropout 0 --steps 2 --peers --modes eager --forward --profile")
    [measurement] = report["measurements"]
    total = sum(kind["milliseconds"] for kind in measurement["profile"].values())
    assert 0.3 < total / (1000 * measurement["step_seconds"]) < 3
    assert measurement["profile"]["matmuls"]["milliseconds"] > 0.1 * total
    present = {name for name, kind in measurement["profile"].items() if kind["count"]}
    assert {"attention", "gelu", "norms", "optimizer"} <= present


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_badd_coopA_NNT", "matmuls"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "matmuls"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", "attention"),
        ("short_attention_backward_kernel", "attention"),
        ("pack_qkv_kernel", "attention"),
        ("bias_gelu_backward_kernel", "gelu"),
        ("dropout_add_layernorm_backward_kernel", "norms"),
        ("column_sum_kernel", "column sums"),
        ("mlm_loss_backward_kernel", "vocabulary"),
        ("triton_per_fused__to_copy_embedding_dense_backward_native_layer_norm_backward_view_5", "embeddings"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>",
            "optimizer",
        ),
        ("Memset (Unknown)", "other"),
    ],
)
def test_kernels_are_classified_by_name(pretrain, name, kind):
    assert importlib.import_module("timing").kernel_kind(name) == kind


@pytest.mark.slow
def test_an_error_in_one_contender_is_reported_and_the_others_are_measured(pretrain, shards, capsys, monkeypatch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("not enough memory")

    monkeypatch.setattr(pretrain, "build_peer", out_of_memory)
    flags = f"--data {shards} --shapes tiny:2x16 --dropout 0 --steps 1 --forward"
    pretrain.main(f"{flags} --modes eager".split())
    printed = capsys.readouterr().out
    assert "failed: OutOfMemoryError: not enough memory" in printed
    assert "tokens/s" in printed
    with pytest.raises(SystemExit) as exit_info:
        pretrain.main(f"{flags} --modes".split())
    assert exit_info.value.code == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--shapes tiny:0x16", "batch_size is 0"),
        ("--shapes tiny:2x1024", "512 positions"),
        ("--dropout 1.5", "dropout is 1.5"),
        ("--forward 0", "--forward is 0"),
        ("--compare-losses 5 --modes", "--compare-losses needs one of --modes"),
    ],
)
def test_impossible_flags_are_errors(pretrain, shards, capsys, flags, message):
    with pytest.raises(SystemExit) as exit_info:
        pretrain.main(f"--data {shards} {flags}".split())
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_both_implementations_of_the_peer_have_the_same_loss(pretrain, make_pair, make_batch, vocabulary):
    pair = add_noise(pretrain.TransformersPair(make_pair().config))
    input_ids = make_batch(rows=4, length=16, lengths=[16] * 4).input_ids  # [CLS], 14 tokens, [SEP]
    eager, static = (losses(pair, input_ids, 14, vocabulary) for losses in pretrain.PEERS.values())
    assert eager["generator"].item() == pytest.approx(static["generator"].item(), rel=1e-5)
    assert eager["discriminator"].item() == pytest.approx(static["discriminator"].item(), rel=0.5)  # other samples


@pytest.mark.slow
def test_losses_of_a_mode_equal_themselves(run):
    [report] = run("--shapes tiny:4x16 --dropout 0 --compare-losses 3 --modes eager")["losses"]
    assert report["generator_difference"] == report["discriminator_difference"] == 0


def test_the_average_of_checkpoints_has_the_mean_of_their_weights(finished_run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    average_checkpoints = importlib.import_module("average_checkpoints")
    average_checkpoints.main(["--run", str(finished_run), "--last", "2", "--output", str(tmp_path / "mean")])
    folders = [*checkpoint_folders(finished_run), tmp_path / "mean"]
    first, second, mean = [load_file(folder / "model.safetensors") for folder in folders]
    assert mean.keys() == second.keys()
    for name, weight in mean.items():
        torch.testing.assert_close(weight, (first[name] + second[name]) / 2)
    assert len(electra.load(tmp_path / "mean", device="cpu").embed(["a text"])) == 1


@pytest.fixture
def race(monkeypatch):
    """benchmarks/race.py as a module, with exports that are empty and GLUE scores that are made up: STS-B has 80 and
    three times the length of the folder's name."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    module = importlib.import_module("race")

    def glue(model: Path, **_) -> SimpleNamespace:
        points = {"stsb": 3 * len(model.parent.name)}
        return SimpleNamespace(rows=[SimpleNamespace(task=task, median=80.0 + points.get(task, 0)) for task in tasks])

    tasks = module.GLUE_6
    monkeypatch.setattr(module.electra, "export", lambda model, output: output.mkdir(), raising=False)
    monkeypatch.setattr(module.electra, "glue", glue, raising=False)
    monkeypatch.setattr(module, "get_glue_task", lambda name, data: None)
    return module


def test_an_entry_of_the_race_is_the_mean_of_runs_that_differ_in_their_seed(race, run_config, tmp_path, capsys):
    settings = {"aa": {"seed": 0}, "bbbb": {"seed": 1}, "other": {"learning_rate": 1e-3}, "again/aa": {"seed": 2}}
    for name, values in settings.items():
        pretrain_model(run_config(name, steps=2, **values))
    flags = ["--data", "glue", "--output", str(tmp_path / "entry"), "--runs", str(tmp_path / "aa")]
    capsys.readouterr()
    race.main([*flags, str(tmp_path / "bbbb")])
    *_, first, second, mean = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert (float(first[-1]), float(second[-1]), mean[-1].strip()) == (81, 82, "81.50 ± 0.71")
    faults = {"other": "differ in more than their seed: --learning-rate", "aa": "different folder names"}
    for name, message in faults.items():
        with pytest.raises(SystemExit):
            race.main([*flags, str(tmp_path / name)])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        race.main([*flags[:-1], str(tmp_path / "again/aa")])
    assert "--weights has other content; choose another --output" in capsys.readouterr().err


def test_an_entry_of_the_race_has_finished_runs(race, run_config, tmp_path, capsys):
    pretrain_model(run_config("run", steps=4, save_every=2, evaluate_every=2))
    shutil.rmtree(checkpoint_folders(tmp_path / "run")[-1])
    with pytest.raises(SystemExit):
        race.main(["--runs", str(tmp_path / "run"), "--data", "glue", "--output", str(tmp_path / "entry")])
    assert "run is not finished: 50% of its budget is used" in capsys.readouterr().err
    assert not (tmp_path / "entry").exists()


@pytest.mark.slow
def test_two_ranks_are_compared_with_two_micro_batches(shards):
    """In fp32 on a CPU both have the same bits, and a world of one has those of none."""
    flags = f"--data {shards} --size tiny --batch-size 8 --length 16 --steps 3 --device cpu --json"
    script = Path(__file__).parents[1] / "benchmarks" / "data_parallel.py"
    paths = {"PYTHONPATH": str(script.parents[1])}
    ended = subprocess.run([sys.executable, script, *flags.split()], env=os.environ | paths, capture_output=True)
    report = json.loads(ended.stdout)
    assert report["differences"]["two ranks"] == report["differences"]["micro-batches"]
    assert set(report["differences"]["world of one"].values()) == {0.0}


def test_the_model_of_a_step_counts_bytes_and_products(monkeypatch):
    """A ring of g GPUs moves 2 (g − 1)/g of the bytes; for a 2 × 3 matrix an iteration is 2·2·2·3 + 2·2³ + 2·2·2·3."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    module = importlib.import_module("scaling_model")
    assert module.all_reduce_seconds(800, gpus=1, per_node=8, nvlink=100, network=10) == 0
    assert module.all_reduce_seconds(800, gpus=8, per_node=8, nvlink=100, network=10) == pytest.approx(14)
    assert module.all_reduce_seconds(800, gpus=16, per_node=8, nvlink=100, network=10) == pytest.approx(14 + 80)
    assert module.newton_schulz_flops((3, 2)) == 5 * (24 + 16 + 24)


def test_effects_of_a_design_are_the_differences_that_its_scores_were_made_with(monkeypatch):
    """Twelve runs by Plackett and Burman: the first has the defaults, any two columns are orthogonal."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    module = importlib.import_module("effects")
    rotations = [np.roll((1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0), shift) for shift in range(11)]
    levels = np.array([np.zeros(11, dtype=int), *rotations])
    names = [f"setting {number:02}" for number in range(11)]
    runs = [{name for name, level in zip(names, row, strict=True) if level} for row in levels]
    columns = module.build_columns(runs, products=[])
    assert list(columns) == names
    sizes = np.linspace(-0.01, 0.02, 11)
    noise = np.random.default_rng(0).normal(size=(5, 1)) / 100  # of folds, which all runs share
    scores = [{"rte": 0.6 + row @ sizes + noise, "cola": 0.4 + noise} for row in levels]
    effects = module.estimate_effects(columns, scores, prior=100.0)  # practically none
    assert [effect["rte"].mean for effect in effects.values()] == pytest.approx(sizes.tolist(), abs=1e-6)
    assert [effect["mean"].mean for effect in effects.values()] == pytest.approx((sizes / 2).tolist(), abs=1e-6)
    assert all(abs(effect["cola"].mean) < 1e-6 for effect in effects.values())
    deviation = (0.006**2 + noise.var(ddof=1) / 5 / 2) ** 0.5  # of a run: seeds, and folds of two tasks
    assert all(effect["mean"].error == pytest.approx(deviation / 3**0.5) for effect in effects.values())
    fewer = module.estimate_effects(module.build_columns(runs[:10], []), scores[:10], prior=0.01)
    assert all(effect["mean"].error < 0.01 for effect in fewer.values())  # less than the prior's


def test_settings_that_occur_together_share_an_effect(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    module = importlib.import_module("effects")
    columns = module.build_columns([set(), {"a", "b"}, {"a", "b", "c"}, {"c"}], products=[("a", "c")])
    assert {name: column.tolist() for name, column in columns.items()} == {
        "a, b": [0, 1, 1, 0],
        "c": [0, 0, 1, 1],
        "a × c": [0, 0, 1, 0],
    }
    defaults = {"warmup": 0.1, "phases": []}
    phases = ["fraction=0.7", "fraction=0.3,temperature=2"]
    changed = module.changed_settings({"warmup": 500, "phases": phases}, defaults)
    assert changed == {"warmup=500", "phases.temperature=2"}


def test_effects_are_estimated_from_the_stored_study(monkeypatch, capsys):
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module("effects")
    command = ["effects.py", "--study", str(folder / "study"), "--json"]
    monkeypatch.setattr(sys, "argv", command)
    module.main()
    effects = json.loads(capsys.readouterr().out)
    assert {"corrective_lm_weight=8.0", "mask_fraction=0.25"} <= effects.keys()
    monkeypatch.setattr(sys, "argv", [*command, "--without", "mask_fraction=0.3"])
    with pytest.raises(SystemExit, match=r"no run has mask_fraction=0.3; choose from .*mask_fraction=0.25"):
        module.main()
