"""Benchmarks run, and what they time is the same work on both sides."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from transformers_models import add_noise


@pytest.fixture
def pretrain(monkeypatch):
    """benchmarks/pretrain.py as a module, on the CPU."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module("pretrain")


def test_both_sides_of_a_pretraining_step_have_the_same_parameters_and_first_losses(pretrain, shards, capsys):
    settings = "--settings tiny:4x16 --dropout 0.1 --steps 2 --peers eager --ours plain --forward 1"
    pretrain.main(f"--data {shards} {settings} --json".split())
    found = json.loads(capsys.readouterr().out)
    eager, plain = found["rows"]
    assert eager["parameters"] == plain["parameters"]
    assert [check.split(":")[0] for check in found["checks"]] == ["the same work"]
    assert eager["ratio"] == 1
    assert plain["ratio"] == pytest.approx(eager["step_seconds"] / plain["step_seconds"])
    assert found["forward"][0]["logits_apart"] < 1e-5


def test_a_profile_has_all_of_a_step_and_knows_its_products(pretrain, shards, capsys):
    sides = "--dropout 0 --steps 2 --peers --ours plain --forward --profile --json"
    pretrain.main(f"--data {shards} --settings tiny:4x64 {sides}".split())
    [row] = json.loads(capsys.readouterr().out)["rows"]
    altogether = sum(kind["milliseconds"] for kind in row["kinds"].values())
    assert 0.3 < altogether / (1000 * row["step_seconds"]) < 3
    assert row["kinds"]["products"]["milliseconds"] > 0.1 * altogether
    assert {"attention", "gelu", "norms", "optimizer"} <= {name for name, kind in row["kinds"].items() if kind["count"]}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_badd_coopA_NNT", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", "attention"),
        ("gradient_of_mix_kernel", "attention"),
        ("side_by_side_kernel", "attention"),
        ("gradient_of_gelu_kernel", "gelu"),
        ("gradient_of_norm_kernel", "norms"),
        ("sum_kernel", "column sums"),
        ("gradient_of_score_kernel", "vocabulary"),
        ("triton_per_fused__to_copy_embedding_dense_backward_native_layer_norm_backward_view_5", "embeddings"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>",
            "optimizer",
        ),
        ("Memset (Unknown)", "other"),
    ],
)
def test_a_kernel_is_known_by_its_name(pretrain, name, kind):
    assert importlib.import_module("profiling").kind_of(name) == kind


def test_a_side_that_fails_says_why_and_the_others_go_on(pretrain, shards, capsys, monkeypatch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("too little memory")

    monkeypatch.setattr(pretrain, "peer_side", out_of_memory)
    pretrain.main(f"--data {shards} --settings tiny:2x16 --dropout 0 --steps 1 --ours plain --forward".split())
    printed = capsys.readouterr().out
    assert "failed: OutOfMemoryError: too little memory" in printed
    assert "tokens/s" in printed
    with pytest.raises(SystemExit) as left:
        pretrain.main(f"--data {shards} --settings tiny:2x16 --dropout 0 --steps 1 --ours --forward".split())
    assert left.value.code == 1
    assert "no side could be measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--settings tiny:0x16", "batch_size is 0"),
        ("--settings tiny:2x1024", "512 positions"),
        ("--dropout 1.5", "dropout is 1.5"),
        ("--forward 0", "--forward is 0"),
        ("--follow 5 --ours", "--follow needs a way"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(pretrain, shards, capsys, words, sentence):
    with pytest.raises(SystemExit) as left:
        pretrain.main(f"--data {shards} {words}".split())
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_peers_two_losses_are_one(pretrain, make_pair, make_batch, vocabulary):
    pair = add_noise(pretrain.Pair(make_pair().config))
    input_ids = make_batch(rows=4, length=16, lengths=[16] * 4).input_ids  # [CLS], 14 tokens, [SEP]
    eager, lean = (losses(pair, input_ids, 14, vocabulary) for losses in pretrain.PEERS.values())
    assert eager["generator"].item() == pytest.approx(lean["generator"].item(), rel=1e-5)
    assert eager["discriminator"].item() == pytest.approx(lean["discriminator"].item(), rel=0.5)  # other samples


def test_a_path_follows_itself(pretrain, shards, capsys):
    pretrain.main(f"--data {shards} --settings tiny:4x16 --dropout 0 --follow 3 --ours plain --json".split())
    [found] = json.loads(capsys.readouterr().out)["follow"]
    assert found["generator_apart"] == found["discriminator_apart"] == 0
