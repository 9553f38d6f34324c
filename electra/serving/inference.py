"""Inference with a trained model: detect replaced tokens, predict masked tokens, embed texts."""

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from electra.data.tokenizer import TextTokenizer, load_tokenizer, read_trained_length
from electra.errors import ConfigError, DataError, check_finite
from electra.finetuning.config import PredictorConfig
from electra.finetuning.features import check_texts, group_by_tokens
from electra.finetuning.predict import Predictor, is_finetuned
from electra.huggingface.convert import read_config_and_tensors
from electra.model.config import EmbeddingPooling, EncoderConfig
from electra.model.electra import Discriminator, Electra, MaskedLanguageModel
from electra.model.storage import WEIGHTS, build_model, has_rtd_head, is_onnx_folder, load_model_tokenizer
from electra.onnx.runtime import TASK, OnnxElectra, OnnxPredictor
from electra.serving.config import DetectConfig, FillConfig, TextConfig
from electra.serving.embedder import Embedder
from electra.training.checkpoint import find_model_folder
from electra.training.config import Device
from electra.training.hardware import choose_device

Method = Literal["detect", "fill", "embed", "predict"]
MAX_TOKENS = 512
TOKENS_PER_MASK = 16


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of a text as a model reads them."""

    ids: list[int]
    tokens: list[str]
    is_truncated: bool  # to the length that the model was trained on


@dataclass(frozen=True)
class Detection:
    """The tokens of a text as the model reads them, each with the probability that it was replaced; is_truncated: the
    text is longer than the model reads."""

    tokens: list[str]
    replaced: list[float]
    is_truncated: bool

    def __str__(self) -> str:
        probability, token = max(zip(self.replaced, self.tokens, strict=True), default=(0.0, ""))
        none = f"\n(no token is likely replaced; the most likely is {token}, {probability:.2f})"
        return self.marked_text() + (none if probability < 0.5 else "") + truncation_note(self.is_truncated)

    def marked_text(self, threshold: float = 0.5) -> str:
        """The tokens on one line; those from `threshold` on have their probability and are red on a terminal."""
        line = Text(" ").join(
            Text(f"{token}({probability:.2f})", style="bold red") if probability >= threshold else Text(token)
            for token, probability in zip(self.tokens, self.replaced, strict=True)
        )
        console = Console(width=100)
        with console.capture() as captured:
            console.print(line)
        return captured.get().rstrip()


@dataclass(frozen=True)
class MaskPrediction:
    """The index of a [MASK] in the tokens, and the most likely tokens with their probabilities."""

    position: int
    tokens: dict[str, float]


@dataclass(frozen=True)
class MaskPredictions:
    """The tokens of a text, and the predictions for each [MASK]."""

    tokens: list[str]
    masks: list[MaskPrediction]
    is_truncated: bool = False

    def __str__(self) -> str:
        lines = []
        for mask in self.masks:
            predicted = "  ".join(f"{token} {probability:.3f}" for token, probability in mask.tokens.items())
            lines.append(f"[MASK] at {mask.position}: {predicted}")
        return "\n".join(lines) + truncation_note(self.is_truncated)


class Model:
    """A generator, a discriminator or both, with their tokenizer."""

    def __init__(
        self,
        electra: Electra,
        tokenizer: TextTokenizer,
        device: torch.device,
        has_rtd_head: bool,
        trained_length: int | None,  # longer texts are truncated
    ) -> None:
        self.electra = electra.float().to(device).eval()
        self.tokenizer = tokenizer
        self.device = device
        self.has_rtd_head = has_rtd_head
        self.trained_length = trained_length
        self.max_tokens = MAX_TOKENS  # of a batch, with padding

    def methods(self) -> list[Method]:
        """What this model can do."""
        has_rtd_head = isinstance(self.electra.discriminator, Discriminator) and self.has_rtd_head
        can: dict[Method, bool] = {"detect": has_rtd_head, "fill": self.electra.generator is not None, "embed": True}
        return [name for name, is_possible in can.items() if is_possible]

    def detect(self, text: str) -> Detection:
        """The probability of each token of `text` that it was replaced."""
        return self.detect_batch([text])[0]

    @torch.no_grad()
    def detect_batch(self, texts: Sequence[str]) -> list[Detection]:
        """`detect` of several texts, computed in batches of similar length."""
        if self.electra.discriminator is not None and not self.has_rtd_head:
            raise ConfigError("this model is an encoder without a replaced token detection head; it can only embed")
        discriminator = self.electra.require_discriminator()
        rows = self.tokenize(texts, discriminator.encoder.config)
        replaced: dict[int, list[float]] = {}
        for group in group_by_tokens(np.array([len(row.ids) for row in rows]), self.max_tokens):
            inputs = self.pad([rows[index] for index in group], discriminator.encoder.config)
            probabilities = discriminator(*inputs).sigmoid()  # [B, L]
            check_finite(probabilities, "the discriminator")
            replaced |= zip(group.tolist(), probabilities.tolist(), strict=True)
        return [
            Detection(row.tokens, [round(each, 4) for each in replaced[index][: len(row.ids)]], row.is_truncated)
            for index, row in enumerate(rows)
        ]

    def fill(self, text: str, count: int = 5) -> MaskPredictions:
        """The `count` most likely tokens for each [MASK] in `text`."""
        return self.fill_batch([text], count)[0]

    @torch.no_grad()
    def fill_batch(self, texts: Sequence[str], count: int = 5) -> list[MaskPredictions]:
        """`fill` of several texts, computed in batches of similar length."""
        if count < 1:
            raise ConfigError(f"is {count}; it must be at least 1", field="count")
        generator = self.electra.require_generator()
        rows = self.tokenize(texts, generator.encoder.config)
        names = ["the text"] if len(texts) == 1 else [f"text {number}" for number in range(1, len(texts) + 1)]
        positions = [self.mask_positions(*each) for each in zip(texts, rows, names, strict=True)]
        # the vocabulary logits of a [MASK] take more memory than the states of a token
        sizes = [max(len(row.ids), TOKENS_PER_MASK * len(each)) for row, each in zip(rows, positions, strict=True)]
        masks: dict[int, list[MaskPrediction]] = {}
        for group in group_by_tokens(np.array(sizes), self.max_tokens):
            inputs = self.pad([rows[index] for index in group], generator.encoder.config)
            at = pad_sequence([torch.tensor(positions[index]) for index in group], batch_first=True)  # [B, M]
            probabilities = generator(*inputs, positions=at.to(self.device)).logits.softmax(-1)  # [B, M, V]
            check_finite(probabilities, "the generator")
            best = probabilities.topk(min(count, probabilities.shape[-1]))
            for index, *predicted in zip(group.tolist(), best.values.tolist(), best.indices.tolist(), strict=True):
                by_mask = zip(positions[index], *predicted, strict=False)  # shorter than padded
                masks[index] = [self.mask_prediction(*each) for each in by_mask]
        return [MaskPredictions(row.tokens, masks[index], row.is_truncated) for index, row in enumerate(rows)]

    def mask_prediction(self, position: int, probabilities: list[float], ids: list[int]) -> MaskPrediction:
        names = [self.token_name(token_id) for token_id in ids]
        return MaskPrediction(position, dict(zip(names, [round(each, 4) for each in probabilities], strict=True)))

    def mask_positions(self, text: str, row: TokenizedText, name: str) -> list[int]:
        """The positions of the [MASK] tokens; there must be one."""
        mask_id, mask = self.tokenizer.vocabulary.mask_id, dict(self.tokenizer.special_tokens)["mask"]
        positions = [position for position, token_id in enumerate(row.ids) if token_id == mask_id]
        if positions:
            return positions
        if mask_id in self.tokenizer.library.encode(text).ids:
            raise ConfigError(
                f"the {mask} of {name} is after the first {len(row.ids)} tokens, all that the model reads; shorten it"
            )
        raise ConfigError(f"{name} has no {mask}; write {mask} in place of the word to predict")

    def embed(
        self,
        texts: str | Sequence[str],
        pooling: EmbeddingPooling = "mean",
        layers: int | Sequence[int] = (-1,),
        batch_size: int | None = None,
    ) -> Tensor:
        """The embedding of each text [N, D · layers]: the mean or maximum of its hidden states, or that of [CLS].

        Those of several `layers` (0: the embeddings; negative: from the end) are concatenated."""
        indices = tuple(np.atleast_1d(layers).tolist())
        embedder = self.create_embedder(pooling=pooling, layers=indices, batch_size=batch_size)
        return torch.from_numpy(embedder.embed(check_texts([texts] if isinstance(texts, str) else texts)))

    def create_embedder(self, **settings: Any) -> Embedder:
        """Embeddings with the keyword arguments of `Embedder`."""
        encoder = self.main_part().encoder
        return Embedder(encoder, self.plain_tokenizer, self.device, self.max_length(encoder.config), **settings)

    @cached_property
    def plain_tokenizer(self) -> TextTokenizer:
        """A copy for embeddings: encoding special tokens as text is a setting of the library's object."""
        return deepcopy(self.tokenizer)

    def main_part(self) -> Discriminator | MaskedLanguageModel:
        """The discriminator, or a lone generator."""
        return self.electra.discriminator or self.electra.require_generator()

    def max_length(self, encoder: EncoderConfig) -> int:
        """Tokens after which texts are truncated."""
        return min(encoder.positions, self.trained_length or encoder.positions)

    def tokenize(self, texts: Sequence[str], encoder: EncoderConfig) -> list[TokenizedText]:
        """The tokens of texts, truncated before the final [SEP] to the length that the model was trained on."""
        length, rows = self.max_length(encoder), []
        for encoding in self.tokenizer.library.encode_batch(check_texts(texts)):
            is_truncated = len(encoding.ids) > length
            ids = [*encoding.ids[: length - 1], encoding.ids[-1]] if is_truncated else encoding.ids
            rows.append(TokenizedText(ids, [self.token_name(token_id) for token_id in ids], is_truncated))
        return rows

    def pad(self, rows: Sequence[TokenizedText], encoder: EncoderConfig) -> tuple[Tensor, Tensor]:
        """Padded token ids and attention mask [B, L]."""
        ids = [torch.tensor(row.ids) for row in rows]
        input_ids = pad_sequence(ids, batch_first=True, padding_value=encoder.pad_id)
        attention_mask = torch.arange(input_ids.shape[1]) < torch.tensor([len(row) for row in ids])[:, None]
        return input_ids.to(self.device), attention_mask.to(self.device)

    def token_name(self, token_id: int) -> str:
        return self.tokenizer.library.id_to_token(token_id) or f"<{token_id}>"


