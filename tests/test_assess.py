"""What a model has learnt, in words: beside guessing, token frequencies and the most frequent class."""

import json

import pytest
import torch

from electra.finetuning.command import assess_finetuning
from electra.finetuning.config import TuningConfig
from electra.finetuning.job import Job, JobResult
from electra.finetuning.tasks import Task
from electra.model.storage import write_tensors
from electra.objectives.evaluation import describe_metrics
from electra.pretraining.describe import assess_run
from electra.training.config import HardwareConfig

LEARNT = {"loss": 20.0, "mlm_loss": 4.0, "mlm_accuracy": 0.3, "unigram_mlm_loss": 7.0, "rtd_auc": 0.8}
LEARNT |= {"unigram_rtd_auc": 0.9, "unigram_rtd_loss": 0.2}


def assess(*evaluations: dict[str, float], epochs: float = 2.0) -> dict[str, str]:
    """The assessment on a run with these held-out metrics, each after 10 steps more."""
    lines = [{"kind": "validation", "step": 10 * number} | each for number, each in enumerate(evaluations, start=1)]
    return assess_run(lines, epochs, "runs/x")


def test_a_run_that_has_learnt_is_compared_with_token_frequencies_and_guessing():
    assessment = assess(LEARNT)
    assert list(assessment) == ["epochs", "generator", "discriminator", "next"]
    assert "2.0 times" in assessment["epochs"]
    assert "better than token frequencies" in assessment["generator"]
    assert "90% of the time (80% for samples of its generator)" in assessment["discriminator"]
    assert "electra finetune --model runs/x" in assessment["next"]


@pytest.mark.parametrize(("epochs", "advice"), [(0.3, "train longer"), (50.0, "more text")])
def test_a_run_on_the_plateau_of_token_frequencies_is_told_so(epochs, advice):
    plateau = LEARNT | {"mlm_loss": 6.9, "rtd_auc": 0.58, "unigram_rtd_auc": 0.52}
    assessment = assess(plateau, epochs=epochs)
    assert "plateau" in assessment
    assert "learnt next to nothing" in assessment["discriminator"]
    assert advice in assessment["next"]
    assert describe_metrics(plateau) == (
        "MLM loss 6.90 (token frequencies 7.00: plateau), AUC of random tokens 0.52 (guessing 0.50)"
    )


def test_a_loss_far_above_that_of_token_frequencies_is_no_plateau():
    assessment = assess(LEARNT | {"mlm_loss": 8.2})
    assert "has not learnt how frequent" in assessment["plateau"]
    assert "train longer" in assessment["next"]


def test_two_losses_of_token_predictions_are_told_apart():
    metrics = {"replace_mlm_loss": 4.75, "mlm_loss": 4.06, "unigram_mlm_loss": 7.28}
    assert describe_metrics(metrics) == (
        "model's MLM loss 4.75 (token frequencies 7.28), generator's MLM loss 4.06 (token frequencies 7.28)"
    )


def test_a_held_out_loss_that_rises_is_overfitting():
    assessment = assess(LEARNT, LEARNT | {"mlm_loss": 3.0}, LEARNT)
    assert "was 3.000 at step 20 and is 4.000 now" in assessment["overfitting"]
    assert "more text" in assessment["next"]
    assert "overfitting" not in assess(LEARNT, LEARNT | {"loss": 30.0})  # masks of phases differ: only mlm_loss counts


def test_losses_on_other_held_out_rows_are_not_compared():
    shorter_rows = LEARNT | {"mlm_loss": 3.0, "unigram_mlm_loss": 6.5}
    assert "overfitting" not in assess(shorter_rows, LEARNT)
    assert "was 3.900 at step 20" in assess(shorter_rows, LEARNT | {"mlm_loss": 3.9}, LEARNT)["overfitting"]


def test_runs_without_generator_or_without_discriminator_are_assessed():
    alone = {name: value for name, value in LEARNT.items() if "rtd" not in name}
    assert list(assess(alone)) == ["epochs", "model", "next"]
    assert assess(alone)["model"].startswith("The model predicts masked tokens better")
    adversarial = LEARNT | {"mlm_loss": 7.0, "baseline": 0.5}  # its generator does not minimise the MLM loss
    assert list(assess(adversarial)) == ["epochs", "discriminator", "next"]
    discriminator = {name: LEARNT[name] for name in ("loss", "unigram_mlm_loss", "unigram_rtd_auc", "unigram_rtd_loss")}
    assert list(assess(discriminator)) == ["epochs", "discriminator", "next"]


@pytest.fixture
def assess_job(tmp_path):
    """The assessment on a job with these dev logits, dev losses and accuracy, where the most frequent class has 0.5."""

    def assess(logits: list[list[float]], losses: list[float], accuracy: float, rows: int = 400) -> dict[str, str]:
        task = Task(name="t", kind="classification", text="a", label="b", labels=("no", "yes"), metrics=(), splits={})
        settings = {"model": tmp_path, "task": task, "tuning": TuningConfig(), "hardware": HardwareConfig(), "seed": 1}
        job = Job(**settings, folder=tmp_path / "out" / "seed-1")
        job.folder.mkdir(parents=True)
        write_tensors(job.folder / "logits.safetensors", {"dev": torch.tensor(logits)}, checksum=True)
        lines = [{"kind": "validation", "step": step, "loss": loss} for step, loss in enumerate(losses)]
        (job.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        metrics = {"accuracy": accuracy}
        result = JobResult("t", 1, {"dev": metrics}, 1, 1.0, {"dev": rows}, {}, baseline={"accuracy": 0.5})
        return assess_finetuning([job], [result], metrics)

    return assess


def test_a_fine_tuning_is_compared_with_the_most_frequent_class(assess_job, tmp_path):
    assessment = assess_job([[0.0, 1.0], [1.0, 0.0]], [0.7, 0.5], accuracy=0.8)
    assert assessment["baseline"] == "Better than always predicting the most frequent class (accuracy 80.00 and 50.00)."
    assert list(assessment) == ["baseline", "next"]
    assert f"electra predict --model {tmp_path}/out" in assessment["next"]


def test_a_small_difference_on_few_rows_may_be_chance(assess_job):
    assessment = assess_job([[0.0, 1.0], [1.0, 0.0]], [0.7, 0.5], accuracy=0.58, rows=100)
    assert "with 100 dev rows, differences up to 10.00 may be chance" in assessment["baseline"]


def test_predictions_of_a_single_class_are_noticed(assess_job):
    assessment = assess_job([[0.0, 1.0], [0.0, 2.0]], [0.7, 0.6], accuracy=0.5)
    assert "Every prediction on the dev rows is 'yes'" in assessment["one_class"]
    assert "another --learning-rate" in assessment["next"]


def test_a_dev_loss_that_rises_is_overfitting(assess_job):
    assessment = assess_job([[0.0, 1.0], [1.0, 0.0]], [0.5, 0.4, 0.8], accuracy=0.8)
    assert "was 0.400 after epoch 2 of 3 and is 0.800 now" in assessment["overfitting"]
    assert "fewer --epochs" in assessment["next"]


def test_metrics_that_are_missing_or_cut_leave_topics_out(assess_job):
    assert list(assess_job([[0.0, 1.0], [1.0, 0.0]], [], accuracy=0.8)) == ["baseline", "next"]
    assert list(assess({"loss": None, "mlm_loss": 4.0})) == ["epochs", "next"]
