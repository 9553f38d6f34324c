"""The generator-discriminator pair and its weight sharing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from electra.errors import ConfigError
from electra.kernels.dispatch import can_use_kernel
from electra.model.config import AuxiliaryHead, ElectraConfig, EncoderConfig, Sharing
from electra.model.encoder import Encoder, create_disentangled_embeddings
from electra.model.heads import BaselineHead, CopyGate, MLMHead, RTDHead, TokenPredictions

if TYPE_CHECKING:  # its import takes a second or two
    from electra.kernels.side_stream import GeneratorStream

CHUNK_SIZE = 4096  # positions whose vocabulary logits are in memory together


class SkipInit(TorchFunctionMode):
    """Skips the functions of torch.nn.init that draw random numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def meta_device() -> Iterator[None]:
    """Build modules without memory and without random initial weights, for which torch would import torch.compile: two
    seconds."""
    with torch.device("meta"), SkipInit():
        yield


class MaskedLanguageModel(nn.Module):
    """An encoder that predicts tokens: the generator, and the model that Replace MLM trains on corrupted text."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.head = MLMHead(config)

    def forward(self, input_ids: Tensor, *inputs: Tensor | None, **named_inputs: Tensor | None) -> TokenPredictions:
        """Predictions at `positions` [B, M], or at all L positions; the arguments are those of `Encoder.forward`."""
        return self.predict(self.encoder(input_ids, *inputs, **named_inputs))

    def predict(self, hidden: Tensor) -> TokenPredictions:
        """Predictions from the encoder's hidden states [..., D]."""
        states = self.head(hidden, self.encoder.tied_projection())
        return TokenPredictions(hidden, states, self.encoder.embeddings.token_table(), self.head.bias)

    def log_probabilities(self, predictions: TokenPredictions, input_ids: Tensor) -> Tensor:
        """Log-probabilities [..., V] of the original tokens, where the model's input is `input_ids` [...]."""
        return predictions.logits.float().log_softmax(-1)


class CopyMaskedLanguageModel(MaskedLanguageModel):
    """A masked language model with a copy mechanism for unchanged input tokens (All-Tokens MLM)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.gate = CopyGate(config)

    def log_probabilities(self, predictions: TokenPredictions, input_ids: Tensor) -> Tensor:
        log_probs = super().log_probabilities(predictions, input_ids)
        is_input = input_ids[..., None] == torch.arange(log_probs.shape[-1], device=log_probs.device)
        return self.gate(predictions.hidden, log_probs, is_input)

    def log_likelihood(self, hidden: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Log-probabilities [B, M] of `labels`, where the model's input is `input_ids` [B, M], from `hidden` [B, M, D].

        Computed in chunks. Unless the fused MLM head keeps their logits in half precision, they are computed again in
        the backward pass, so that only one chunk's are in memory.
        """
        columns = (hidden.flatten(0, 1), input_ids.flatten(), labels.flatten())
        chunks = zip(*(column.split(CHUNK_SIZE) for column in columns), strict=True)
        run = self.chunk_log_likelihood
        if not can_use_kernel("mlm_head", hidden):
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)  # nothing in it is random
        return torch.cat([run(*chunk) for chunk in chunks]).view_as(labels)

    def chunk_log_likelihood(self, hidden: Tensor, input_ids: Tensor, labels: Tensor) -> Tensor:
        """[N] for a chunk of N positions."""
        log_probs = -self.predict(hidden[None]).mlm_losses(labels[None])[0, :, None]  # [N, 1]
        return self.gate(hidden, log_probs, (input_ids == labels)[:, None]).squeeze(1)


class Generator(MaskedLanguageModel):
    """Predicts the masked tokens; its samples replace them."""

    side_stream: GeneratorStream | None = None
    """CUDA stream to run on in training, beside the discriminator."""

    def use_side_stream(self) -> None:
        """Run beside the discriminator in training, on the current GPU."""
        from electra.kernels.side_stream import GeneratorStream  # imports torch's compiler: a second or two

        self.side_stream = GeneratorStream()

    def forward(self, input_ids: Tensor, *inputs: Tensor | None, **named_inputs: Tensor | None) -> TokenPredictions:
        """As `MaskedLanguageModel.forward`; with a side stream, the predictions run the model when they are sampled."""
        run = partial(super().forward, input_ids, *inputs, **named_inputs)
        if self.side_stream is None or not torch.is_grad_enabled():
            return run()
        return SideStreamPredictions(run, (input_ids, *inputs, *named_inputs.values()), self.side_stream)


class SideStreamPredictions(TokenPredictions):
    """Predictions of a generator that runs on a side stream, together with its loss, when they are sampled.

    Autograd runs the backward pass on the same stream as the forward pass, so the generator's then overlaps with the
    discriminator's. Under torch.compile everything between the two switches of streams is one graph.
    """

    def __init__(
        self, run: Callable[[], TokenPredictions], inputs: tuple[Tensor | None, ...], side_stream: GeneratorStream
    ) -> None:
        self.run, self.inputs, self.side_stream = run, inputs, side_stream

    def sample(self, labels: Tensor, weights: Tensor, *arguments: Any) -> Tensor:
        self.side_stream.enter()
        predictions = self.run()
        sampled = predictions.sample(labels, weights, *arguments)
        self.loss = predictions.mlm_loss_sum(labels, weights)
        self.side_stream.join(*self.inputs, labels, weights, sampled)
        return sampled

    def mlm_loss_sum(self, labels: Tensor, weights: Tensor) -> Tensor:
        return self.loss


