"""The training task of one phase: model, batches, objective and evaluation, for the trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from electra.data.loader import Batch, BatchLoader, Position, validation_batches
from electra.data.packing import LoaderConfig
from electra.data.shards import TOKENIZER, Shards
from electra.data.tokenizer import Vocabulary
from electra.kernels import dispatch
from electra.kernels.master_weights import MasterWeights
from electra.model.electra import Electra
from electra.model.encoder import Encoder
from electra.model.storage import write_model
from electra.objectives.evaluation import evaluate, held_out_loss
from electra.objectives.losses import Counts, Losses
from electra.objectives.objectives import OBJECTIVES, ObjectiveContext
from electra.pretraining.config import PretrainConfig
from electra.pretraining.initialize import copy_first_segment, set_sinusoidal_positions, set_unigram_output_bias
from electra.pretraining.phases import Phase
from electra.pretraining.samples import write_samples
from electra.training.hardware import choose_precision, peak_flops, uses_compile

UNIGRAM_TOKENS = 50_000_000


class PretrainingTask:
    """Model, batches, losses and evaluation of one phase."""

    def __init__(self, phase: Phase, shards: Shards, device: torch.device) -> None:
        self.phase, self.shards, self.device = phase, shards, device
        self.config = config = phase.config
        dispatch.set_kernels(config.hardware.kernels)
        self.model = Electra(phase.model).to(device)
        self.master_weights = MasterWeights(self.model, choose_precision(config.hardware.precision, device))
        self.is_compiled = uses_compile(config.hardware, device)
        self.captures_graph = self.is_compiled and device.type == "cuda"
        self.objective = OBJECTIVES[config.objective.name]
        self.loader = self.build_loader()
        self.batches = iter(self.loader)
        self.held_out = held_out_batches(config, shards, device)
        self.unigram = unigram_frequencies(shards, device)
        self.context = objective_context(config, shards.tokenizer.vocabulary, self.unigram)
        if self.captures_graph and self.objective.has_parallel_models and config.objective.generator == "model":
            from electra.kernels.side_stream import GeneratorStream  # imports torch's compiler: a second or two

            self.master_weights.model.require_generator().side_stream = GeneratorStream()
        if config.init.unigram_output_bias:
            set_unigram_output_bias(self.model, self.unigram)
        if config.init.sinusoidal_positions:
            set_sinusoidal_positions(self.model)
        self.trains_segments = config.loader.packing != "packed"
        losses = self.objective.losses
        self.compute_losses = torch.compile(losses, dynamic=False) if self.is_compiled else losses

    def build_loader(self) -> BatchLoader:
        """The loader of training batches, with cu_seqlens if the attention kernel uses them."""
        config = self.config
        encoders = [module for module in self.master_weights.model.modules() if isinstance(module, Encoder)]
        for encoder in encoders:
            encoder.activation_checkpointing = config.hardware.activation_checkpointing
        with self.master_weights.autocast():
            backends = [encoder.attention_backend(config.loader.length, has_cu_seqlens=True) for encoder in encoders]
        return BatchLoader(
            self.shards,
            config.loader,
            seed=config.seed,
            whole_word_masking=config.masking.whole_word_masking,
            device=self.device,
            with_cu_seqlens="varlen" in backends,
        )

    def next_batch(self) -> Batch:
        return next(self.batches)

    def close(self) -> None:
        """Stop the thread that reads batches ahead."""
        self.batches.close()

    def losses(self, batch: Batch) -> Losses:
        self.master_weights.sync()
        with self.master_weights.autocast():
            return self.compute_losses(self.master_weights.model, batch, self.context)

    def backward(self, loss: Tensor) -> None:
        self.master_weights.backward(loss)

    def counts(self, batch: Batch) -> Counts:
        return self.objective.counts(batch, self.context)

    def lr_scale(self, name: str) -> float:
        return 1.0

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics on held-out rows; also writes samples.md."""
        self.model.eval()
        with self.master_weights.autocast(), torch.no_grad():
            loss = held_out_loss(self.model, self.held_out, self.context)
            metrics = evaluate(self.model, self.held_out, self.unigram, self.context.vocabulary)
            frequencies = self.context.frequencies
            write_samples(self.config.output, self.model, self.held_out[0], self.shards.tokenizer, frequencies)
        self.model.train()
        return {"loss": loss} | metrics

    def throughput(self, tokens_per_second: float) -> dict[str, float]:
        """TFLOP/s, and on a known GPU the model FLOPs utilization (MFU)."""
        achieved = tokens_per_second * self.phase.flops_per_row() / self.config.loader.length
        peak = peak_flops(self.device)
        return {"tflops_per_second": achieved / 1e12} | ({"mfu": achieved / peak} if peak else {})

    def write_model(self, folder: Path) -> None:
        if not self.trains_segments:
            copy_first_segment(self.model)
        write_model(self.model, folder, self.shards.folder / TOKENIZER)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict() | {"phase": self.phase.index, "objective": self.config.objective.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["phase"] == self.phase.index:
            self.loader.load_state_dict(state)
        else:  # rows may have another length: start an epoch
            self.loader.position = Position(step=state["step"], epoch=state["epoch"] + 1)


def objective_context(config: PretrainConfig, vocabulary: Vocabulary, unigram: Tensor) -> ObjectiveContext:
    """What the objective is called with besides models and batches."""
    frequencies = {"model": None, "uniform": uniform_frequencies(vocabulary, unigram.device), "unigram": unigram}
    return ObjectiveContext(
        vocabulary=vocabulary,
        masking=config.masking,
        objective=config.objective,
        seed=config.seed,
        frequencies=frequencies[config.objective.generator],
    )


def unigram_frequencies(shards: Shards, device: torch.device) -> Tensor:
    """Relative frequencies of the tokens of the training text, special tokens excluded: [V]."""
    counts = np.zeros(shards.tokenizer.vocabulary.size, dtype=np.int64)
    for tokens in shards.tokens("train"):
        counts += np.bincount(tokens[: max(0, UNIGRAM_TOKENS - counts.sum())], minlength=len(counts))
    counts[list(shards.tokenizer.vocabulary.unmaskable())] = 0
    return torch.from_numpy(counts / max(1, counts.sum())).float().to(device)


def uniform_frequencies(vocabulary: Vocabulary, device: torch.device) -> Tensor:
    """Equal frequencies of all tokens that may be masked: [V]."""
    frequencies = torch.ones(vocabulary.size, device=device)
    frequencies[list(vocabulary.unmaskable())] = 0
    return frequencies / frequencies.sum()


def held_out_batches(config: PretrainConfig, shards: Shards, device: torch.device) -> list[Batch]:
    """`config.evaluation_rows` rows, evenly spread over the validation split."""
    loader, whole_words = held_out_loader(config), config.masking.whole_word_masking
    batches = list(validation_batches(shards, loader, whole_word_masking=whole_words, device=device))
    count = min(len(batches), max_held_out_rows(config) // loader.batch_size)
    return [batches[index * len(batches) // count] for index in range(count)]


def held_out_loader(config: PretrainConfig) -> LoaderConfig:
    """How held-out rows are packed, the same for all runs: packed, at most 128 tokens."""
    return LoaderConfig(length=min(128, config.loader.length), batch_size=min(32, config.evaluation_rows))


def max_held_out_rows(config: PretrainConfig) -> int:
    """The number of rows to evaluate on if there are enough: `config.evaluation_rows` rounded up to whole batches."""
    rows = held_out_loader(config).batch_size
    return -(-config.evaluation_rows // rows) * rows
