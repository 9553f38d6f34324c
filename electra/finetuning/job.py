"""One fine-tuning run: a pre-trained encoder, a task and a seed give a model and its metrics."""

import gc
import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from electra.finetuning.config import TuningConfig
from electra.finetuning.features import Features, Outputs, RowBatch, compute_logits, epoch_batches, write_logits
from electra.finetuning.kinds import KINDS, load_features, make_class_weights, read_examples
from electra.finetuning.metrics import ERRORS, Metrics, confusion_matrix, format_mistakes, nan_as_lowest, none_to_nan
from electra.finetuning.storage import build_task_model, load_pretrained, restore_weights, save_finetuned_model
from electra.finetuning.tasks import HUB, Examples, Task
from electra.formatting import format_count
from electra.kernels import dispatch
from electra.kernels.master_weights import MasterWeights
from electra.objectives.losses import Counts, Loss, Losses
from electra.plotting import MetricPanels, plot_confusion_matrix, plot_metric_curves
from electra.runfolder import (
    CHECKPOINTS,
    RESULT,
    checkpoint_folders,
    convert_stored,
    create_folder_atomically,
    make_folder_removed_if_empty,
    read_json,
    read_stored,
    remove_written_folder,
    write_checksums,
    write_file,
    write_stored,
)
from electra.training.config import Budget, HardwareConfig, TrackerName
from electra.training.hardware import choose_device, choose_dtype
from electra.training.logging import METRICS_FILE, check_not_diverged, check_tracker, read_metrics
from electra.training.trainer import Trainer

BEST, BEST_EPOCH = "best-epoch-", "best_epoch.json"  # folder of a model, and its metric
MODEL = "model"
MISTAKES = "errors.md"
EVALUATION_BATCH_SIZE = 128
CRF_LR_SCALE = 100.0  # a few scores that start at 0 must become as large as logits


@dataclass(frozen=True)
class JobResult:
    """Metrics of a finished job, stored as result.json."""

    task: str
    seed: int
    metrics: dict[str, Metrics]  # by split
    steps: int
    seconds: float
    rows: dict[str, int]  # by split
    truncated: dict[str, int]  # number of truncated rows, by split
    baseline: Metrics = field(default_factory=dict)  # of predictions without a text: `Kind.baseline`
    classes: dict[str, Metrics] = field(default_factory=dict)  # scores of each class of a multi-label task or of tags
    best_epoch: int = 0  # whose model was kept, with --best-epoch or --early-stopping; 0: the last

    def __post_init__(self) -> None:
        if not self.metrics.get("dev") or self.rows.get("dev", 0) < 1:
            raise ValueError("no dev rows, or no metrics of them")

    @property
    def main_metric(self) -> float:
        """The task's first metric on the dev split, to compare seeds by."""
        return nan_as_lowest(next(iter(self.metrics["dev"].values())))


@dataclass(frozen=True)
class BestEpoch:
    """The epoch, from 1, with the best main metric on the dev rows so far."""

    epoch: int
    metric: float