def load_text_model(path: Path, device: Device) -> Model:
    """Load a model folder, the newest checkpoint of a run, or a Hugging Face folder, with its tokenizer."""
    folder = find_model_folder(path)
    config, weights = read_config_and_tensors(folder)
    tokenizer = load_model_tokenizer(folder, min(part.vocab_size for part in config.encoder_configs().values()))
    electra = build_model(config, weights, folder / WEIGHTS)
    return Model(electra, tokenizer, choose_device(device), has_rtd_head(weights), read_trained_length(folder))


def load(path: str | Path = TextConfig.model, device: Device = "auto") -> Model | Predictor:
    """Load a model with its tokenizer: a fine-tuned one with `predict`, any other with `detect`, `fill` and `embed`.

    `path` is a run, a model folder, a Hugging Face folder, a folder of electra export --to onnx, or the output of a
    fine-tuning (its best seed); by default (or "packaged") the small English model in the package, if it has one."""
    if is_onnx_folder(Path(path)):
        return load_onnx(Path(path))
    if is_finetuned(Path(path)):
        return Predictor(PredictorConfig(model=Path(path), input=Path(), device=device))
    return load_text_model(Path(path), device)


def load_onnx(folder: Path, int8: bool = False) -> Model | Predictor:
    """Load a folder that electra export --to onnx wrote, with the same methods, computed by ONNX Runtime on a CPU."""
    if (folder / TASK).exists():
        return OnnxPredictor(folder, int8)
    electra = OnnxElectra(folder, int8)
    tokenizer = load_tokenizer(folder)
    return Model(electra, tokenizer, torch.device("cpu"), electra.has_head, read_trained_length(folder))


