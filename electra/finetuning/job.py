"""One fine-tuning: a pre-trained encoder, a task and a seed become a model and its measures."""

import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from electra.errors import ConfigError
from electra.finetuning.features import BatchIndices, Features, cached_features, compute_logits, epoch_batches
from electra.finetuning.metrics import METRICS, confusion_matrix, nan_as_lowest
from electra.finetuning.model import OUTPUT_TYPES, build_task_model, load_pretrained, save_finetuned
from electra.finetuning.tasks import HUB, Task, read_examples
from electra.kernels.master_weights import MasterWeights
from electra.model.config import EncoderConfig, Pooling, check_length
from electra.model.storage import load_model_tokenizer, write_tensors
from electra.objectives.losses import Counts, Loss, Losses
from electra.plotting import MetricPanels, plot_confusion, plot_metrics
from electra.pretraining.phases import longest_row
from electra.runfolder import (
    CHECKPOINTS,
    checkpoint_folders,
    lock_folder,
    read_json,
    remove_partial,
    write_folder,
    write_json,
)
from electra.training.config import Budget, Device, OptimizerConfig, Precision, TrainerConfig
from electra.training.hardware import choose_device, choose_precision
from electra.training.logging import METRICS as METRICS_FILE
from electra.training.logging import read_metrics
from electra.training.trainer import Trainer

RESULT = "result.json"
LOGITS = "logits.safetensors"
MODEL = "model"
MEASURED_ROWS = 128
"""Rows that are measured at once."""
ONE_TOGETHER = "an ensemble of one is the model itself"
OFTEN_SAVED = 2000
"""Steps between checkpoints: small tasks are over before."""


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """How an encoder is fine-tuned. What is left out is as in the paper, for the encoder's size and the task."""

    model: Path
    """What is fine-tuned: a run, a model folder, a Hugging Face folder (ELECTRA, BERT, ModernBERT), or, to go on from
    another task, a fine-tuned model or the --output of electra finetune, which stands for its best seed."""
    output: Path
    """The folder for models, measures and plots. The same command again goes on; what is finished is not run again."""
    epochs: int | None = None
    """How often the training rows are seen; 3, for rte and stsb 10."""
    batch: int = 32
    """Rows in a step."""
    micro_batches: int = 1
    """Take each step's rows in so many pieces, to fit memory; the result is the same."""
    learning_rate: float | None = None
    """The highest; 3e-4 for encoders up to 384 wide (small), 1e-4 below 1024 (base), 5e-5 from there on (large)."""
    layer_decay: float | None = None
    """Each layer's learning rate, as a share of that of the layer above; 0.8, and 0.9 with 24 layers and more."""
    warmup: float = 0.1
    """Over which share of the steps (from 1 on: how many steps) the learning rate rises; then it falls to 0."""
    weight_decay: float | None = None
    """0, as the paper has it; with --faithful 0.01, as the released code."""
    dropout: float | None = None
    """Of the encoder and before the head; as in pre-training unless given: a model that never met dropout falls apart
    under it."""
    pooling: Pooling | None = None
    """What the head of a modern encoder reads: the first token's state (cls) or the mean of all. Unless given, what
    the model's head was made for: cls, or what its folder says (classifier_pooling in Hugging Face's)."""
    length: int = 128
    """Longer texts are cut, the longer of a pair first; how many is reported."""
    seeds: int = 1
    """How many times it is done, from seed 1 on: compare medians, never single runs."""
    ensemble: bool = False
    """Also measure all seeds together: the mean of what they say."""
    faithful: bool = False
    """As the released code did it: Adam without bias correction, the decay already running during the warm-up, weight
    decay, and one layer too many in the layer-wise decay."""
    workers: int | None = None
    """Seeds and tasks that are run side by side, each in a process of its own. Unless given: 1 on a CPU; on a GPU 2, or
    up to 8 where NVIDIA's MPS lets them use it at the same time, which is started for them."""
    device: Device = "auto"
    """auto: the GPU where there is one."""
    precision: Precision = "auto"
    """auto: bf16 on a GPU, fp32 on the CPU."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "micro_batches", "seeds", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.batch % self.micro_batches:
            raise ConfigError(f"{self.batch} rows do not divide into {self.micro_batches} micro-batches")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ConfigError(f"layer_decay is {self.layer_decay}; it must be above 0 and at most 1")
        if self.length < 8:
            raise ConfigError(f"length is {self.length}; it must be at least 8")
        if self.ensemble and self.seeds == 1:
            raise ConfigError(f"{ONE_TOGETHER}; give --seeds 2 or more, or leave --ensemble out")

    def optimizer(self, encoder: EncoderConfig) -> OptimizerConfig:
        """The optimizer and its schedule."""
        usual = 5e-5 if encoder.width >= 1024 else 1e-4 if encoder.width > 384 else 3e-4
        decay = self.weight_decay if self.weight_decay is not None else 0.01 if self.faithful else 0.0
        return OptimizerConfig(
            name="adam" if self.faithful else "adamw",
            schedule="released" if self.faithful else "linear",
            learning_rate=usual if self.learning_rate is None else self.learning_rate,
            warmup=self.warmup,
            weight_decay=decay,
        )

    def trainer(self, steps_an_epoch: int) -> TrainerConfig:
        """The intervals of logging, evaluation and checkpoints."""
        return TrainerConfig(
            micro_batches=self.micro_batches,
            log_every=max(1, min(50, steps_an_epoch // 4)),
            evaluate_every=steps_an_epoch,
            save_every=OFTEN_SAVED,
            keep_checkpoints=1,
        )

    def epochs_for(self, task: Task) -> int:
        """How often the training rows of a task are seen."""
        return task.epochs if self.epochs is None else self.epochs

    def decay_for(self, encoder: EncoderConfig) -> float:
        """A layer's learning rate as a share of that of the layer above."""
        return self.layer_decay if self.layer_decay is not None else 0.9 if encoder.layers >= 24 else 0.8

    def common(self) -> dict[str, Any]:
        """What this configuration has of the settings that decide a fine-tuning's outcome."""
        free = {"output", "seeds", "ensemble", "workers", "device", "json", "micro_batches"}
        names = [field.name for field in fields(TuningConfig) if field.name not in free]
        return {name: str(value) if isinstance(value := getattr(self, name), Path) else value for name in names}