def read_job_result(path: Path) -> JobResult:
    return convert_stored(none_to_nan(read_json(path)), JobResult, path)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One fine-tuning run: a task and a seed."""

    model: Path
    task: Task
    tuning: TuningConfig
    hardware: HardwareConfig
    seed: int
    folder: Path
    track: TrackerName = "none"

    def __post_init__(self) -> None:
        check_tracker(self.track)

    def is_finished(self) -> bool:
        return (self.folder / RESULT).exists()

    @property
    def length(self) -> int:
        """Maximum length in tokens."""
        return self.tuning.length_for(self.task)

    def describe_settings(self) -> dict[str, Any]:
        """The settings that a tracker records."""
        settings = asdict(self.tuning) | {"length": self.length, "precision": self.hardware.precision}
        return {"task": self.task.name, "seed": self.seed, "model": str(self.model)} | settings

    @property
    def features_cache(self) -> Path:
        return self.folder.parent / "tokens"  # shared by all seeds

    def run(self, quiet: bool = False) -> JobResult:
        """Fine-tune, from the last checkpoint if there is one; a finished job only returns its result.

        After SIGTERM or SIGINT, saves a checkpoint and exits."""
        if not self.is_finished():
            try:
                with make_folder_removed_if_empty(self.folder):
                    train_job(self, quiet)
            finally:
                gc.collect()  # CUDA graphs are in reference cycles; destroying one during a capture is an error
        self.remove_checkpoints()
        return self.read_result()

    def read_result(self) -> JobResult:
        return read_job_result(self.folder / RESULT)

    def remove_checkpoints(self) -> None:
        """Remove what a finished job no longer needs."""
        for folder in (*checkpoint_folders(self.folder), *best_epoch_folders(self.folder)):
            remove_written_folder(folder)
        with suppress(OSError):  # missing, or not empty
            (self.folder / CHECKPOINTS).rmdir()


class FinetuningTask:
    """A job as the trainer's task: the model, and the task's batches, loss and evaluation."""

    def __init__(self, job: Job) -> None:
        self.job, self.task, self.tuning, self.kind = job, job.task, job.tuning, KINDS[job.task.kind]
        self.device = choose_device(job.hardware.device)
        dispatch.set_kernel_mode(job.hardware.kernels)
        self.pretrained = load_pretrained(job.model, self.tuning.dropout)
        self.encoder_config = self.pretrained.encoder.config
        self.encoder_config.check_length(job.length)
        self.tokenizer = self.pretrained.load_tokenizer()
        model = build_task_model(
            self.pretrained,
            self.task.num_labels,
            self.tuning.pooling,
            seed=job.seed,
            model_class=self.kind.model(self.task),
            frozen=self.tuning.frozen_config(),
        )
        model.encoder.activation_checkpointing = job.hardware.activation_checkpointing
        self.model = model.to(self.device)
        self.master_weights = MasterWeights(self.model, choose_dtype(job.hardware.precision, self.device))
        self.examples = {split: read_examples(self.task, split) for split in available_splits(self.task)}
        self.encoder_config.check_segments(1 if self.examples["train"].texts_b is None else 2)
        if self.task.double_unordered:
            self.examples["train"] = self.examples["train"].with_swapped_pairs()
        self.splits = {split: self.load_features(examples) for split, examples in self.examples.items()}
        self.train = self.splits["train"]
        train_labels, dev_labels = (self.true_labels(self.examples[split]) for split in ("train", "dev"))
        weights = make_class_weights(self.tuning.class_weights, self.task, train_labels)
        self.class_weights = None if weights is None else weights.to(self.device)
        self.baseline = self.kind.baseline(self.task, train_labels, dev_labels, self.splits["dev"])
        del self.examples["train"]  # texts that are no longer needed
        self.steps_per_epoch = -(-len(self.train) // self.tuning.batch_size)
        self.step = 0
        self.best = read_best_epoch(job.folder) if self.tuning.keeps_best_epoch else None
        self.batches: Iterator[RowBatch] = iter(())

    def load_features(self, examples: Examples) -> Features:
        """Token ids and targets of examples, on the device."""
        features = load_features(self.task, examples, self.tokenizer, self.job.length, self.job.features_cache)
        return features.to(self.device)

    def describe_run(self) -> list[str]:
        """Encoder, head, amount of training and learning rate."""
        encoder, tuning, examples, windows = self.encoder_config, self.tuning, self.train.num_examples, len(self.train)
        layers, epochs = format_count(encoder.layers, "layer"), format_count(tuning.epochs_for(self.task), "epoch")
        rows = format_count(examples, "row") + (f" ({windows:,} windows)" if windows > examples else "")
        return [
            f"{'frozen ' * tuning.frozen}{encoder.style} encoder with {layers} of width {encoder.width}; head on "
            f"{self.model.describe_head_input()}",
            f"{epochs} of {rows}, batch size {tuning.batch_size}, length {self.job.length}; learning rate "
            f"{tuning.optimizer_config(encoder).learning_rate:g}, layer decay {tuning.layer_decay_for(encoder):g}",
        ]

    def next_batch(self) -> RowBatch:
        epoch, index = divmod(self.step, self.steps_per_epoch)
        if index == 0:
            self.batches = self.device_batches(epoch)
        self.step += 1
        return next(self.batches)

    def device_batches(self, epoch: int) -> Iterator[RowBatch]:
        """The batches of one epoch, on the device."""
        lengths, counts = self.train.row_sizes()
        batches = epoch_batches(lengths, self.tuning.batch_size, self.job.length, self.job.seed, epoch, counts)
        return (batch.to(self.device) for batch in batches)

    def losses(self, batch: RowBatch) -> Losses:
        self.master_weights.update_half_precision_weights()
        targets = self.train.labels[batch.rows]
        with self.master_weights.autocast():
            logits = self.master_weights.forward_model(*self.train.collate(batch, self.encoder_config.pad_id), targets)
        weights = () if self.class_weights is None else (self.class_weights,)
        losses = self.kind.loss(logits.float(), targets, *weights)  # [B]
        return {"loss": Loss((losses * batch.weights).sum(), self.loss_counts(batch)["loss"])}

    def loss_counts(self, batch: RowBatch) -> Counts:
        return {"loss": (batch.weights * self.kind.num_terms(self.train.labels[batch.rows])).sum()}

    def lr_scale(self, parameter_name: str) -> float:
        """Layer-wise learning-rate decay: 1 for the head, a power of the decay for the layers below."""
        if parameter_name.startswith("head.crf"):
            return CRF_LR_SCALE
        if parameter_name.startswith("head") or self.tuning.frozen:
            return 1.0
        depth = self.encoder_config.layers + 1  # of the embeddings
        if ".layers." in parameter_name:
            depth = self.encoder_config.layers - int(parameter_name.split(".")[2])
        elif ".final_norm." in parameter_name:
            depth = 1  # as the top layer
        return self.tuning.layer_decay_for(self.encoder_config) ** (depth + self.tuning.faithful)

    def evaluate(self) -> Metrics:
        """Loss, without class weights, and metrics on the dev split; stores the model if it is the best so far."""
        dev = self.compute_outputs("dev")
        metrics = self.compute_metrics(self.predict_and_calibrate(dev), "dev")
        value = nan_as_lowest(next(iter(metrics.values())))
        if self.tuning.keeps_best_epoch and value > (self.best.metric if self.best else -math.inf):
            self.write_best_epoch(BestEpoch(self.step // self.steps_per_epoch, value))
        loss = dev.compute_losses(self.kind.loss).sum() / self.kind.num_terms(self.splits["dev"].labels).sum().item()
        return {"loss": loss.item()} | metrics

    def write_best_epoch(self, best: BestEpoch) -> None:
        """Store the model as the best so far, and then remove the one before."""
        folder = self.job.folder / f"{BEST}{best.epoch:06d}"
        remove_written_folder(folder)
        with create_folder_atomically(folder) as draft:
            self.write_model(draft)
            write_stored(draft / BEST_EPOCH, asdict(best))
            write_checksums(draft)
        for other in best_epoch_folders(self.job.folder):
            if other != folder:
                remove_written_folder(other)
        self.best = best

    def should_stop(self) -> bool:
        """Whether the last epochs were no better than an earlier one (--early-stopping)."""
        if self.tuning.early_stopping is None or self.best is None:
            return False
        return self.step // self.steps_per_epoch >= self.best.epoch + self.tuning.early_stopping

    def predict_and_calibrate(self, dev: Outputs) -> NDArray:
        """The predictions for the dev rows, on which the thresholds of the task are tuned, if it has any."""
        predicted = self.kind.predict(dev, self.task)
        self.task = self.kind.calibrate(predicted, self.true_labels(self.examples["dev"]), self.task)
        return predicted

    def compute_outputs(self, split: str) -> Outputs:
        """The model's logits of a split, without dropout."""
        features = self.splits[split]
        self.model.eval()
        precision = self.master_weights.dtype
        logits = compute_logits(
            self.model, features, EVALUATION_BATCH_SIZE, self.job.length, self.encoder_config.pad_id, precision
        )
        self.model.train()
        return Outputs(logits, features, self.examples[split])

    def compute_metrics(self, predicted: NDArray, split: str) -> Metrics:
        return self.kind.compute_metrics(predicted, self.true_labels(self.examples[split]), self.task)

    def true_labels(self, examples: Examples) -> NDArray:
        """Labels in the form of predictions; scores with the precision of their targets."""
        assert examples.labels is not None
        return self.kind.labels_of_targets(self.kind.targets(examples.labels, self.task), self.task)

    def describe_metrics(self, metrics: Metrics) -> str:
        baseline = next(iter(self.baseline.values()))
        name = self.kind.baseline_name.removeprefix("always predicting the ")
        compared = "" if math.isnan(baseline) else f" ({name}: {baseline:.3f})"
        values = [f"{name} {value:.3f}" for name, value in metrics.items() if name != "loss"]
        return ", ".join([values[0] + compared, *values[1:]])

    def speed_metrics(self, tokens_per_second: float) -> Metrics:
        return {}

    def gather_weights(self) -> None:
        """Nothing: the model is never sharded."""

    def write_model(self, folder: Path) -> None:
        save_finetuned_model(self.model, self.task, self.job.length, folder, self.pretrained.folder)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the same batch of the same epoch."""
        self.step = state["step"]
        epoch, index = divmod(self.step, self.steps_per_epoch)
        self.batches = islice(self.device_batches(epoch), index, None)


def best_epoch_folders(folder: Path) -> list[Path]:
    """The stored models of the best epochs of a job, the best last; there are two if it was killed between them."""
    return sorted(path for path in folder.glob(f"{BEST}*") if path.name.removeprefix(BEST).isdigit())


def read_best_epoch(folder: Path) -> BestEpoch | None:
    folders = best_epoch_folders(folder)
    return read_stored(folders[-1] / BEST_EPOCH, BestEpoch) if folders else None


def available_splits(task: Task) -> list[str]:
    """The splits that have data; train and dev are required."""
    return [
        split
        for split, source in task.splits.items()
        if split in ("train", "dev") or source.startswith(HUB) or Path(source).exists()
    ]


def build_trainer(task: FinetuningTask, quiet: bool) -> Trainer:
    """The trainer of a job."""
    job = task.job
    return Trainer(
        task,
        job.tuning.optimizer_config(task.encoder_config),
        job.tuning.trainer_config(task.steps_per_epoch, job.track),
        Budget(steps=job.tuning.epochs_for(job.task) * task.steps_per_epoch),
        job.folder,
        seed=job.seed,
        cuda_graphs=task.device.type == "cuda"
        and job.hardware.compile != "off"
        and not job.tuning.bilstm,  # cuDNN's LSTMs are not tried in graphs
        quiet=quiet,
        settings=job.describe_settings(),
    )


def train_job(job: Job, quiet: bool) -> None:
    """Train from the last checkpoint or from the start, and write the result."""
    task = FinetuningTask(job)
    trainer = build_trainer(task, quiet)
    if not quiet:
        print(*task.describe_run(), sep="\n", file=sys.stderr, flush=True)
    if checkpoints := checkpoint_folders(job.folder):
        trainer.resume(checkpoints[-1])
    result = trainer.train()
    if result.signal:
        if not quiet:
            print(f"stopped; checkpoint saved in {job.folder}; run the same command to continue", file=sys.stderr)
        sys.exit(result.exit_code)
    if task.best is not None:
        restore_weights(task.model, best_epoch_folders(job.folder)[-1])
    write_job_outputs(task, result.step, result.seconds)


def write_job_outputs(finetuning: FinetuningTask, steps: int, seconds: float) -> None:
    """Write logits, model and plots and, last, the result, which marks a job as finished."""
    splits, folder = finetuning.splits, finetuning.job.folder
    metrics = read_metrics(folder / METRICS_FILE)
    check_job_converged(finetuning, metrics)
    outputs = {split: finetuning.compute_outputs(split) for split in finetuning.examples}
    predicted = finetuning.predict_and_calibrate(outputs["dev"])
    task = finetuning.task
    write_logits(folder, {split: values.logits for split, values in outputs.items()})
    remove_written_folder(folder / MODEL)  # of a process that was killed before it wrote the result
    with create_folder_atomically(folder / MODEL) as draft:
        finetuning.write_model(draft)
        write_checksums(draft)
    plot_metric_curves(folder, metrics, curve_panels(task))
    predictions = {
        split: predicted if split == "dev" else finetuning.kind.predict(values, task)
        for split, values in outputs.items()
        if finetuning.examples[split].labels is not None
    }
    dev_labels = finetuning.true_labels(finetuning.examples["dev"])
    if finetuning.kind.class_ids is not None:
        true_classes, predicted_classes = map(finetuning.kind.class_ids, (dev_labels, predicted))
        counts = confusion_matrix(predicted_classes, true_classes, len(task.labels))
        plot_confusion_matrix(folder / "confusion.png", counts, task.labels)
    if mistakes := list(finetuning.kind.mistakes(task, outputs["dev"], predicted, dev_labels)):
        confidence = "score difference" if task.crf else "probability"
        write_file(folder / MISTAKES, format_mistakes(mistakes, task.name, confidence))
    result = JobResult(
        task=task.name,
        seed=finetuning.job.seed,
        metrics={split: finetuning.compute_metrics(values, split) for split, values in predictions.items()},
        steps=steps,
        seconds=seconds,
        rows={split: features.num_examples for split, features in splits.items()},
        truncated={split: int(features.is_truncated.sum()) for split, features in splits.items()},
        baseline=finetuning.baseline,
        classes=finetuning.kind.class_scores(predicted, dev_labels, task),
        best_epoch=finetuning.best.epoch if finetuning.best else 0,
    )
    write_stored(folder / RESULT, asdict(result))


def check_job_converged(finetuning: FinetuningTask, metrics: list[dict[str, Any]]) -> None:
    """Raise a TrainingError if the last training loss or the last evaluation shows that the training diverged."""
    last = {line["kind"]: line["loss"] for line in metrics}
    kind = finetuning.kind
    advice = f"its metrics are in {finetuning.job.folder}; remove that folder to start over"
    checks = (
        ("train", "the training loss", kind.uniform_loss(finetuning.task), kind.max_loss_ratio),
        ("validation", "the dev loss", math.inf, 1.0),
    )
    for split, name, bound, max_ratio in checks:
        if split in last:  # after a power failure the last lines may be missing
            check_not_diverged(name, last[split], bound, advice, max_ratio)


def curve_panels(task: Task) -> MetricPanels:
    """The panels of curves.png."""
    return {
        "loss": [("train", "loss"), ("validation", "loss")],
        "dev metrics": [("validation", name) for name in task.metrics if name not in ERRORS],
        "learning rate": [("train", "learning_rate")],
    }
