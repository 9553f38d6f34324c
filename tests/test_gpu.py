"""What must hold on a GPU; these run where there is one."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from layers import by_steps, made_layer
from made import write_rows
from safetensors.torch import load_file
from torch.nn import functional

from electra.data.loader import Batch, compute_cu_seqlens
from electra.errors import TrainingError
from electra.finetuning import job as tuning
from electra.finetuning.command import FinetuneConfig, finetune
from electra.model import encoder as encoder_module
from electra.model.attention import AttentionBias, attention_bias_of
from electra.model.config import EncoderConfig
from electra.model.encoder import ClassicLayer, Encoder
from electra.objectives.losses import total
from electra.objectives.masking import MaskingConfig, mask
from electra.objectives.objectives import SAMPLING, Settings, mlm_loss, replaced_token_detection, sample
from electra.pretraining.command import pretrain
from electra.random import row_keys
from electra.training.checkpoint import checkpoint_folders, model_folder
from electra.training.trainer import Budget, Trainer, TrainerConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
COMPILED = pytest.mark.filterwarnings(  # the compiler advises TF32, and looks at gradients that are not kept
    "ignore:TensorFloat32 tensor cores", "ignore:The .grad attribute of a Tensor"
)


def on_gpu(batch: Batch) -> Batch:
    tensors = {name: value for name, value in vars(batch).items() if value is not None}
    return replace(batch, **{name: value.cuda() for name, value in tensors.items()})


@pytest.mark.parametrize("kernel", ["documents", "documents, listed", "short rows"])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("style", ["classic", "modern"])
def test_attention_without_a_mask_equals_that_with_one(monkeypatch, is_padded, kernel, style):
    torch.manual_seed(0)
    own = {"global_attention_every": 2, "local_attention": 32} if style == "modern" else {}
    config = EncoderConfig(style=style, layers=3, vocab_size=500, dropout=0, attention_dropout=0, **own)
    encoder = Encoder(config).cuda()
    ids = torch.randint(5, 500, (6, 120), device="cuda")
    documents = (torch.rand(6, 120, device="cuda") < 0.03).cumsum(1)
    lengths = torch.tensor([[120], [90], [1], [64], [120], [17]], device="cuda")
    attention_mask = torch.arange(120, device="cuda") < lengths if is_padded else None
    is_token = torch.ones_like(ids).bool() if attention_mask is None else attention_mask
    weights = torch.randn(6, 120, 256, device="cuda")

    def outcome(dtype: torch.dtype, kernel: str) -> tuple[torch.Tensor, ...]:
        starts = compute_cu_seqlens(documents, 100) if "listed" in kernel else None
        monkeypatch.setattr(encoder_module, "kernel_for", lambda *_: kernel.removesuffix(", listed"))
        encoder.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            hidden = encoder(ids, attention_mask, None, documents, starts).float()
        (hidden * weights)[is_token].sum().backward()
        qkv = encoder.layers[0].attention.qkv
        return hidden.detach()[is_token], *(parameter.grad.clone() for parameter in qkv.parameters())

    exact, by_mask, by_kernel = (
        outcome(torch.float32, "mask"),
        outcome(torch.bfloat16, "mask"),
        outcome(torch.bfloat16, kernel),
    )
    for truth, masked, found in zip(exact, by_mask, by_kernel, strict=True):
        rounding = (masked - truth).norm()
        assert (found - truth).norm() < 1.5 * rounding  # both are as far from fp32 as bf16 is
        assert (found - masked).norm() < 2 * rounding


def test_kernels_are_for_half_precision():
    encoder = Encoder(EncoderConfig(layers=1, vocab_size=50)).cuda()
    assert encoder.eval().kernel(128) == encoder.kernel(512) == "mask"
    with torch.autocast("cuda", torch.bfloat16):
        assert (encoder.eval().kernel(128), encoder.kernel(512)) == ("short rows", "documents")
        assert (encoder.train().kernel(128), encoder.kernel(512)) == ("short rows", "documents")


def test_dropout_of_short_rows_leaves_the_mean_and_another_seed_drops_others():
    from electra.kernels.attention import attend_in_short_rows

    torch.manual_seed(0)
    qkv = torch.randn(64, 100, 3, 2, 32, device="cuda")
    seed = torch.tensor(7, device="cuda", dtype=torch.int32)

    def attend(qkv: torch.Tensor, seed: torch.Tensor = seed) -> torch.Tensor:
        return attend_in_short_rows(qkv, None, None, seed, -1, 0.3)

    ones = torch.cat([qkv[:, :, :2], torch.ones_like(qkv[:, :, 2:])], dim=2)
    assert attend(ones).mean().item() == pytest.approx(1, abs=0.01)
    assert attend(ones).std().item() > 0.05
    assert torch.equal(attend(qkv), attend(qkv))
    assert not torch.equal(attend(qkv), attend(qkv, seed + 1))


def test_gelu_and_a_gate_in_one_kernel_are_those_of_torch():
    from electra.kernels.geglu import gated_gelu

    torch.manual_seed(0)
    product, grown = 2 * torch.randn(37, 11, 400, device="cuda"), torch.randn(37, 11, 200, device="cuda")
    outcomes = []
    for way in (gated_gelu, lambda both: functional.gelu(both[..., :200]) * both[..., 200:]):
        inputs = product.clone().requires_grad_()
        found = way(inputs)
        found.backward(grown)
        outcomes.append((found.detach(), inputs.grad))
    for ours, exact in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


def test_a_bias_and_gelu_in_one_kernel_are_those_of_torch():
    from electra.kernels.gelu import biased_gelu

    torch.manual_seed(0)
    product, grown = (2 * torch.randn(37, 11, 200, device="cuda") for _ in range(2))
    bias = torch.randn(200, device="cuda")
    outcomes = []
    for ours in (True, False):
        inputs = product.bfloat16().requires_grad_(), bias.bfloat16().requires_grad_()
        activated = biased_gelu(*inputs) if ours else functional.gelu(inputs[0].float() + inputs[1].float())
        activated.backward(grown.bfloat16() if ours else grown.bfloat16().float())
        outcomes.append((activated.float(), inputs[0].grad.float(), inputs[1].grad.float()))
    for ours, exact in zip(*outcomes, strict=True):
        assert (ours - exact).norm() < 0.005 * exact.norm()


@pytest.mark.parametrize("kernel", ["short rows", "documents"])
@pytest.mark.parametrize("has_documents", [True, False])
@pytest.mark.parametrize(("width", "length"), [(64, 110), (192, 128), (768, 110)])  # cuDNN takes rows of 128
def test_a_layer_at_once_is_as_exact_as_step_by_step(width, length, kernel, has_documents):
    layer, hidden, grown, documents = made_layer(width, length=length, device="cuda")
    reach = attention_bias_of(None, documents if has_documents else None, kernel=kernel)
    as_exact_as_by_steps(layer, hidden, grown, reach, documents if has_documents else None)


@pytest.mark.parametrize("rates", [(0.2, 0.0), (0.0, 0.2), (0.2, 0.2)])
@pytest.mark.parametrize(("length", "heads", "wanted"), [(110, 1, None), (40, 2, None), (13, 2, None), (40, 2, 7)])
def test_a_layer_at_once_drops_as_one_by_steps_does(rates, length, heads, wanted):
    layer, hidden, grown, documents = made_layer(64, *rates, length=length, heads=heads, device="cuda")
    at = None if wanted is None else torch.randint(0, length, (len(hidden), wanted), device="cuda")
    as_exact_as_by_steps(layer, hidden, grown, attention_bias_of(None, documents, kernel="short rows"), documents, at)


def as_exact_as_by_steps(
    layer: ClassicLayer, hidden: torch.Tensor, grown: torch.Tensor, reach: AttentionBias, documents: torch.Tensor | None,
    at: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """The layer's states and gradients are as far from those in fp32 as those of plain operations in bf16 are."""
    from electra.kernels.fused_layers import seeds_for

    rates = layer.dropout.p, layer.attention.dropout
    torch.manual_seed(1)
    seeds = seeds_for(hidden, max(rates))

    def outcome(dtype: torch.dtype, is_at_once: bool) -> list[torch.Tensor]:
        given = hidden.to(dtype, copy=True).requires_grad_()
        layer.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            found = layer.at_once(given, reach, at) if is_at_once else by_steps(layer, given, documents, seeds, at)
        (found * grown[:, : found.shape[1]]).sum().backward()
        return [each.float().clone() for each in (found.detach(), given.grad, *(p.grad for p in layer.parameters()))]

    exact, plain, found = outcome(torch.float32, False), outcome(torch.bfloat16, False), outcome(torch.bfloat16, True)
    for truth, rounded, ours in zip(exact, plain, found, strict=True):
        assert (ours - truth).norm() < 1.5 * (rounded - truth).norm() + 1e-4 * truth.norm()


