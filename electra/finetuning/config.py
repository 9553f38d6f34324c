"""Settings of the fine-tuning commands; parsing flags needs them, so this imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from electra.config import PACKAGED_MODEL
from electra.errors import ConfigError, check_range
from electra.finetuning.readers import SpanHead, TaskKind, kind_of_file
from electra.finetuning.tasks import SQUAD_VERSIONS, TAGGING_COLUMNS, Task
from electra.model.config import EncoderConfig, Pooling
from electra.training.config import Device, HardwareConfig, OptimizerConfig, Precision, TrackerName, TrainerConfig

DEFAULT_LAYERS = (-4, -3, -2, -1)
"""Of --frozen: the best in BERT's paper."""
Glue6Task = Literal["cola", "sst2", "mrpc", "stsb", "qnli", "rte"]
ProbeScore = Literal["metric", "auc", "loss"]
SAVE_EVERY = 2000
"""Steps between checkpoints; small tasks finish without one."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A task of GLUE, SQuAD or CoNLL (--task and --data), or your own files (--train)."""

    task: str | None = None
    """A GLUE task (cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli), SQuAD (squad for 1.1, squad2 for 2.0), or a
    column of CoNLL-2003 or CoNLL-2000: ner, chunking or pos."""
    data: str | None = None
    """The folder of GLUE's official download, or hub:glue; for SQuAD, the folder of its official .json files; for
    tagging, the folder of eng.train (CoNLL-2003) or train.txt (CoNLL-2000)."""
    train: Path | None = None
    """A file of your own to train on: .csv, .tsv, .jsonl or .parquet, hub:NAME:CONFIG:SPLIT, CoNLL columns (.conll or
    .conllu, with --kind tags any other name), or SQuAD's .json. With --kind tags, .jsonl and .parquet have lists of
    words and tags."""
    dev: Path | None = None
    """A file to evaluate on."""
    dev_fraction: float | None = None
    """Without --dev: fraction of the training rows that is held out for evaluation; default 0.1."""
    text: str | None = None
    """Column of the text; default text. With --kind choice: column of the context, by default context if there is one.
    With --kind tags: column of the words; default words, in CoNLL columns 1. With --kind question-answering: column of
    the context; default context."""
    text_b: str | None = None
    """Column of the second text, for pairs. With --kind choice: column of the question, by default question if there is
    one. With --kind question-answering: column of the question; default question."""
    choices: tuple[str, ...] = ()
    """With --kind choice: the column that holds a list of choices, or a column for each choice; default choices."""
    label: str | None = None
    """Column of the label or score; default label. With --kind tags: column of the tags; default tags, in CoNLL columns
    the last. With --kind question-answering: column of the answers; default answers."""
    windows: int = 1
    """Cut texts longer than --length into up to this many windows, each of which overlaps the next by a quarter, and
    average their pooled states; the rest of a longer text is truncated."""
    kind: TaskKind | None = None
    """Kind of task; default inferred from the labels: tags in .conll and .conllu, question-answering in .json.
    multi-label: lists, or class names separated by |. choice: the label names the right one of --choices by its index
    from 0, its number from 1, its letter or its text. tags: a tag for each word; entities in IOB1, IOB2 or BIOES, or
    tags without prefix, such as parts of speech. question-answering: answers are parts of a context."""
    head: SpanHead = "simple"
    """Head of question answering. simple: first and last token of the answer independently, as in transformers. joint:
    the paper's, last token given the first, and a classifier of questions without answer; exported as ONNX only."""
    strict: bool = False
    """With question answering: refuse training answers that are not in their context, instead of leaving them out."""
    crf: bool = False
    """With --kind tags: predict the best sequence of tags by a conditional random field (CRF); such a model is
    exported as ONNX only."""

    def __post_init__(self) -> None:
        if (self.task is None) == (self.train is None):
            raise ConfigError("give either --task with --data (GLUE, SQuAD, tagging) or --train (your own file)")
        if self.task is not None and self.data is None:
            raise ConfigError(
                "--task needs --data: the folder of GLUE's official download or hub:glue, of SQuAD, or of CoNLL files"
            )
        if self.task is not None and self.dev is not None:
            raise ConfigError("--dev cannot be combined with --task; evaluate the model on it with electra evaluate")
        own_file_settings = ("dev_fraction", "text", "text_b", "choices", "label", "kind")
        if self.task is not None and (given := [name for name in own_file_settings if getattr(self, name)]):
            raise ConfigError(f"--{given[0].replace('_', '-')} is for your own files (--train), not for --task")
        if self.dev is not None and self.dev_fraction is not None:
            raise ConfigError("--dev and --dev-fraction cannot be combined; set one of them")
        check_range(self, "dev_fraction", above=0, below=1)
        check_range(self, "windows", at_least=1)
        kind = self.known_kind()
        if self.choices and kind != "choice":
            raise ConfigError("--choices needs --kind choice")
        has_answers = kind == "question-answering" or self.task in SQUAD_VERSIONS
        if (self.strict or self.head != "simple") and not has_answers:
            raise ConfigError(
                f"--head and --strict need --kind question-answering or --task {' or '.join(SQUAD_VERSIONS)}"
            )
        if self.crf and kind != "tags" and self.task not in TAGGING_COLUMNS:
            raise ConfigError(f"--crf needs --kind tags or a tagging --task ({', '.join(TAGGING_COLUMNS)})")
        if kind == "tags" and self.text_b is not None:
            raise ConfigError("--text-b cannot be combined with --kind tags; --text sets the column of the words")

    def known_kind(self) -> TaskKind | None:
        """The kind that is set, or the only one that files with the name of --train have."""
        return self.kind or (None if self.train is None else kind_of_file(self.train))


