"""`electra analyze`: what a discriminator has learnt, in pictures: a map of its token embeddings, where it finds
replaced tokens, how well its probabilities are calibrated, whether its layers keep their input, and how many examples
fine-tuning needs."""

import math
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from electra.data.shards import Shards, open_shards
from electra.errors import ConfigError
from electra.finetuning.predict import is_finetuned
from electra.finetuning.tasks import get_glue_task
from electra.formatting import markdown_table
from electra.model.electra import Electra
from electra.model.storage import (
    WEIGHTS,
    build_model,
    has_rtd_head,
    load_model,
    load_model_tokenizer,
    read_model_config,
    read_tensor_names,
    read_tensors,
)
from electra.model.vocabulary_map import VocabularyMap, compute_map
from electra.plotting import ErrorBars, Panel, Points, plot_error_bars, plot_panels, plot_token_map
from electra.pretraining.token_counts import unigram_frequencies
from electra.runfolder import lock_folder, write_file, write_json
from electra.studies.config import AnalyzeConfig, OutputRecord
from electra.studies.detection import (
    CalibrationBin,
    DetectionBin,
    Detections,
    LayerRatios,
    batches_as_in_training,
    bins_by_frequency,
    bins_by_position,
    calibration_bins,
    detect_in_held_out_text,
    expected_calibration_error,
    residual_ratios,
)
from electra.studies.few_shot import FewShotPoint, few_shot_curve
from electra.training.checkpoint import find_model_folder
from electra.training.hardware import choose_device

ANALYSIS = "analysis.json"
NEIGHBORS_SHOWN = 12
RESIDUAL_ROWS = 64
DROPOUT = 0.1  # the usual one of fine-tuning
SUFFIXES = (".png", ".svg")


@dataclass(frozen=True)
class Analysis:
    """What a discriminator has learnt."""

    model: str
    tokens: int  # of held-out text
    replaced_fraction: float
    auc: float
    auc_with_dropout: float  # of the discriminator, with DROPOUT
    expected_calibration_error: float
    by_position: list[DetectionBin]
    by_frequency: list[DetectionBin]
    calibration: list[CalibrationBin]
    residual: list[LayerRatios]  # of the discriminator's layers
    neighbors: dict[str, list[str]]  # of some tokens, the nearest first
    few_shot: list[FewShotPoint]
    failed: dict[str, str]  # fine-tunings
    output: str
    files: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 1 if self.failed else 0

    def __str__(self) -> str:
        parts = [
            f"{self.tokens:,} held-out tokens, of which {self.replaced_fraction:.1%} replaced: AUC {self.auc:.3f} "
            f"({self.auc_with_dropout:.3f} with a dropout of {DROPOUT}), expected calibration error "
            f"{self.expected_calibration_error:.4f}",
            "By position in the row:\n\n" + markdown_table(detection_cells("positions", self.by_position)),
            "By frequency of the token:\n\n" + markdown_table(detection_cells("ranks", self.by_frequency)),
            "Calibration:\n\n" + markdown_table(calibration_cells(self.calibration)),
            "Norm of each sublayer's output divided by that of the residual that it is added to:\n\n"
            + markdown_table(residual_cells(self.residual)),
            "Nearest tokens by their embeddings:\n\n"
            + "\n".join(f"- {token}: {' '.join(others)}" for token, others in self.neighbors.items()),
        ]
        if self.few_shot:
            parts.append("Score by the number of training examples, in percent:\n\n" + few_shot_table(self.few_shot))
        parts += [f"failed: {name}: {error}" for name, error in self.failed.items()]
        written = [f"written to {self.output}: {', '.join(self.files)}"] if self.files else []
        return "\n\n".join([*parts, *written])


