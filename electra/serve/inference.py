"""Inference with a trained model: detect replaced tokens, predict masked tokens, embed texts."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from electra.data.tokenizer import TextTokenizer, read_trained_length
from electra.errors import ConfigError, DataError, check_finite
from electra.finetuning.config import PredictorConfig
from electra.finetuning.predict import Predictor, is_finetuned
from electra.huggingface.folders import read_config_and_tensors
from electra.model.config import PACKAGED_MODEL, EmbeddingPooling
from electra.model.electra import Electra
from electra.model.encoder import Encoder
from electra.model.storage import WEIGHTS, build_model, has_rtd_head, load_model_tokenizer
from electra.serve.config import DetectConfig, FillConfig, TextConfig
from electra.serve.embedder import Embedder
from electra.training.checkpoint import find_model_folder
from electra.training.config import Device
from electra.training.hardware import choose_device


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of a text as a model reads them."""

    input_ids: Tensor  # [1, L]
    tokens: list[str]
    is_truncated: bool  # to the length that the model was trained on


@dataclass(frozen=True)
class Detection:
    """The tokens of a text, each with the probability that it was replaced."""

    tokens: list[str]
    replaced: list[float]
    is_truncated: bool = False

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
    """The most likely tokens at the position of a [MASK], with their probabilities."""

    position: int
    tokens: dict[str, float]


@dataclass(frozen=True)
class MaskPredictions:
    """The tokens of a text and the predictions for each of its [MASK] tokens."""

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
        has_rtd_head: bool = True,
        trained_length: int | None = None,  # longer texts are truncated
    ) -> None:
        self.electra = electra.float().to(device).eval()
        self.tokenizer = tokenizer
        self.device = device
        self.has_rtd_head = has_rtd_head
        self.trained_length = trained_length

    @torch.no_grad()
    def detect(self, text: str) -> Detection:
        """The probability of each token of `text` that it was replaced."""
        if self.electra.discriminator is not None and not self.has_rtd_head:
            raise ConfigError("this model is an encoder without a replaced token detection head; it can only embed")
        discriminator = self.electra.require_discriminator()
        text_tokens = self.tokenize(text, discriminator.encoder)
        probabilities = discriminator(text_tokens.input_ids)[0].sigmoid()  # [L]
        check_finite(probabilities, "the discriminator")
        rounded = [round(probability, 4) for probability in probabilities.tolist()]
        return Detection(text_tokens.tokens, rounded, text_tokens.is_truncated)

    @torch.no_grad()
    def fill(self, text: str, count: int = 5) -> MaskPredictions:
        """The `count` most likely tokens for each [MASK] in `text`."""
        if count < 1:
            raise ConfigError(f"is {count}; it must be at least 1", field="count")
        generator = self.electra.require_generator()
        text_tokens = self.tokenize(text, generator.encoder)
        positions = self.mask_positions(text, text_tokens)
        probabilities = generator(text_tokens.input_ids, positions=positions[None]).logits[0].softmax(1)  # [M, V]
        check_finite(probabilities, "the generator")
        best = probabilities.topk(min(count, probabilities.shape[1]), dim=1)
        masks = []
        for position, values, ids in zip(positions.tolist(), best.values.tolist(), best.indices.tolist(), strict=True):
            names = [self.token_name(token_id) for token_id in ids]
            masks.append(MaskPrediction(position, dict(zip(names, [round(value, 4) for value in values], strict=True))))
        return MaskPredictions(text_tokens.tokens, masks, text_tokens.is_truncated)

    def mask_positions(self, text: str, text_tokens: TokenizedText) -> Tensor:
        """The positions [M] of the [MASK] tokens; there must be one."""
        mask_id = self.tokenizer.vocabulary.mask_id
        positions = (text_tokens.input_ids[0] == mask_id).nonzero().flatten()
        if len(positions):
            return positions
        if mask_id in self.tokenizer.library.encode(text).ids:
            length = text_tokens.input_ids.shape[1]
            raise ConfigError(
                f"the [MASK] is after the first {length} tokens, which is all the model reads; shorten the text"
            )
        raise ConfigError("the text has no [MASK]; write [MASK] in place of the word to predict")

    def embed(
        self,
        texts: str | Sequence[str],
        pooling: EmbeddingPooling = "mean",
        layers: Sequence[int] = (-1,),
        batch_size: int = 64,
    ) -> Tensor:
        """The embedding of each text [N, D · layers]: the mean or maximum of its hidden states, or that of [CLS].

        Those of several `layers` (0: the embeddings; negative: from the end) are concatenated."""
        encoder = self.main_encoder()
        length = min(encoder.config.positions, self.trained_length or encoder.config.positions)
        settings: dict[str, Any] = {"pooling": pooling, "layers": tuple(layers), "batch_size": batch_size}
        embedder = Embedder(encoder, self.tokenizer, self.device, length, **settings)
        return torch.from_numpy(embedder.embed([texts] if isinstance(texts, str) else list(texts)))

    def main_encoder(self) -> Encoder:
        """The discriminator's encoder, or that of a lone generator."""
        return (self.electra.discriminator or self.electra.require_generator()).encoder

    def tokenize(self, text: str, encoder: Encoder) -> TokenizedText:
        """The tokens of a text, truncated to the length that the model was trained on."""
        ids = self.tokenizer.library.encode(text).ids
        positions = encoder.config.positions
        kept = ids[: min(positions, self.trained_length or positions)]
        input_ids = torch.tensor([kept], device=self.device)
        return TokenizedText(input_ids, [self.token_name(token_id) for token_id in kept], len(kept) < len(ids))

    def token_name(self, token_id: int) -> str:
        return self.tokenizer.library.id_to_token(token_id) or f"<{token_id}>"


