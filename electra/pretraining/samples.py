"""A page to look at: held-out sentences with their fills, and what the discriminator, or the masked language model in its place, predicts."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from electra.data.loader import Batch
from electra.data.tokenizer import TextTokenizer
from electra.model.electra import Discriminator, Electra, MaskedLanguageModel
from electra.objectives.evaluation import SEED, Fills
from electra.objectives.masking import mask
from electra.objectives.objectives import Settings, corrupt, fill

SENTENCES, TOKENS = 4, 40
SAMPLES = "samples.md"


@dataclass(frozen=True)
class Column:
    """What is said of fills, and of other tokens that are doubted."""

    title: str
    cells: list[dict[int, str]]  # of each row, by the token's place


@torch.no_grad()
def write_samples(
    run: Path, electra: Electra, batch: Batch, tokenizer: TextTokenizer, frequencies: Tensor | None
) -> None:
    """Write samples.md: of each sentence a line of text, then a table of its masked words, fills and what is said.

    Fills are the generator's, or drawn by `frequencies` [V]."""
    settings = Settings(vocabulary=tokenizer.vocabulary, seed=SEED, frequencies=frequencies)
    masked = mask(batch, settings.vocabulary, settings, settings.seed)
    fills = Fills(masked, corrupt(batch.input_ids, masked, fill(electra, masked, batch, settings).sampled))
    column = opinions(electra, fills, batch, tokenizer)
    lines = ["# Held-out sentences", ""]
    for row in range(min(SENTENCES, batch.num_rows)):
        original, shown = (words(text[row], tokenizer) for text in (batch.input_ids, fills.corrupted.input_ids))
        lines += sentence(original, shown, places(fills, row), column, row)
    (run / SAMPLES).write_text("\n".join(lines) + "\n", encoding="utf-8")


def places(fills: Fills, row: int) -> list[int]:
    """Where fills stand in a row, as far as it is shown."""
    used = fills.masked.positions[row][fills.masked.weights[row] > 0]
    return used[used < TOKENS].sort().values.tolist()


def words(text: Tensor, tokenizer: TextTokenizer) -> list[str]:
    """The tokens of a row [L], as far as it is shown."""
    return [tokenizer.library.id_to_token(number) or "?" for number in text[:TOKENS].tolist()]


def opinions(electra: Electra, fills: Fills, batch: Batch, tokenizer: TextTokenizer) -> Column | None:
    """What the discriminator says, or the masked language model in its place; None where there is neither."""
    if isinstance(electra.discriminator, Discriminator):
        return verdicts(electra.discriminator, fills, batch)
    if isinstance(electra.discriminator, MaskedLanguageModel):
        return corrections(electra.discriminator, fills, batch, tokenizer)
    return None


def verdicts(discriminator: Discriminator, fills: Fills, batch: Batch) -> Column:
    """How surely fills are replaced, and all other tokens that are held to be."""
    found = discriminator(fills.corrupted.input_ids, **batch.encoder_inputs()).float().sigmoid()[:SENTENCES, :TOKENS]
    cells = []
    for row, numbers in enumerate(found.tolist()):
        at = places(fills, row)
        cells.append({place: f"{sure:.2f}" for place, sure in enumerate(numbers) if place in at or sure > 0.5})
    return Column("replaced, says the discriminator", cells)


def corrections(model: MaskedLanguageModel, fills: Fills, batch: Batch, tokenizer: TextTokenizer) -> Column:
    """What most likely stood where fills stand."""
    read, positions = fills.corrupted.input_ids, fills.masked.positions
    hidden = model.read(read, **batch.encoder_inputs(), at=positions)  # [B, M, D]
    guesses = model.log_probabilities(hidden, read.gather(1, positions)).argmax(2)  # [B, M]
    said = read.scatter(1, positions, guesses)[:SENTENCES]
    cells = []
    for row, text in enumerate(said):
        told = words(text, tokenizer)
        cells.append({place: told[place] for place in places(fills, row)})
    return Column("predicted original", cells)


def sentence(original: list[str], shown: list[str], filled: list[int], column: Column | None, row: int) -> list[str]:
    """The lines of one sentence: fills are bold, and the table has them and each other token that is doubted."""
    told = [f"**{word}**" if place in filled else word for place, word in enumerate(shown)]
    titles = ["token", "original", "fill", *([column.title] if column else [])]
    lines = ["> " + " ".join(told), "", table_line(titles), "|" + "---|" * len(titles)]
    said = column.cells[row] if column else {}
    for place in sorted({*filled, *said}):
        cells = [str(place), original[place], shown[place] if place in filled else ""]
        lines.append(table_line([*cells, said[place]] if column else cells))
    return [*lines, ""]


def table_line(cells: list[str]) -> str:
    """A line of a table, of tokens and numbers."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