@pytest.mark.parametrize(("is_made_again", "has_documents"), [(False, True), (True, True), (False, False)])
def test_modern_layers_at_once_are_as_exact_as_step_by_step(monkeypatch, is_made_again, has_documents):
    torch.manual_seed(0)
    own = {"global_attention_every": 2, "local_attention": 32, "dropout": 0, "attention_dropout": 0}
    encoder = Encoder(EncoderConfig(style="modern", layers=3, vocab_size=500, **own)).cuda()
    encoder.activation_checkpointing = is_made_again
    ids, grown = torch.randint(5, 500, (9, 110), device="cuda"), torch.randn(9, 110, 256, device="cuda")
    documents = (torch.rand(9, 110, device="cuda") < 0.03).cumsum(1) if has_documents else None

    def outcome(dtype: torch.dtype, kernel: str) -> list[torch.Tensor]:
        monkeypatch.setattr(encoder_module, "kernel_for", lambda *_: kernel)
        encoder.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            found = encoder(ids, None, None, documents).float()
        (found * grown).sum().backward()
        return [found.detach(), *(parameter.grad.clone() for parameter in encoder.parameters())]

    exact, plain = outcome(torch.float32, "mask"), outcome(torch.bfloat16, "mask")
    for truth, rounded, ours in zip(exact, plain, outcome(torch.bfloat16, "short rows"), strict=True):
        assert (ours - truth).norm() < 1.5 * (rounded - truth).norm() + 1e-4 * truth.norm()