def load_model(path: Path, device: Device) -> Model:
    """Load a model folder, the newest checkpoint of a run, or a Hugging Face folder, with its tokenizer."""
    folder = find_model_folder(path)
    config, weights = read_config_and_tensors(folder)
    parts = [part for part in (config.generator, config.discriminator) if part is not None]
    tokenizer = load_model_tokenizer(folder, min(part.vocab_size for part in parts))
    electra = build_model(config, weights, folder / WEIGHTS)
    return Model(electra, tokenizer, choose_device(device), has_rtd_head(weights), read_trained_length(folder))


def load(path: str | Path = PACKAGED_MODEL, device: Device = "auto") -> Model | Predictor:
    """Load a model with its tokenizer: a fine-tuned one with `predict`, any other with `detect`, `fill` and `embed`.

    `path` is a run, a model folder, a Hugging Face folder, or the output of a fine-tuning (its best seed); by default
    the small English model in the package."""
    if is_finetuned(Path(path)):
        return Predictor(PredictorConfig(model=Path(path), input=Path(), device=device))
    return load_model(Path(path), device)


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
    return apply_to_texts(config.input, lambda model, text: model.fill(text, config.count))


def apply_to_texts(config: TextConfig, function: Callable[[Model, str], Any]) -> Any:
    """The result of a model for a text, or those for the lines of --input or of standard input."""
    if config.text is not None:
        return function(load_model(config.model, config.device), config.text)
    texts, results = read_lines(config.input), []
    model = load_model(config.model, config.device)
    for number, text in texts.items():
        try:
            results.append(function(model, text))
        except ConfigError as error:
            raise ConfigError(f"line {number}: {error}") from None
    return TextResults(results)


def read_lines(file: Path | None) -> dict[int, str]:
    """The lines of a file or of standard input that are not empty, by their number."""
    if file is None and sys.stdin.isatty():
        raise ConfigError("there is no text; pass one in quotes, a file with --input, or lines on standard input")
    content = sys.stdin.buffer.read() if file is None else file.read_bytes()
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise DataError(f"{file or 'standard input'} is not valid UTF-8; convert it, e.g. with iconv") from None
    texts = {number: line.strip() for number, line in enumerate(lines, start=1) if line.strip()}
    if not texts:
        raise DataError(f"{file or 'standard input'} has no text; each line is one")
    return texts
