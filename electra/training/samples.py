"""A page to look at: held-out sentences with the generator's fills and the discriminator's verdicts."""

from pathlib import Path

import torch

from electra.model.electra import Discriminator, Electra
from electra.objective.masking import mask
from electra.objective.measures import SEED
from electra.objective.objectives import Settings, corrupt, sample
from electra.text.batches import Batch
from electra.text.tokenizer import TextTokenizer

SENTENCES, TOKENS = 4, 40
SAMPLES = "samples.md"


@torch.no_grad()
def write_samples(run: Path, electra: Electra, batch: Batch, tokenizer: TextTokenizer) -> None:
    """Write samples.md: of each sentence a line of text, then its masked words, fills and verdicts as a table."""
    if electra.generator is None:
        return
    settings = Settings(vocabulary=tokenizer.vocabulary, seed=SEED)
    masked = mask(batch, settings.vocabulary, settings, settings.seed)
    guesses = electra.generator(masked.input_ids, *batch.surroundings(), at=masked.positions)
    corrupted = corrupt(batch.input_ids, masked, sample(guesses, masked, batch, settings))
    verdicts = torch.zeros_like(corrupted.is_replaced, dtype=torch.float)
    if isinstance(electra.discriminator, Discriminator):
        verdicts = electra.discriminator(corrupted.input_ids, *batch.surroundings()).float().sigmoid()
    lines = ["# Held-out sentences", ""]
    for row in range(min(SENTENCES, batch.size())):
        used = masked.positions[row][masked.weights[row] > 0].tolist()
        lines += sentence(batch.input_ids[row], corrupted.input_ids[row], verdicts[row], used, tokenizer)
    (run / SAMPLES).write_text("\n".join(lines) + "\n", encoding="utf-8")


def sentence(
    original: torch.Tensor, shown: torch.Tensor, verdicts: torch.Tensor, masked: list[int], tokenizer: TextTokenizer
) -> list[str]:
    """The lines of one sentence: fills are bold, and each token the discriminator doubts has its verdict."""
    words = [tokenizer.library.id_to_token(number) or "?" for number in shown[:TOKENS].tolist()]
    told = [f"**{word}**" if place in masked else word for place, word in enumerate(words)]
    rows = [
        "> " + " ".join(told),
        "",
        "| token | original | fill | replaced, says the discriminator |",
        "|---|---|---|---|",
    ]
    doubted = [place for place in range(len(words)) if place in masked or verdicts[place] > 0.5]
    for place in doubted:
        before = tokenizer.library.id_to_token(int(original[place])) or "?"
        fill = words[place] if place in masked else ""
        rows.append(f"| {place} | {cell(before)} | {cell(fill)} | {verdicts[place]:.2f} |")
    return [*rows, ""]


def cell(token: str) -> str:
    """A token inside a table."""
    return token.replace("|", "\\|")