@dataclass(frozen=True, kw_only=True)
class FrozenConfig:
    """What a head gets from a frozen encoder."""

    layers: tuple[int, ...]
    """Layers whose hidden states are concatenated, as in `EncoderConfig.layer_indices`; empty: the last four."""
    bilstm: bool
    """Whether a BiLSTM follows."""

    def indices(self, encoder: EncoderConfig) -> list[int]:
        """The layers in `Encoder.hidden_states`."""
        return encoder.layer_indices(self.layers or DEFAULT_LAYERS[-encoder.layers :])


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Hyperparameters of fine-tuning. The defaults are the paper's for the encoder's size and the task."""

    epochs: int | None = None
    """Passes over the training rows; default 3, for rte and stsb 10, for ner, chunking and pos 5, for question
    answering 2."""
    batch_size: int = 32
    """Rows per step."""
    micro_batches: int = 1
    """Split each batch into this many micro-batches and accumulate their gradients: less memory, equal results."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw; muon: Muon for the weight matrices of the layers, AdamW for the other parameters."""
    learning_rate: float | None = None
    """Peak learning rate; default 3e-4 for widths up to 512 (small), 1e-4 below 1024 (base), else 5e-5 (large); with
    --frozen 1e-3."""
    layer_decay: float | None = None
    """Layer-wise learning-rate decay: factor from each layer to the one below; default 0.8, from 24 layers on 0.9."""
    warmup: float = 0.1
    """Warm-up: fraction of all steps (below 1) or a number of steps."""
    weight_decay: float | None = None
    """Weight decay; default 0 as in the paper, with --faithful 0.01 as in the released code."""
    dropout: float | None = None
    """Dropout of the encoder and the head; default as in pre-training."""
    pooling: Pooling | None = None
    """Input of a modern encoder's head: the first token's state (cls) or the mean of all; default as in the model's
    folder (classifier_pooling in Hugging Face's), else cls."""
    length: int | None = None
    """Maximum length in tokens; longer texts are truncated, the longer one of a pair first; default 128, for
    chunking 256. Question answering reads contexts in windows of this length; default 512. Defaults above 128 are not
    beyond the length of pre-training."""
    frozen: bool = False
    """Feature-based: keep the weights of the encoder, and train a linear layer on the hidden states of --layers, pooled
    by their mean unless --pooling cls. The default learning rate is then 1e-3."""
    layers: tuple[int, ...] = ()
    """With --frozen: layers whose hidden states are concatenated: 1 is the first, 0 the embeddings, -1 the last;
    default the last four."""
    bilstm: bool = False
    """With --frozen: two layers of BiLSTMs between the hidden states and the linear layer."""
    class_weights: tuple[str, ...] = ()
    """Weights of classes in the loss: balanced (rows of a class count in inverse proportion to their number), or
    CLASS=WEIGHT for some classes, e.g. spam=5; of a multi-label task, weights of the rows that have the class."""
    best_epoch: bool = False
    """Keep the model of the epoch with the best main metric on the dev rows instead of the last one."""
    early_stopping: int | None = None
    """Stop after this many epochs without a better main metric on the dev rows; implies --best-epoch."""
    faithful: bool = False
    """Reproduce the released code: Adam without bias correction, a decay that starts during the warm-up, weight decay,
    and layer-wise decay counted from one layer higher."""

    def __post_init__(self) -> None:
        check_range(self, "epochs", "batch_size", "micro_batches", "early_stopping", at_least=1)
        check_range(self, "length", at_least=8)
        check_range(self, "layer_decay", above=0, at_most=1)
        if self.batch_size % self.micro_batches:
            message = f"is {self.micro_batches}; it must divide --batch-size {self.batch_size}"
            raise ConfigError(message, field="micro_batches")
        if self.faithful and self.optimizer != "adamw":
            raise ConfigError(f"--faithful uses Adam; it cannot be combined with --optimizer {self.optimizer}")
        if self.frozen and self.optimizer == "muon":
            raise ConfigError("--optimizer muon is for the layers of the encoder, which --frozen keeps; use adamw")
        if (self.layers or self.bilstm) and not self.frozen:
            raise ConfigError(f"{'--layers' if self.layers else '--bilstm'} needs --frozen")

    def optimizer_config(self, encoder: EncoderConfig) -> OptimizerConfig:
        """Optimizer and schedule for an encoder."""
        learning_rate = 5e-5 if encoder.width >= 1024 else 1e-4 if encoder.width > 512 else 3e-4
        learning_rate = 1e-3 if self.frozen else learning_rate
        weight_decay = 0.01 if self.faithful else 0.0
        return OptimizerConfig(
            name="adam" if self.faithful else self.optimizer,
            schedule="released" if self.faithful else "linear",
            learning_rate=learning_rate if self.learning_rate is None else self.learning_rate,
            warmup=self.warmup,
            weight_decay=weight_decay if self.weight_decay is None else self.weight_decay,
        )

    def trainer_config(self, steps_per_epoch: int, track: TrackerName = "none") -> TrainerConfig:
        """Intervals for the trainer: evaluation after every epoch."""
        return TrainerConfig(
            micro_batches=self.micro_batches,
            log_every=max(1, min(50, steps_per_epoch // 4)),
            evaluate_every=steps_per_epoch,
            save_every=SAVE_EVERY,
            keep_checkpoints=1,
            track=track,
        )

    def frozen_config(self) -> FrozenConfig | None:
        return FrozenConfig(layers=self.layers, bilstm=self.bilstm) if self.frozen else None

    @property
    def keeps_best_epoch(self) -> bool:
        return self.best_epoch or self.early_stopping is not None

    def epochs_for(self, task: Task) -> int:
        return task.epochs if self.epochs is None else self.epochs

    def length_for(self, task: Task) -> int:
        return task.length if self.length is None else self.length

    def layer_decay_for(self, encoder: EncoderConfig) -> float:
        return self.layer_decay if self.layer_decay is not None else 0.9 if encoder.layers >= 24 else 0.8


@dataclass(frozen=True, kw_only=True)
class JobsConfig:
    """Seeds, and how many of them run in parallel."""

    seeds: int = 1
    """Number of runs per task, with seeds 1, 2, …; compare medians, not single runs."""
    ensemble: bool = False
    """Also evaluate the ensemble of all seeds, by the mean of their logits."""
    workers: int | None = None
    """Jobs in parallel, one process each, divided over all GPUs; default 1 on a CPU, 2 on each GPU, up to 8 with NVIDIA
    MPS, which is started where it is installed."""
    ray: str | None = None
    """Run the jobs on a Ray cluster, each on one GPU or core: its address, auto, or local to start Ray on this
    machine. All nodes need model, data and output under the same paths."""
    track: TrackerName = "none"
    """Also send the metrics and settings of each seed to Weights & Biases or to Trackio."""

    def __post_init__(self) -> None:
        check_range(self, "seeds", "workers", at_least=1)
        if self.ray is not None and self.workers is not None:
            raise ConfigError("give --workers or --ray, which uses the whole cluster, not both")
        if self.ensemble and self.seeds == 1:
            raise ConfigError("--ensemble needs --seeds 2 or more")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Fine-tune an encoder on a GLUE task or on your own files.

    electra finetune --model runs/x --train reviews.csv --text review --label stars --output finetuned/reviews

    An interrupted run continues when the same command is repeated."""

    model: Path = PACKAGED_MODEL
    """What to fine-tune: a pre-training run, a model folder (written by electra), a Hugging Face folder (ELECTRA, BERT,
    ModernBERT), a fine-tuned model, or the --output of another fine-tuning (its best seed); default: the small English
    model in the package, if the installation contains one."""
    output: Path
    """Folder for models, metrics and plots."""
    task: TaskConfig
    tuning: TuningConfig
    jobs: JobsConfig
    hardware: HardwareConfig
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        if self.jobs.ensemble and self.task.head == "joint":
            raise ConfigError("--ensemble averages logits, which --head joint does not have; use --head simple")


@dataclass(frozen=True, kw_only=True)
class GlueConfig:
    """Fine-tune an encoder on the GLUE tasks with several seeds each, and tabulate medians and standard deviations
    beside ELECTRA's published results.

    An interrupted run continues when the same command is repeated; finished seeds are not run again."""

    model: Path
    """What to fine-tune: a pre-training run, a model folder (written by electra) or a Hugging Face folder (ELECTRA,
    BERT, ModernBERT)."""
    data: str
    """The folder of GLUE's official download, or hub:glue. MNLI's models also predict its diagnostic rows."""
    output: Path
    """Folder for models, metrics and plots of each task, and for the table."""
    tasks: tuple[str, ...] = ("all",)
    """all, glue-6 (cola sst2 mrpc stsb qnli rte), or names of tasks."""
    large_seeds: int | None = None
    """Number of seeds for tasks with more than 20,000 training rows (sst2, qqp, mnli, qnli), which vary less."""
    keep_models: bool = False
    """Keep the models of all seeds instead of each task's best."""
    submission: Path | None = None
    """Write a zip file for GLUE's site: predictions of each task's best seed or, with --ensemble, of the ensemble."""
    tuning: TuningConfig
    jobs: JobsConfig
    hardware: HardwareConfig
    json: bool = False
    """Print the table as JSON."""

    def __post_init__(self) -> None:
        check_range(self, "large_seeds", at_least=1)
        if self.submission is not None and not self.submission.parent.is_dir():
            folder = self.submission.parent
            raise ConfigError(f"is {self.submission}, but there is no folder {folder}", field="submission")

    @staticmethod
    def dependent_defaults(values: dict[str, Any]) -> dict[str, Any]:
        return {"seeds": 5}


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Compare pre-trained models, or settings of fine-tuning, by cross-validation on GLUE's training rows.

    electra probe --model runs/a runs/b --data glue/ --output probe.jsonl

    The dev files are not read, so that they stay unbiased for the models that are chosen. Each result is appended to
    --output when its fine-tuning ends; those already there are not computed again, so an interrupted command can be
    repeated, and models, settings, tasks and seeds can be added. Without --model, only the tables are printed."""

    model: tuple[Path, ...] = ()
    """Pre-training runs, model folders (written by electra) or Hugging Face folders (ELECTRA, BERT, ModernBERT)."""
    data: str | None = None
    """The folder of GLUE's official download, or hub:glue."""
    output: Path
    """File of results, .jsonl."""
    tasks: tuple[Glue6Task, ...] = get_args(Glue6Task)
    """Tasks. cola, mrpc, rte and stsb: five-fold cross-validation; sst2 and qnli: one slice of the training rows,
    evaluated on others."""
    settings: tuple[str, ...] = ("default",)
    """Names of fine-tuning settings, each followed by KEY=VALUE for those that differ from the defaults of electra
    finetune: paper muon optimizer=muon learning_rate=1e-3."""
    seeds: int = 2
    """Number of fine-tuning seeds."""
    slice_rows: int = 20_000
    """Training rows of sst2 and qnli."""
    slice_held_out: int = 8_000
    """Rows to evaluate sst2 and qnli on, at most a fifth of all."""
    rows: int | None = None
    """Use at most this many rows of each task, for a trial."""
    score: tuple[ProbeScore, ...] = ("metric", "auc")
    """Scores to tabulate. metric: the task's main metric; auc: area under the ROC curve (stsb: Spearman again); loss:
    held-out cross-entropy (stsb: squared error)."""
    baseline: tuple[str, ...] = ()
    """MODEL, or MODEL and SETTING, that the others are compared with; default the table's first row."""
    workers: int | None = None
    """Fine-tunings in parallel, one process each; default as in electra finetune."""
    hardware: HardwareConfig
    json: bool = False
    """Print the tables as JSON."""

    def __post_init__(self) -> None:
        check_range(self, "seeds", "workers", "slice_rows", "slice_held_out", at_least=1)
        check_range(self, "rows", at_least=20)
        if self.model and self.data is None:
            raise ConfigError("--model needs --data: the folder of GLUE's official download, or hub:glue")
        if not self.output.parent.is_dir():
            raise ConfigError(f"is {self.output}, but there is no folder {self.output.parent}", field="output")


@dataclass(frozen=True, kw_only=True)
class PredictorConfig:
    """A fine-tuned model and a file to apply it to."""

    model: Path
    """A fine-tuned model, or the --output of electra finetune (its best seed)."""
    input: Path
    """A file with the columns the model was trained on: .csv, .tsv, .jsonl, .parquet or SQuAD's .json, possibly
    compressed."""
    ensemble: bool = False
    """Use the ensemble of all seeds in --model, by the mean of their logits."""
    length: int | None = None
    """Maximum length in tokens; longer texts are truncated; default as in fine-tuning."""
    batch_size: int | None = None
    """Rows per forward pass; default 64, on a GPU 512."""
    device: Device = "auto"
    """auto: the GPU if there is one, else the CPU."""
    precision: Precision = "auto"
    """auto: bf16 on a GPU that supports it, else fp16 or, on a CPU, fp32."""

    def __post_init__(self) -> None:
        check_range(self, "batch_size", at_least=1)
        check_range(self, "length", at_least=8)


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Predict labels for the rows of a file: each row is written with its prediction and class probabilities. Answers
    to questions are also written as SQuAD's files, if --output is a folder."""

    predictor: PredictorConfig
    output: Path
    """The file to write: .csv, .tsv or .jsonl. For question answering also a folder (a name without suffix) for SQuAD's
    predictions.json, nbest_predictions.json and null_odds.json."""
    overwrite: bool = False
    """Replace the file if it exists."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Evaluate a fine-tuned model on a file with labels."""

    predictor: PredictorConfig
    json: bool = False
    """Print the result as JSON."""