@pytest.mark.parametrize("kernel", ["short rows", "documents"])
@pytest.mark.parametrize("style", ["classic", "modern"])
def test_states_at_some_positions_are_those_of_all(monkeypatch, style, kernel):
    torch.manual_seed(0)
    own = {"vocab_size": 500, "dropout": 0, "attention_dropout": 0}
    encoder = Encoder(EncoderConfig(style=style, layers=2, **own)).cuda()
    ids, at = torch.randint(5, 500, (9, 110), device="cuda"), torch.randint(0, 110, (9, 20), device="cuda")
    grown = torch.randn(9, 20, 256, device="cuda")
    monkeypatch.setattr(encoder_module, "kernel_for", lambda *_: kernel)

    def outcome(**wanted: torch.Tensor) -> list[torch.Tensor]:
        encoder.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            hidden = encoder(ids, **wanted).float()
        found = hidden if wanted else hidden.gather(1, at[:, :, None].expand(-1, -1, 256))
        (found * grown).sum().backward()
        return [found.detach(), *(parameter.grad.clone() for parameter in encoder.parameters())]

    for some, every in zip(outcome(positions=at), outcome(), strict=True):
        assert (some - every).norm() < 0.02 * every.norm() + 1e-6


@pytest.mark.parametrize(("has_documents", "length"), [(True, 110), (False, 110), (False, 128)])
def test_dropout_in_long_rows_drops_and_has_its_own_gradient(has_documents, length):
    layer, hidden, grown, documents = made_layer(64, 0.0, 0.2, length=length, device="cuda")
    reach = attention_bias_of(None, documents if has_documents else None, kernel="documents")

    def found(states: torch.Tensor, seed: int = 1) -> torch.Tensor:
        torch.manual_seed(seed)
        with torch.autocast("cuda", torch.bfloat16):
            return layer.at_once(states.bfloat16(), reach).float()

    assert torch.equal(found(hidden), found(hidden))
    assert (found(hidden) - found(hidden, seed=2)).norm() > 0.02 * found(hidden).norm()
    given = hidden.clone().requires_grad_()
    (found(given) * grown).sum().backward()
    ways = torch.randn(32, *hidden.shape, device="cuda")
    with torch.no_grad():
        risen = [((found(hidden + 0.05 * way) - found(hidden - 0.05 * way)) * grown).sum() / 0.1 for way in ways]
    slopes = (given.grad * ways).flatten(1).sum(1)
    assert (slopes - torch.stack(risen)).norm() < 0.3 * slopes.norm()