def analyze(config: AnalyzeConfig) -> Analysis:
    """Analyze a model on held-out text, and write numbers and figures."""
    record = OutputRecord("analyze", {"model": str(config.model.absolute())})
    record.check(config.output)
    if is_finetuned(config.model):
        raise ConfigError(
            f"{config.model} is a fine-tuned model; choose a pre-training run or a discriminator's folder"
        )
    if config.glue is not None:
        for task in config.tasks:
            get_glue_task(task, config.glue)  # raises if its files are missing
    folder, shards = find_model_folder(config.model), open_shards(config.data)
    shards.check_same_tokenizer(load_model_tokenizer(folder))
    electra = load_model(folder).float().to(choose_device(config.device)).eval()
    electra.require_discriminator()
    if not has_rtd_head(read_tensor_names(folder / WEIGHTS)):
        raise ConfigError(
            f"{folder} is an encoder without a trained replaced token detection head; choose a model that has one"
        )
    rows = min(config.rows, RESIDUAL_ROWS)
    with lock_folder(config.output):
        record.write(config.output)
        report("detecting replaced tokens in held-out text, without and with dropout")
        detections = detect_in_held_out_text(electra, shards, folder, config)
        auc_with_dropout = detect_with_dropout(shards, folder, config).auc()
        points, failed = few_shot_curve(config) if config.glue else ([], {})
        report(f"computing a map of the {config.map_tokens:,} most frequent tokens")
        vocabulary_map, tokens = map_frequent_tokens(electra, shards, config.map_tokens)
        report("computing norms of layers, and writing figures")
        analysis = Analysis(
            model=str(config.model),
            tokens=len(detections.rank),
            replaced_fraction=float(detections.is_replaced.mean()),
            auc=detections.auc(),
            auc_with_dropout=auc_with_dropout,
            expected_calibration_error=expected_calibration_error(detections),
            by_position=bins_by_position(detections),
            by_frequency=bins_by_frequency(detections),
            calibration=calibration_bins(detections),
            residual=residual_ratios(
                electra.require_discriminator().encoder, batches_as_in_training(electra, shards, folder, rows)
            ),
            neighbors=nearest_tokens(vocabulary_map, tokens),
            few_shot=points,
            failed=failed,
            output=str(config.output),
        )
        return write_analysis(analysis, vocabulary_map, tokens, config.output)