Measures = dict[str, float]


@dataclass(frozen=True)
class Score:
    """How one seed of a task ended."""

    task: str
    seed: int
    measures: dict[str, Measures]  # by split
    steps: int
    seconds: float
    rows: dict[str, int]  # by split
    truncated: dict[str, int]

    @property
    def headline(self) -> float:
        """The task's first metric on its first dev split, to compare seeds by."""
        return nan_as_lowest(next(iter(self.measures["dev"].values())))


def read_score(path: Path) -> Score:
    """A score from its file, where null stands for NaN."""
    table = read_json(path)
    measures = {
        split: {name: math.nan if value is None else value for name, value in found.items()}
        for split, found in table.pop("measures").items()
    }
    return Score(measures=measures, **table)


class FinetuningTask:
    """What the trainer is given: the model, the batches of a task, its loss, its measures."""

    def __init__(self, config: TuningConfig, task: Task, seed: int, cache: Path) -> None:
        self.config, self.task, self.seed = config, task, seed
        self.device = choose_device(config.device)
        self.precision = choose_precision(config.precision, self.device)
        start = load_pretrained(config.model, config.dropout)
        encoder, self.folder = start.encoder.config, start.folder
        check_length(config.length, encoder)
        self.tokenizer, self.cache = load_model_tokenizer(self.folder, encoder.vocab_size), cache
        self.model = build_task_model(start, task.num_labels, config.pooling, seed=seed).to(self.device)
        self.working = MasterWeights(self.model, self.precision)
        self.reading, self.pad_id = OUTPUT_TYPES[task.kind], encoder.pad_id
        self.splits = {split: self.features(split) for split in available(task)}
        self.train = self.splits["train"]
        self.step = 0
        self.plan: Iterator[BatchIndices] = iter(())

    def outline(self) -> list[str]:
        """What is about to be done, in words."""
        config, encoder = self.config, self.model.encoder.config
        read = "the first token" if self.model.pooling == "cls" else "the mean of all tokens"
        rate, decay = config.optimizer(encoder).learning_rate, config.decay_for(encoder)
        seen, untrained = longest_row(self.folder), []
        if seen is not None and seen < config.length and not encoder.is_modern():
            untrained = [
                f"pre-trained on rows of {seen} tokens: later positions start untrained, unless --length {seen}"
            ]
        return [
            f"{encoder.style} encoder, {encoder.layers} layers, {encoder.width} wide; its head reads {read}",
            f"{config.epochs_for(self.task)} times {len(self.train):,} rows, {config.batch} a step, of up to "
            f"{config.length} tokens; learning rate {rate:g}, each layer {decay:g} of the one above",
            *untrained,
        ]

    def features(self, split: str) -> Features:
        """A split's rows as token ids on the device."""
        examples = read_examples(self.task, split)
        if split == "train" and self.task.double_unordered:
            examples = examples.with_swapped_pairs()
        made = cached_features(self.task, examples, self.tokenizer, self.config.length, self.cache)
        return made.to(self.device)

    def steps_an_epoch(self) -> int:
        """BatchLoader of the training rows, the last one perhaps filled up."""
        return -(-len(self.train) // self.config.batch)

    def next_batch(self) -> BatchIndices:
        number, place = divmod(self.step, self.steps_an_epoch())
        if place == 0:
            self.plan = self.batches(number)
        self.step += 1
        return next(self.plan)

    def batches(self, number: int) -> Iterator[BatchIndices]:
        """The batches of one epoch."""
        lengths = self.train.lengths.cpu().numpy()
        for batch in epoch_batches(lengths, self.config.batch, self.config.length, self.seed, number):
            yield batch.to(self.device)

    def losses(self, batch: BatchIndices) -> Losses:
        self.working.sync()
        logits = self.logits(self.working.model, self.train, batch)
        losses = self.reading.loss(logits.float(), self.train.labels[batch.rows])  # [B]
        return {"loss": Loss((losses * batch.weights).sum(), batch.weights.sum())}

    def logits(self, model: nn.Module, features: Features, batch: BatchIndices) -> torch.Tensor:
        """What a model says of a batch."""
        with self.working.autocast():
            return model(*features.collate(batch, self.pad_id))

    def backward(self, loss: torch.Tensor) -> None:
        self.working.backward(loss)

    def counts(self, batch: BatchIndices) -> Counts:
        return {"loss": batch.weights.sum()}

    def lr_scale(self, name: str) -> float:
        """Layers below learn more slowly: the head at the full rate, each layer at a share of the one above."""
        encoder = self.model.encoder.config
        if name.startswith("head"):
            return 1.0
        below = encoder.layers - int(name.split(".")[2]) if ".layers." in name else encoder.layers + 1
        below = 1 if ".final_norm." in name else below  # as the top layer
        return self.config.decay_for(encoder) ** (below + self.config.faithful)

    def evaluate(self) -> dict[str, float]:
        """The loss and the metrics on the dev rows."""
        features = self.splits["dev"]
        logits = self.all_logits(features)
        losses = self.reading.loss(torch.from_numpy(logits), features.labels.cpu())
        return {"loss": losses.mean().item()} | measure(self.task, logits, features)

    def all_logits(self, features: Features) -> NDArray:
        """What the model says of every row [N, outputs]."""
        self.model.eval()
        with self.working.autocast():
            logits = compute_logits(self.model, features, MEASURED_ROWS, self.config.length, self.pad_id)
        self.model.train()
        return logits

    def throughput(self, tokens_per_second: float) -> dict[str, float]:
        return {}

    def write_model(self, folder: Path) -> None:
        save_finetuned(self.model, self.task, self.config.length, folder, self.folder)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand at the same batch of the same epoch."""
        self.step = state["step"]
        number, place = divmod(self.step, self.steps_an_epoch())
        self.plan = self.batches(number)
        for _ in range(place):
            next(self.plan)


def available(task: Task) -> list[str]:
    """The splits that are there; training and dev rows have to be."""
    needed = ("train", "dev")
    return [name for name, file in task.splits.items() if name in needed or file.startswith(HUB) or Path(file).exists()]


def measure(task: Task, logits: NDArray, features: Features) -> Measures:
    """The task's metrics."""
    labels = features.labels.cpu().numpy()
    truth = labels if task.labels else task.denormalize_scores(labels)
    predicted = OUTPUT_TYPES[task.kind].predict(logits, task)
    return {name: METRICS[name](predicted, truth) for name in task.metrics}


def fine_tune(config: TuningConfig, task: Task, seed: int, folder: Path, is_quiet: bool = False) -> Score:
    """Fine-tune once, or read what an earlier run left; a signal ends the program, and the same command goes on."""
    if not (folder / RESULT).exists():
        with lock_folder(folder):
            learn(config, task, seed, folder, is_quiet)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return read_score(folder / RESULT)


def learn(config: TuningConfig, task: Task, seed: int, folder: Path, is_quiet: bool) -> None:
    """Train from the last checkpoint on, or from the start, and write the result."""
    lesson = FinetuningTask(config, task, seed, cache=folder.parent / "tokens")
    optimizer, settings = config.optimizer(lesson.model.encoder.config), config.trainer(lesson.steps_an_epoch())
    budget = Budget(steps=config.epochs_for(task) * lesson.steps_an_epoch())
    trainer = Trainer(
        lesson,
        optimizer,
        settings,
        budget,
        folder,
        seed=seed,
        cuda_graphs=lesson.device.type == "cuda",
        quiet=is_quiet,
    )
    remove_partial(folder)
    if not is_quiet:
        print(*lesson.outline(), sep="\n", file=sys.stderr, flush=True)
    if found := checkpoint_folders(folder):
        trainer.resume(found[-1])
    outcome = trainer.train()
    if outcome.signal:
        if not is_quiet:
            print(f"stopped, and saved in {folder}; the same command goes on from there", file=sys.stderr)
        sys.exit(outcome.exit_code)
    finish(lesson, folder, outcome.step, outcome.seconds)


def finish(lesson: FinetuningTask, folder: Path, steps: int, seconds: float) -> None:
    """Write the model, what it says of each split, plots, and last the measures, a sign that all is there."""
    task, splits = lesson.task, lesson.splits
    logits = {split: lesson.all_logits(features) for split, features in splits.items() if split != "train"}
    write_tensors(folder / LOGITS, {split: torch.from_numpy(found) for split, found in logits.items()})
    shutil.rmtree(folder / MODEL, ignore_errors=True)  # of a run that was killed just here
    with write_folder(folder / MODEL) as draft:
        lesson.write_model(draft)
    plot_metrics(folder, read_metrics(folder / METRICS_FILE), panels(task))
    if task.kind == "classification":
        dev = splits["dev"].labels.cpu().numpy()
        predicted = OUTPUT_TYPES[task.kind].predict(logits["dev"], task)
        plot_confusion(folder / "confusion.png", confusion_matrix(predicted, dev, len(task.labels)), task.labels)
    score = Score(
        task=task.name,
        seed=lesson.seed,
        measures={
            split: measure(task, found, splits[split]) for split, found in logits.items() if len(splits[split].labels)
        },
        steps=steps,
        seconds=seconds,
        rows={split: len(features) for split, features in splits.items()},
        truncated={split: int(features.truncated) for split, features in splits.items()},
    )
    write_json(folder / RESULT, asdict(score))


def panels(task: Task) -> MetricPanels:
    """The panels of curves.png."""
    return {
        "loss": [("train", "loss"), ("validation", "loss")],
        "dev metrics": [("validation", name) for name in task.metrics],
        "learning rate": [("train", "learning_rate")],
    }