@pytest.mark.parametrize("length", [192, 200])
def test_whole_long_rows_are_as_exact_as_plain_attention(length):
    torch.manual_seed(0)
    qkv, grown = torch.randn(5, length, 3, 2, 64, device="cuda"), torch.randn(5, length, 2, 64, device="cuda")

    def outcome(dtype: torch.dtype, is_ours: bool) -> tuple[torch.Tensor, torch.Tensor]:
        from electra.kernels import library_attention as long_rows

        given = qkv.to(dtype, copy=True)
        if is_ours:
            kept = long_rows.mix(given, None, 0.0)
            gradient, parts = long_rows.gradients_of_mix(given, None, *kept, grown.to(dtype), 0.0)
            torch.testing.assert_close(parts.sum(0), gradient.float().flatten(2).sum((0, 1)), rtol=1e-3, atol=1e-2)
            return kept[0].float(), gradient.float()
        query, key, value = (each.transpose(1, 2) for each in given.requires_grad_().unbind(2))
        mixed = ((query @ key.transpose(-1, -2) / 8).softmax(-1) @ value).transpose(1, 2)
        mixed.backward(grown.to(dtype))
        return mixed.detach().float(), given.grad.float()

    exact, plain, found = outcome(torch.float32, False), outcome(torch.bfloat16, False), outcome(torch.bfloat16, True)
    for truth, rounded, ours in zip(exact, plain, found, strict=True):
        assert (ours - truth).norm() < 1.5 * (rounded - truth).norm()


def test_loss_and_sample_in_one_pass_are_the_plain_ones(make_batch, vocabulary):
    from electra.kernels import mlm_head

    torch.manual_seed(0)
    batch, settings = on_gpu(make_batch(rows=64, lengths=[16] * 64)), Settings(vocabulary=vocabulary, seed=3)
    masked = mask(batch, vocabulary, settings, settings.seed)
    size = 1000
    masked = replace(masked, originals=torch.randint(0, size, masked.originals.shape, device="cuda"))
    states, table = torch.randn(*masked.positions.shape, 64, device="cuda"), torch.randn(size, 64, device="cuda")
    given = states.bfloat16(), 0.4 * table, torch.randn(size, device="cuda")
    keys = [row_keys(settings.seed, batch.step, batch.row_ids, purpose) for purpose in SAMPLING]
    one, other = ([each.clone().requires_grad_() for each in given] for _ in range(2))
    losses, sampled = mlm_head.loss_and_sample(*one, masked.originals, *keys)
    (losses * masked.weights).sum().backward()
    logits = functional.linear(other[0], other[1].bfloat16(), other[2].bfloat16())
    loss = mlm_loss(logits, masked)
    loss.sum.backward()
    torch.testing.assert_close((losses * masked.weights).sum(), loss.sum, rtol=1e-5, atol=1e-3)
    for ours, plain in zip(one, other, strict=True):
        assert (ours.grad - plain.grad).norm() < 0.01 * plain.grad.norm()
    assert (sampled == sample(logits, masked, batch, settings)).float().mean() > 0.99  # noise differs in last digits


def test_masks_are_the_same_on_the_gpu(make_batch, vocabulary):
    batch = make_batch(rows=64, lengths=[16, 9, 4, 2] * 16)
    batch = replace(batch, is_continuation=batch.input_ids % 3 == 0)
    for config in (
        MaskingConfig(mask_token_probability=0.8, random_token_probability=0.1),
        MaskingConfig(mask_fraction=0.4, whole_word_masking=True),
    ):
        here, there = mask(batch, vocabulary, config, 7), mask(on_gpu(batch), vocabulary, config, 7)
        assert torch.equal(here.input_ids, there.input_ids.cpu())
        assert torch.equal(
            here.positions[here.weights > 0].sort()[0], there.positions.cpu()[here.weights > 0].sort()[0]
        )


@COMPILED
def test_the_compiled_joint_loss_equals_the_eager_one(make_pair, make_batch, vocabulary):
    electra, batch, settings = make_pair().cuda(), on_gpu(make_batch()), Settings(vocabulary=vocabulary)
    eager = total(replaced_token_detection(electra, batch, settings))
    compiled = torch.compile(replaced_token_detection, fullgraph=True)
    torch.testing.assert_close(total(compiled(electra, batch, settings)), eager, rtol=1e-4, atol=1e-4)