def report(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def detect_with_dropout(shards: Shards, folder: Path, config: AnalyzeConfig) -> Detections:
    """Detections of the same text by a discriminator with dropout: whether fine-tuning with dropout would work."""
    pair = read_model_config(folder)
    pair = pair.with_dropout(DROPOUT, None if pair.sharing == "all" else 0.0)
    electra = build_model(pair, read_tensors(folder / WEIGHTS), folder / WEIGHTS).float()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return detect_in_held_out_text(electra.to(choose_device(config.device)).train(), shards, folder, config)


def map_frequent_tokens(electra: Electra, shards: Shards, count: int) -> tuple[VocabularyMap, list[str]]:
    """A map of the embeddings of the most frequent tokens, and these tokens."""
    frequencies = unigram_frequencies(shards, torch.device("cpu"))
    ids = frequencies.argsort(descending=True)[: min(count, int((frequencies > 0).sum()))]
    table = electra.require_discriminator().encoder.embeddings.token_table().detach().cpu()
    tokens = [shards.tokenizer.library.id_to_token(token) or "?" for token in ids.tolist()]
    return compute_map(table[ids]), tokens


def nearest_tokens(vocabulary_map: VocabularyMap, tokens: list[str]) -> dict[str, list[str]]:
    """The nearest tokens of some whole words: those in the middle of the frequencies, where few are function words."""
    words = [index for index, token in enumerate(tokens) if token.isalpha() and len(token) > 2]
    chosen = words[:: max(1, len(words) // NEIGHBORS_SHOWN)][:NEIGHBORS_SHOWN]
    return {tokens[index]: [tokens[other] for other in vocabulary_map.neighbors[index][:6]] for index in chosen}


def detection_cells(title: str, bins: list[DetectionBin]) -> list[list[str]]:
    cells = [[title, "tokens", "replaced", "recall", "false positives", "AUC"]]
    for each in bins:
        scores = ["" if value is None else f"{value:.3f}" for value in (each.recall, each.false_positives, each.auc)]
        cells.append([f"{each.first:,}–{each.last:,}", f"{each.tokens:,}", f"{each.replaced:,}", *scores])
    return cells


def calibration_cells(bins: list[CalibrationBin]) -> list[list[str]]:
    rows = [[f"{each.probability:.3f}", f"{each.replaced:.3f}", f"{each.tokens:,}"] for each in bins]
    return [["mean probability", "fraction replaced", "tokens"], *rows]


def residual_cells(layers: list[LayerRatios]) -> list[list[str]]:
    rows = [[str(each.layer), f"{each.attention:.2f}", f"{each.feedforward:.2f}"] for each in layers]
    return [["layer", "attention", "feed-forward"], *rows]


def few_shot_table(points: list[FewShotPoint]) -> str:
    sizes = sorted({point.examples for point in points})
    cells = [["task", *(f"{size:,}" for size in sizes)]]
    for task in dict.fromkeys(point.task for point in points):
        by_size = {point.examples: point for point in points if point.task == task}
        metric = next(iter(by_size.values())).metric
        cells.append(
            [f"{task} ({metric})", *(by_size[size].score.format() if size in by_size else "" for size in sizes)]
        )
    return markdown_table(cells)


def write_analysis(analysis: Analysis, vocabulary_map: VocabularyMap, tokens: list[str], folder: Path) -> Analysis:
    """Write analysis.json, analysis.md and the figures, each as PNG and SVG."""
    files = ["analysis.md", ANALYSIS]
    for suffix in SUFFIXES:
        plots = {
            "embeddings": plot_token_map(folder / f"embeddings{suffix}", vocabulary_map.positions, tokens),
            "detection": plot_panels(folder / f"detection{suffix}", detection_panels(analysis), 2, 4.5),
            "calibration": plot_panels(folder / f"calibration{suffix}", calibration_panels(analysis), 2, 4.5),
            "few-shot": bool(analysis.few_shot) and plot_few_shot(folder / f"few-shot{suffix}", analysis),
        }
        files += [f"{name}{suffix}" for name, is_written in plots.items() if is_written]
    analysis = replace(analysis, files=files)
    images = [f"![]({file})" for file in files if file.endswith(".png")]
    page = "\n\n".join([f"# {analysis.model}", str(replace(analysis, files=[])), *images])
    write_file(folder / "analysis.md", page + "\n")
    write_json(folder / ANALYSIS, asdict(analysis))
    return analysis


def detection_panels(analysis: Analysis) -> list[Panel]:
    positions = [((each.first + each.last) / 2, each) for each in analysis.by_position]
    ranks = [(math.log10(math.sqrt(each.first * each.last)), each) for each in analysis.by_frequency]
    return [
        Panel(detection_lines(positions), "position in the row", title="replaced tokens by position"),
        Panel(detection_lines(ranks), "log10 of the rank of the token by frequency", title="… by token frequency"),
    ]


def detection_lines(points: list[tuple[float, DetectionBin]]) -> dict[str, Points]:
    """The lines of a panel, from bins and their places on the axis."""
    names = {"recall": "recall", "false_positives": "false positives", "auc": "AUC"}
    return {
        label: [(x, value) for x, each in points if (value := getattr(each, name)) is not None]
        for name, label in names.items()
    }


def calibration_panels(analysis: Analysis) -> list[Panel]:
    bins = analysis.calibration
    reliability = {"discriminator": [(each.probability, each.replaced) for each in bins]}
    counts = {"tokens": [(each.probability, math.log10(each.tokens)) for each in bins]}
    title = f"expected calibration error {analysis.expected_calibration_error:.4f}"
    return [
        Panel(reliability | {"perfect": [(0.0, 0.0), (1.0, 1.0)]}, "mean probability", "fraction replaced", title),
        Panel(counts, "mean probability", "log10 of the number of tokens"),
    ]


def plot_few_shot(path: Path, analysis: Analysis) -> bool:
    panel = ErrorBars(title="", ylabel="score, %", xlabel="training examples", is_log=True)
    for point in analysis.few_shot:
        error = 100 * (point.score.error or 0.0)
        panel.add(f"{point.task} ({point.metric})", "", point.examples, 100 * point.score.mean, error)
    return plot_error_bars(path, [panel], "Score by the number of training examples")
