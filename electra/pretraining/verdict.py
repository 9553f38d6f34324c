"""What a model has learnt, in words: held-out metrics beside those of guessing and of token frequencies."""

from typing import Any

from electra.objectives.evaluation import TOKEN_LOSSES, is_on_plateau

GUESSING_AUC = 0.55  # of random tokens; below, a discriminator is hardly better than guessing, which has 0.5
OVERFITTING = 1.02  # times the lowest held-out loss
MANY_EPOCHS = 20
PLATEAU = (
    "This is the plateau of token frequencies: every model first learns how frequent each token is, and uses the "
    "context only later, often all at once."
)


def assess_run(metrics_lines: list[dict[str, Any]], epochs: float, run: str) -> dict[str, str]:
    """Sentences about a finished run by topic, from its metrics; some topics are there only if they apply."""
    evaluations = [line for line in metrics_lines if line["kind"] == "validation"]
    if not evaluations:
        return {}
    last = {name: value for name, value in evaluations[-1].items() if value is not None}
    seen = f"the text {epochs:.1f} times" if epochs >= 1 else f"{epochs:.0%} of the text"
    verdict = {"epochs": f"It has seen {seen}."}
    is_adversarial = any("baseline" in line for line in metrics_lines)  # its generator does not minimise the MLM loss
    token_losses = [
        name
        for name in TOKEN_LOSSES
        if {name, name.replace("loss", "accuracy"), "unigram_mlm_loss"} <= last.keys() and not is_adversarial
    ]
    for name in token_losses:
        verdict[TOKEN_LOSSES[name]] = assess_token_predictions(last, name)
        verdict |= {"plateau": PLATEAU} if is_on_plateau(last, name) else {}
    if "unigram_rtd_auc" in last:
        verdict["discriminator"] = assess_discriminator(last)
    # losses with the same masks and samples at every evaluation
    loss = next((name for name in (*token_losses, "unigram_rtd_loss", "loss") if name in last), "loss")
    lowest = min(
        (line for line in evaluations if line.get(loss) is not None), key=lambda line: line[loss], default=last
    )
    if loss in last and last[loss] > OVERFITTING * lowest[loss]:
        rise = f"was {lowest[loss]:.3f} at step {lowest['step']:,} and is {last[loss]:.3f} now"
        verdict["overfitting"] = f"It over-fits: the held-out {loss} {rise}."
    return verdict | {"next": f"Next: {suggest_next(verdict, epochs, run)}."}


def assess_token_predictions(metrics: dict[str, float], name: str) -> str:
    """Whether masked tokens are predicted better than by their frequencies."""
    loss, unigram_loss, accuracy = metrics[name], metrics["unigram_mlm_loss"], metrics[name.replace("loss", "accuracy")]
    comparison = "no better" if loss >= unigram_loss else "hardly better" if is_on_plateau(metrics, name) else "better"
    return (
        f"The {TOKEN_LOSSES[name]} predicts masked tokens {comparison} than token frequencies alone: held-out loss "
        f"{loss:.2f} and {unigram_loss:.2f}; its first choice is right for {accuracy:.0%}."
    )


def assess_discriminator(metrics: dict[str, float]) -> str:
    """How well replaced tokens are told from original ones, beside guessing."""
    random_auc = metrics["unigram_rtd_auc"]  # samples of a poor generator are easier: their frequencies differ
    own = f" ({metrics['rtd_auc']:.0%} for samples of its generator)" if "rtd_auc" in metrics else ""
    share = f"{random_auc:.0%} of the time{own}; guessing has 50%"
    nothing = ": it has learnt next to nothing" if random_auc < GUESSING_AUC else ""
    return f"The discriminator ranks a random token above an original one {share}{nothing}."


def suggest_next(verdict: dict[str, str], epochs: float, run: str) -> str:
    """What to do after a run."""
    if "overfitting" in verdict:
        return "more text, fewer steps, a smaller --size or --dropout 0.1"
    if "plateau" in verdict or "nothing" in verdict.get("discriminator", ""):
        advice = "more text" if epochs > MANY_EPOCHS else "train longer (--resume with a larger budget)"
        return f"{advice}, or a smaller model or vocabulary"
    return f"electra finetune --model {run} --train FILE --output FOLDER"