def difference(one, other) -> float:
    """The largest difference of two runs' weights."""
    ours, theirs = (load_file(model_folder(config.output) / "model.safetensors") for config in (one, other))
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@COMPILED
@pytest.mark.parametrize("style", ["classic", "modern"])
def test_in_half_precision_the_fast_steps_follow_the_plain_ones_in_fp32(run_config, style):
    waves = {} if style == "classic" else {"sinusoidal_positions": False}
    same = {"device": "cuda", "style": style, "steps": 30, "log_every": 1, "width": 64, "generator_width": 64, **waves}
    plain = run_config("plain", compile="off", precision="fp32", **same)
    fast = run_config("fast", precision="bf16", **same)
    found = []
    for run in (plain, fast):
        pretrain(run)
        lines = [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]
        found.append(
            torch.tensor([[line["generator"], line["discriminator"]] for line in lines if line["kind"] == "train"])
        )
    assert found[0].shape == (30, 2)
    torch.testing.assert_close(found[1].mean(0), found[0].mean(0), rtol=0.01, atol=0)


@COMPILED
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
def test_compiled_and_recorded_steps_are_the_plain_ones(run_config, optimizer):
    same = {"device": "cuda", "precision": "fp32", "steps": 12, "optimizer": optimizer, "micro_batches": 2}
    plain, fast = run_config("plain", compile="off", **same), run_config("fast", **same)
    for run in (plain, fast):
        pretrain(run)
    assert difference(plain, fast) < 1e-3  # Muon works in bf16


@COMPILED
def test_a_resumed_run_differs_no_more_than_two_unbroken_ones(run_config):
    runs = [run_config(name, device="cuda", steps=60, dropout=0.1) for name in ("first", "second", "third", "broken")]
    for run in runs:
        pretrain(run)
    for folder in checkpoint_folders(runs[3].output)[-2:]:
        shutil.rmtree(folder)
    assert pretrain(replace(runs[3], resume=True)).step == 60
    unbroken = max(difference(runs[0], runs[1]), difference(runs[0], runs[2]), difference(runs[1], runs[2]))
    print(f"unbroken runs differ by {unbroken:.2e}, the resumed one by {difference(runs[0], runs[3]):.2e}")
    assert min(difference(run, runs[3]) for run in runs[:3]) <= max(unbroken, 1e-7)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recorded_steps_are_the_steps(encoder_folder, tmp_path, monkeypatch, dropout):
    """Fine-tuning by replaying CUDA graphs ends with the weights of fine-tuning step by step."""
    train = write_rows(tmp_path / "rows.jsonl", "classification", 200, seed=0)
    settings = {"precision": "fp32", "dropout": dropout, "batch": 16, "epochs": 4, "length": 32, "workers": 1}
    outcomes = []
    for name, is_recorded in (("recorded", True), ("by hand", False)):
        output = tmp_path / name
        config = FinetuneConfig(model=encoder_folder, train=train, output=output, device="cuda", **settings)
        with monkeypatch.context() as patched:
            if not is_recorded:
                patched.setattr(
                    tuning, "Trainer", lambda *args, **options: Trainer(*args, **options | {"cuda_graphs": False})
                )
            finetune(config)
        outcomes.append(load_file(output / "seed-1" / "model" / "model.safetensors"))
    assert max((outcomes[0][name] - outcomes[1][name]).abs().max().item() for name in outcomes[0]) < 1e-5


def test_a_recorded_step_that_is_not_finite_moves_nothing(encoder_folder, tmp_path):
    train = write_rows(tmp_path / "rows.jsonl", "classification", 64, seed=0)
    config = FinetuneConfig(model=encoder_folder, train=train, output=tmp_path, device="cuda", batch=8, length=32)
    lesson = tuning.FinetuningTask(config, config.the_task(), 1, tmp_path / "tokens")
    optimizer, settings = config.optimizer(lesson.model.encoder.config), TrainerConfig(max_nonfinite_steps=2)
    trainer = Trainer(lesson, optimizer, settings, Budget(steps=100), tmp_path / "run", cuda_graphs=True, quiet=True)
    trainer.run_step = trainer.graphed_step()
    for _ in range(4):
        trainer.step()
    with torch.no_grad():
        lesson.model.head.bias.fill_(float("nan"))
    before = lesson.model.encoder.layers[0].attention.qkv.weight.clone()
    trainer.step()
    assert torch.equal(lesson.model.encoder.layers[0].attention.qkv.weight, before)
    assert trainer.averages.nonfinite_steps() == 1
    trainer.check_finite()
    trainer.step()
    with pytest.raises(TrainingError, match="2 consecutive steps"):
        trainer.check_finite()