class Discriminator(nn.Module):
    """Classifies every token of corrupted text as original or replaced."""

    def __init__(self, config: EncoderConfig, auxiliary_heads: Iterable[AuxiliaryHead] = ()) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.head = RTDHead(config)
        self.auxiliary_heads = nn.ModuleDict({name: MLMHead(config) for name in auxiliary_heads})

    def predict_tokens(self, head: AuxiliaryHead, hidden: Tensor) -> TokenPredictions:
        """Predictions of an auxiliary head from hidden states [..., D]."""
        module = self.auxiliary_heads[head]
        assert isinstance(module, MLMHead)
        states = module(hidden, self.encoder.tied_projection())
        return TokenPredictions(hidden, states, self.encoder.embeddings.token_table(), module.bias)

    def forward(self, input_ids: Tensor, *inputs: Tensor | None, **named_inputs: Tensor | None) -> Tensor:
        """Logits [B, L], positive for replaced tokens; the arguments are those of `Encoder.forward`."""
        return self.head(self.encoder(input_ids, *inputs, **named_inputs))


def build_discriminator(config: ElectraConfig) -> Discriminator | MaskedLanguageModel | None:
    """The model that is trained on corrupted text, by its head."""
    if config.discriminator is None:
        return None
    if config.head == "rtd":
        return Discriminator(config.discriminator, config.auxiliary_heads)
    return {"mlm": MaskedLanguageModel, "copy_mlm": CopyMaskedLanguageModel}[config.head](config.discriminator)


def share_nothing(generator: Generator, discriminator: Discriminator | MaskedLanguageModel) -> None:
    """Two separate models."""


def share_embeddings(generator: Generator, discriminator: Discriminator | MaskedLanguageModel) -> None:
    """One set of token, position and segment embeddings with their LayerNorm, trained by both losses (the paper's way).

    In the modern style, the token embeddings."""
    discriminator.encoder.embeddings = generator.encoder.embeddings


def share_encoder(generator: Generator, discriminator: Discriminator | MaskedLanguageModel) -> None:
    """One encoder with two heads."""
    discriminator.encoder = generator.encoder


def share_disentangled_embeddings(generator: Generator, discriminator: Discriminator | MaskedLanguageModel) -> None:
    """The discriminator adds its own tables to the generator's, which get no gradient from it (DeBERTa-v3)."""
    encoder = discriminator.encoder
    encoder.embeddings = create_disentangled_embeddings(generator.encoder.embeddings, encoder.config)


SHARING: dict[Sharing, Callable[[Generator, Discriminator | MaskedLanguageModel], None]] = {
    "none": share_nothing,
    "embeddings": share_embeddings,
    "all": share_encoder,
    "disentangled": share_disentangled_embeddings,
}


class Electra(nn.Module):
    """The generator-discriminator pair; shared parameters are in one module that both have."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.config = config
        self.generator = Generator(config.generator) if config.generator else None
        self.discriminator = build_discriminator(config)
        self.baseline = BaselineHead(config.generator) if config.generator and config.has_baseline else None
        if self.generator is not None and self.discriminator is not None:
            SHARING[config.sharing](self.generator, self.discriminator)

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of this model where hooks of `forward` apply: FSDP gathers weights there."""
        return function(self, *arguments)

    def encoders(self) -> list[Encoder]:
        return [module for module in self.modules() if isinstance(module, Encoder)]

    def require_generator(self) -> Generator:
        if self.generator is None:
            raise ConfigError(
                "this model has no generator (runs with --generator uniform or unigram train none); use the folder of "
                "a generator (…ForMaskedLM), or import both: electra import --from … --generator FOLDER --output …"
            )
        return self.generator

    def require_discriminator(self) -> Discriminator:
        if not isinstance(self.discriminator, Discriminator):
            raise ConfigError(
                "this model has no discriminator, only a masked language model (electra fill and embed can use it); "
                "choose a model with a replaced token detection head"
            )
        return self.discriminator

    def require_mlm(self) -> MaskedLanguageModel:
        """The masked language model of Replace MLM, which is trained instead of a discriminator."""
        assert isinstance(self.discriminator, MaskedLanguageModel), "the model needs ElectraConfig(head='mlm')"
        return self.discriminator

    def require_copy_mlm(self) -> CopyMaskedLanguageModel:
        """The masked language model of All-Tokens MLM, which is trained instead of a discriminator."""
        assert isinstance(self.discriminator, CopyMaskedLanguageModel), "the model needs ElectraConfig(head='copy_mlm')"
        return self.discriminator

    def require_baseline(self) -> BaselineHead:
        assert self.baseline is not None, "the model needs ElectraConfig(has_baseline=True)"
        return self.baseline
