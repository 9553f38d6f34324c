"""Held-out rows to evaluate on, and samples.md."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from electra.data.loader import Batch, merge_batches, validation_batches
from electra.data.packing import LoaderConfig
from electra.data.shards import Shards
from electra.data.tokenizer import TextTokenizer
from electra.formatting import markdown_table
from electra.model.electra import Discriminator, Electra, MaskedLanguageModel
from electra.objectives.evaluation import SEED, MaskedAndCorrupted, mask_and_corrupt
from electra.objectives.objectives import ObjectiveContext
from electra.pretraining.config import PretrainConfig
from electra.runfolder import write_file

MAX_SENTENCES, MAX_TOKENS = 4, 40
SAMPLES = "samples.md"
MERGED_ON_GPU = 4  # batches of held-out rows: evaluating them one by one is bound by kernel launches
HELD_OUT_LENGTH = 128  # tokens of held-out rows, if the model is trained on rows of that length


def held_out_batches(config: PretrainConfig, shards: Shards, device: torch.device) -> list[Batch]:
    """`config.evaluation_rows` rows, evenly spread over the validation split; on a GPU in larger batches."""
    loader = held_out_loader_config(config)
    batches = list(
        validation_batches(
            shards,
            loader,
            max_batches=max_held_out_rows(config) // loader.batch_size,
            whole_word_masking=config.masking.whole_word_masking,
            device=device,
        )
    )
    if device.type == "cpu":
        return batches
    return [merge_batches(batches[start : start + MERGED_ON_GPU]) for start in range(0, len(batches), MERGED_ON_GPU)]


def held_out_loader_config(config: PretrainConfig) -> LoaderConfig:
    """How held-out rows are packed: like the training rows, at most 128 tokens.

    A discriminator that was trained long on rows of one kind may fail on the others."""
    return LoaderConfig(
        length=min(HELD_OUT_LENGTH, config.loader.length),
        batch_size=min(32, config.evaluation_rows),
        packing=config.loader.packing,
        cross_document_attention=config.loader.cross_document_attention,
    )


def max_held_out_rows(config: PretrainConfig) -> int:
    """The number of rows to evaluate on if there are enough: `config.evaluation_rows` rounded up to whole batches."""
    rows = held_out_loader_config(config).batch_size
    return -(-config.evaluation_rows // rows) * rows


@torch.no_grad()
def write_samples_page(
    run: Path, electra: Electra, batch: Batch, tokenizer: TextTokenizer, frequencies: Tensor | None
) -> None:
    """Write samples.md: of each sentence the corrupted text and a table of originals, samples and predictions.

    Samples are the generator's, or drawn from `frequencies` [V]."""
    context = ObjectiveContext(vocabulary=tokenizer.vocabulary, seed=SEED, frequencies=frequencies)
    samples = mask_and_corrupt(electra, batch, context)
    title, predictions = discriminator_predictions(electra, samples, batch, tokenizer)
    lines = ["# Held-out sentences", ""]
    for row in range(min(MAX_SENTENCES, batch.num_rows)):
        original = decode_first_tokens(batch.input_ids[row], tokenizer)
        corrupted = decode_first_tokens(samples.corrupted.input_ids[row], tokenizer)
        masked_tokens = shown_masked_positions(samples, row)
        lines += format_sample(original, corrupted, masked_tokens, title, predictions[row])
    write_file(run / SAMPLES, "\n".join(lines) + "\n")


def shown_masked_positions(samples: MaskedAndCorrupted, row: int) -> list[int]:
    """The masked positions of a row among its first MAX_TOKENS tokens."""
    positions = samples.masked.positions[row][samples.masked.weights[row] > 0]
    return positions[positions < MAX_TOKENS].sort().values.tolist()


def decode_first_tokens(input_ids: Tensor, tokenizer: TextTokenizer) -> list[str]:
    """The first MAX_TOKENS tokens of a row [L]."""
    return [tokenizer.library.id_to_token(token) or "?" for token in input_ids[:MAX_TOKENS].tolist()]


def discriminator_predictions(
    electra: Electra, samples: MaskedAndCorrupted, batch: Batch, tokenizer: TextTokenizer
) -> tuple[str, list[dict[int, str]]]:
    """The title of the predictions' column and, of each row, the predictions by position; empty without a model."""
    if isinstance(electra.discriminator, Discriminator):
        return "probability of being replaced", rtd_predictions(electra.discriminator, samples, batch)
    if isinstance(electra.discriminator, MaskedLanguageModel):
        return "predicted original", mlm_predictions(electra.discriminator, samples, batch, tokenizer)
    return "", [{}] * MAX_SENTENCES


def rtd_predictions(discriminator: Discriminator, samples: MaskedAndCorrupted, batch: Batch) -> list[dict[int, str]]:
    """Probabilities of being replaced, at masked positions and wherever they exceed 0.5."""
    probabilities = discriminator(samples.corrupted.input_ids, **batch.encoder_inputs()).float().sigmoid()  # [B, L]
    predictions = []
    for row, values in enumerate(probabilities[:MAX_SENTENCES, :MAX_TOKENS].tolist()):
        masked = shown_masked_positions(samples, row)
        predictions.append({at: f"{value:.2f}" for at, value in enumerate(values) if at in masked or value > 0.5})
    return predictions


def mlm_predictions(
    model: MaskedLanguageModel, samples: MaskedAndCorrupted, batch: Batch, tokenizer: TextTokenizer
) -> list[dict[int, str]]:
    """The most likely original tokens at masked positions."""
    input_ids, positions = samples.corrupted.input_ids, samples.masked.positions
    predictions = model(input_ids, **batch.encoder_inputs(), positions=positions)
    restored = model.log_probabilities(predictions, input_ids.gather(1, positions)).argmax(2)  # [B, M]
    rows = [decode_first_tokens(row, tokenizer) for row in input_ids.scatter(1, positions, restored)[:MAX_SENTENCES]]
    return [{at: tokens[at] for at in shown_masked_positions(samples, row)} for row, tokens in enumerate(rows)]


def format_sample(
    original: list[str],
    corrupted: list[str],
    masked_positions: list[int],
    prediction_title: str,
    predictions: dict[int, str],
) -> list[str]:
    """The lines of one sentence: corrupted text with samples in bold, and a table of samples and predictions."""
    text = [f"**{token}**" if at in masked_positions else token for at, token in enumerate(corrupted)]
    rows = [["position", "original", "sample", *([prediction_title] if prediction_title else [])]]
    for at in sorted({*masked_positions, *predictions}):
        cells = [str(at), original[at], corrupted[at] if at in masked_positions else ""]
        rows.append([*cells, *([predictions[at]] if prediction_title else [])])
    return ["> " + " ".join(text), "", markdown_table(rows), ""]
