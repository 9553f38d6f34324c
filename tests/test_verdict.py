"""What a model has learnt, in words: beside guessing, token frequencies and the most frequent class."""

import pytest

from electra.objectives.evaluation import describe_metrics
from electra.pretraining.verdict import assess_run

LEARNT = {"loss": 20.0, "mlm_loss": 4.0, "mlm_accuracy": 0.3, "unigram_mlm_loss": 7.0, "rtd_auc": 0.8}
LEARNT |= {"unigram_rtd_auc": 0.9, "unigram_rtd_loss": 0.2}


def assess(*evaluations: dict[str, float], epochs: float = 2.0) -> dict[str, str]:
    """The verdict on a run with these held-out metrics, each after 10 steps more."""
    lines = [{"kind": "validation", "step": 10 * number} | each for number, each in enumerate(evaluations, start=1)]
    return assess_run(lines, epochs, "runs/x")


def test_a_run_that_has_learnt_is_compared_with_token_frequencies_and_guessing():
    verdict = assess(LEARNT)
    assert list(verdict) == ["epochs", "generator", "discriminator", "next"]
    assert "2.0 times" in verdict["epochs"]
    assert "better than token frequencies" in verdict["generator"]
    assert "90% of the time if they are drawn at random" in verdict["discriminator"]
    assert "electra finetune --model runs/x" in verdict["next"]


@pytest.mark.parametrize(("epochs", "advice"), [(0.3, "train longer"), (50.0, "more text")])
def test_a_run_on_the_plateau_of_token_frequencies_is_told_so(epochs, advice):
    plateau = LEARNT | {"mlm_loss": 6.9, "rtd_auc": 0.58, "unigram_rtd_auc": 0.52}
    verdict = assess(plateau, epochs=epochs)
    assert "plateau" in verdict
    assert "learnt next to nothing" in verdict["discriminator"]
    assert advice in verdict["next"]
    assert "on the plateau" in describe_metrics(plateau)


def test_a_held_out_loss_that_rises_is_overfitting():
    verdict = assess(LEARNT, LEARNT | {"mlm_loss": 3.0}, LEARNT)
    assert "was 3.000 at step 20 and is 4.000 now" in verdict["overfitting"]
    assert "more text" in verdict["next"]
    assert "overfitting" not in assess(LEARNT, LEARNT | {"loss": 30.0})  # masks of phases differ: only mlm_loss counts


def test_runs_without_generator_or_without_discriminator_are_assessed():
    generator = {name: value for name, value in LEARNT.items() if "rtd" not in name}
    assert list(assess(generator)) == ["epochs", "generator", "next"]
    discriminator = {name: LEARNT[name] for name in ("loss", "unigram_mlm_loss", "unigram_rtd_auc", "unigram_rtd_loss")}
    assert list(assess(discriminator)) == ["epochs", "discriminator", "next"]
