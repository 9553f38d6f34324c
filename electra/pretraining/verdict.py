"""What a model has learnt, in words: held-out metrics beside those of guessing and of token frequencies."""

from typing import Any

from electra.objectives.evaluation import TOKEN_LOSSES, is_on_plateau

Metrics = dict[str, float]

GUESSING_AUC = 0.55  # up to here a ranking is hardly better than guessing, which has 0.5
OVERFITTING = 1.02  # times the lowest held-out loss
MANY_EPOCHS = 20
RISING = (*TOKEN_LOSSES, "unigram_rtd_loss")  # losses with the same masks and samples at every evaluation


def is_guessing(metrics: Metrics) -> bool:
    """Whether random tokens are hardly detected; samples of a poor generator differ in frequency, which is easier."""
    return metrics["unigram_rtd_auc"] < GUESSING_AUC


def assess_run(lines: list[dict[str, Any]], epochs: float, run: str) -> dict[str, str]:
    """Sentences about a finished run by topic, from its metrics; some topics are there only if they apply."""
    evaluations = [line for line in lines if line["kind"] == "validation"]
    if not evaluations:
        return {}
    last = evaluations[-1]
    verdict = {
        "epochs": f"It has seen {f'the text {epochs:.1f} times' if epochs >= 1 else f'{epochs:.0%} of the text'}."
    }
    for name, model in TOKEN_LOSSES.items():
        if name in last:
            verdict |= assess_token_predictions(last, name, model)
    if "unigram_rtd_auc" in last:
        verdict["discriminator"] = assess_discriminator(last)
    risen = next((name for name in RISING if name in last), "loss")
    lowest = min((line for line in evaluations if line.get(risen) is not None), key=lambda line: line[risen])
    if last[risen] > OVERFITTING * lowest[risen]:
        verdict["overfitting"] = (
            f"It over-fits: the held-out {risen} was {lowest[risen]:.3f} at step {lowest['step']:,} and is "
            f"{last[risen]:.3f} now."
        )
    return verdict | {"next": suggest_next(verdict, epochs, run)}


def assess_token_predictions(metrics: Metrics, name: str, model: str) -> dict[str, str]:
    """Whether a model predicts masked tokens better than their frequencies do."""
    numbers = f"held-out loss {metrics[name]:.2f}, of token frequencies alone {metrics['unigram_mlm_loss']:.2f}"
    if not is_on_plateau(metrics, name):
        accuracy = metrics[name.replace("loss", "accuracy")]
        better = f"better than token frequencies alone ({numbers}; {accuracy:.0%} are its first choice)"
        return {model: f"The {model} predicts masked tokens {better}."}
    return {
        model: f"The {model} predicts masked tokens hardly better than token frequencies alone, or worse ({numbers}).",
        "plateau": "This is the plateau of token frequencies: every model first learns how frequent each token is, and "
        "uses the context only later, often all at once.",
    }


def assess_discriminator(metrics: Metrics) -> str:
    """How well replaced tokens are told from original ones, beside guessing."""
    aucs = {"drawn at random": metrics["unigram_rtd_auc"]}
    if "rtd_auc" in metrics:
        aucs["sampled by its generator"] = metrics["rtd_auc"]
    shares = " and ".join(f"{auc:.0%} of the time if they are {samples}" for samples, auc in aucs.items())
    return (
        f"The discriminator ranks replaced tokens above original ones {shares}; guessing has 50%"
        f"{': it has learnt next to nothing.' if is_guessing(metrics) else '.'}"
    )


def suggest_next(verdict: dict[str, str], epochs: float, run: str) -> str:
    """What to do after a run."""
    if "overfitting" in verdict:
        return "Next: more text, fewer steps, a smaller --size or --dropout 0.1."
    if "plateau" in verdict or "nothing" in verdict.get("discriminator", ""):
        advice = "more text" if epochs > MANY_EPOCHS else "train longer (--resume with a larger budget)"
        return f"Next: {advice}, or a smaller model or vocabulary."
    return f"Next: electra finetune --model {run} --train FILE --output FOLDER, or electra report {run}."