def truncation_note(is_truncated: bool) -> str:
    return "\n(the text was truncated to the length that the model was trained on)" if is_truncated else ""


@dataclass(frozen=True)
class TextResults:
    """The results of several texts, in their order."""

    results: list[Any]

    def __str__(self) -> str:
        return "\n".join(map(str, self.results))


def detect(config: DetectConfig) -> Detection | TextResults:
    return apply_to_texts(config.input, lambda model, text: model.detect(text))


def fill(config: FillConfig) -> MaskPredictions | TextResults:
    def fill_line(model: Model, text: str) -> MaskPredictions:
        is_blank = config.input.text is None and not text
        return MaskPredictions([], []) if is_blank else model.fill(text, config.count)

    return apply_to_texts(config.input, fill_line)


def apply_to_texts(config: TextConfig, function: Callable[[Model, str], Any]) -> Any:
    """The result of a model for a text, or those for the lines of --input or of standard input."""
    if config.text is not None:
        return function(load_text_model(config.model, config.device), config.text)
    texts, results = read_lines(config.input), []
    model = load_text_model(config.model, config.device)
    for number, text in enumerate(texts, start=1):
        try:
            results.append(function(model, text))
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error}") from None
    return TextResults(results)


def read_lines(file: Path | None) -> list[str]:
    """The lines of a file or of standard input."""
    if file is None and sys.stdin.isatty():
        raise ConfigError("there is no text; pass one in quotes, a file with --input, or lines on standard input")
    content = sys.stdin.buffer.read() if file is None else file.read_bytes()
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise DataError(
            f"{file or 'standard input'} is not text in UTF-8; decompress or convert it, e.g. with iconv"
        ) from None
    texts = [line.strip() for line in (lines if lines[-1] else lines[:-1])]
    if not any(texts):
        raise DataError(f"{file or 'standard input'} contains no text; one text per line is expected")
    return texts
