"""Estimators for scikit-learn: a classifier that is fine-tuned, and a vectorizer of embeddings.

from electra.sklearn import ElectraClassifier, ElectraVectorizer
"""

import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import check_is_fitted, column_or_1d

from electra.config import PACKAGED_MODEL, build_config, model_path
from electra.errors import DataError
from electra.finetuning.config import PredictorConfig, TaskConfig, TuningConfig
from electra.finetuning.job import MODEL, Job
from electra.finetuning.jobs import find_model_to_finetune
from electra.finetuning.kinds import check_class_weights, define_task
from electra.finetuning.predict import CHUNK_SIZE, Predictor
from electra.finetuning.tasks import Examples
from electra.model.config import EmbeddingPooling
from electra.serving.config import EmbedConfig
from electra.serving.embed import load_embedder
from electra.serving.embedder import Embedder
from electra.training.config import Device, HardwareConfig

DEV_ROWS = 32  # of the training rows, on which each epoch is evaluated; nothing depends on them


def check_texts(texts: Any) -> list[str]:
    """A list of texts; raises a DataError if there are none or `texts` holds anything else."""
    # not numpy's function, which makes an array as wide as the longest text of a list
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable) or getattr(texts, "ndim", 1) != 1:
        raise DataError("X must be a list or a column of texts, one for each sample")
    texts = list(texts)
    if not texts:
        raise DataError("Found array with 0 sample(s); a minimum of 1 text is required")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"X[{number}] is a {type(text).__name__}; each sample must be a text")
        if surrogate := re.search("[\ud800-\udfff]", text):
            raise DataError(f"X[{number}] has the lone surrogate {surrogate[0]!r}, which is no character; remove it")
    return [str(text) for text in texts]  # without subclasses such as numpy's, which JSON and tokenizers reject


class TextInput(BaseEstimator):
    """An estimator whose samples are texts."""

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.one_d_array, tags.input_tags.two_d_array = True, True, False
        return tags


class ElectraVectorizer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, TextInput):
    """Texts to embeddings, the pooled hidden states of an encoder (see `electra embed`).

    `model` is a run, a model folder, a fine-tuned model or a Hugging Face folder; by default the small English model of
    the package, if the installation contains one. It is not part of a pickle, which holds its path."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        layers: Sequence[int] = (-1,),
        pooling: EmbeddingPooling = "mean",
        length: int | None = None,
        batch_size: int = 64,
        device: Device = "auto",
    ) -> None:
        self.model = model
        self.layers = layers
        self.pooling = pooling
        self.length = length
        self.batch_size = batch_size
        self.device = device

    def fit(self, X: Any, y: Any = None) -> "ElectraVectorizer":
        """Load the model; nothing is learnt."""
        check_texts(X)
        self._n_features_out = self.load().dimensions
        return self

    def transform(self, X: Any) -> NDArray:
        """Embeddings [N, dimensions], float32."""
        check_is_fitted(self, "_n_features_out")
        return self.load().embed(check_texts(X))

    def load(self) -> Embedder:
        path = str(self.model or PACKAGED_MODEL)
        return cached_embedder(path, tuple(self.layers), self.pooling, self.length, self.batch_size, self.device)


@lru_cache(maxsize=2)
def cached_embedder(
    model: str, layers: tuple[int, ...], pooling: EmbeddingPooling, length: int | None, batch_size: int, device: Device
) -> Embedder:
    settings = {"layers": layers, "pooling": pooling, "length": length, "batch_size": batch_size, "device": device}
    return load_embedder(build_config(EmbedConfig, model=Path(model), **settings))[0]


class ElectraClassifier(ClassifierMixin, TextInput):
    """A classifier of texts: an encoder that is fine-tuned on all samples (see `electra finetune`).

    `model` is as in `ElectraVectorizer`. `class_weight` is None, "balanced" or a dictionary by class. The fine-tuned
    model is part of a pickle."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        epochs: int = 3,
        learning_rate: float | None = None,
        batch_size: int = 32,
        length: int = 128,
        windows: int = 1,
        layer_decay: float | None = None,
        dropout: float | None = None,
        frozen: bool = False,
        class_weight: str | dict[Any, float] | None = None,
        random_state: Any = None,
        device: Device = "auto",
    ) -> None:
        self.model = model
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.length = length
        self.windows = windows
        self.layer_decay = layer_decay
        self.dropout = dropout
        self.frozen = frozen
        self.class_weight = class_weight
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any) -> "ElectraClassifier":
        """Fine-tune on texts and their classes."""
        texts = check_texts(X)
        if y is None:
            raise DataError("ElectraClassifier requires y to be passed, but the target y is None")
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if len(y) != len(texts):
            raise DataError(f"X has {len(texts)} texts and y {len(y)} classes; each text needs one")
        self.classes_ = unique_labels(y)
        if len(self.classes_) < 2:
            raise DataError(f"y has only one class, {self.classes_[0]!r}; a classifier needs two or more")
        with tempfile.TemporaryDirectory() as folder:
            job = self.define_job(Path(folder), texts, np.searchsorted(self.classes_, y))
            job.run(quiet=True)
            config = PredictorConfig(model=job.folder / MODEL, input=Path(), device=self.device)
            self.predictor_ = Predictor(config)
        return self

    def define_job(self, folder: Path, texts: list[str], class_ids: NDArray) -> Job:
        """A fine-tuning on a temporary file; classes are called by their index."""
        rows = [json.dumps({"text": text, "label": str(index)}) for text, index in zip(texts, class_ids, strict=True)]
        for name, part in (("train", rows), ("dev", rows[:DEV_ROWS])):
            (folder / f"{name}.jsonl").write_text("\n".join(part), encoding="utf-8")
        train, dev = folder / "train.jsonl", folder / "dev.jsonl"
        task = define_task(TaskConfig(train=train, dev=dev, kind="classification", windows=self.windows))
        tuning = TuningConfig(
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            length=self.length,
            layer_decay=self.layer_decay,
            dropout=self.dropout,
            frozen=self.frozen,
            class_weights=self.class_weight_words(),
        )
        check_class_weights(tuning.class_weights, task)
        return Job(
            model=find_model_to_finetune(model_path(self.model or PACKAGED_MODEL)),
            task=task,
            tuning=tuning,
            hardware=HardwareConfig(device=self.device),
            seed=int(check_random_state(self.random_state).randint(1 << 30)),
            folder=folder / "job",
        )

    def class_weight_words(self) -> tuple[str, ...]:
        """`class_weight` as --class-weights."""
        if not isinstance(self.class_weight, dict):
            return () if self.class_weight is None else (self.class_weight,)
        indices = {label: index for index, label in enumerate(self.classes_.tolist())}
        if unknown := [label for label in self.class_weight if label not in indices]:
            raise DataError(f"class_weight has {unknown[0]!r}, which is not a class of y")
        return tuple(f"{indices[label]}={weight}" for label, weight in self.class_weight.items())

    def predict_proba(self, X: Any) -> NDArray:
        """Probabilities [N, classes]."""
        check_is_fitted(self, "predictor_")
        texts, predictor = check_texts(X), self.predictor_
        parts = [texts[start : start + CHUNK_SIZE] for start in range(0, len(texts), CHUNK_SIZE)]
        outputs = [predictor.compute_outputs(Examples(texts=part, windows=predictor.task.windows)) for part in parts]
        return predictor.kind.activation(np.concatenate([output.logits for output in outputs]))

    def predict(self, X: Any) -> NDArray:
        """The most likely class of each text."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(1)]
