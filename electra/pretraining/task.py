"""The training task of one phase: model, batches, objective and evaluation, for the trainer."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from electra.data.loader import Batch, BatchLoader, LoaderPosition
from electra.data.shards import TOKENIZER, Shards
from electra.kernels import dispatch
from electra.kernels.master_weights import MasterWeights
from electra.model.electra import Electra
from electra.model.storage import write_model_into
from electra.objectives.evaluation import describe_metrics, evaluate, held_out_loss
from electra.objectives.objectives import OBJECTIVES, Counts, Loss, Losses, ObjectiveContext
from electra.pretraining.corrupt import read_corrupted_rows
from electra.pretraining.held_out import held_out_batches, write_samples_page
from electra.pretraining.initialize import copy_first_segment_embedding, set_initial_weights
from electra.pretraining.phases import Phase
from electra.pretraining.token_counts import unigram_frequencies
from electra.training.distributed import GradientBuffer, World, copy_parameters, shard_model
from electra.training.hardware import choose_dtype, is_out_of_memory, peak_flops_per_second, should_compile


class PretrainingTask:
    """Model, batches, losses and evaluation of one phase."""

    def __init__(self, phase: Phase, shards: Shards, world: World) -> None:
        device = world.device
        self.phase, self.shards, self.world, self.device = phase, shards, world, device
        self.config = config = phase.config
        is_sharded, dtype = config.shard_weights, choose_dtype(config.hardware.precision, device)
        dispatch.set_kernel_mode("off" if is_sharded else config.hardware.kernels)
        self.model = Electra(phase.model).to("cpu" if is_sharded else device)
        parameters = [] if is_sharded else list(self.model.parameters())
        self.gradients = GradientBuffer(parameters, device) if world.is_distributed else None
        views = None if self.gradients is None else self.gradients.views
        self.master_weights = MasterWeights(self.model, dtype, views, is_sharded)
        self.is_compiled = not is_sharded and should_compile(config.hardware, device)
        self.captures_graph = self.is_compiled and device.type == "cuda"
        self.objective = OBJECTIVES[config.objective.name]
        self.loader = self.build_loader()
        self.batches = iter(self.loader)
        self.held_out = held_out_batches(config, shards, device)
        self.unigram = unigram_frequencies(shards, device)
        positions = min(encoder.positions for encoder in phase.model.encoder_configs().values())
        self.corrupted_rows = config.corrupted_rows and read_corrupted_rows(config.corrupted_rows, shards, positions)
        self.context = self.build_objective_context()
        if self.captures_graph and self.objective.has_independent_backward and config.objective.generator == "model":
            self.master_weights.forward_model.require_generator().use_side_stream()
        is_new = phase.index == 0 and not config.starts_from_weights()
        set_initial_weights(self.model, config.init, shards, self.unigram, is_new)
        self.trains_segments = config.loader.packing != "packed"
        if not self.trains_segments:
            copy_first_segment_embedding(self.model)  # so that `has_trained_segments` is not misled by random numbers
        self.trained_length = config.loader.length
        losses = self.objective.losses
        self.compute_losses = torch.compile(losses, dynamic=False) if self.is_compiled else losses
        self.unsharded_model = self.model
        """The model with all weights, for evaluation and checkpoints: a copy of a sharded one, see `gather_weights`."""
        if is_sharded:
            self.unsharded_model = deepcopy(self.model)
            layers = {layer: None for encoder in self.model.encoders() for layer in encoder.layers}  # perhaps shared
            shard_model(self.model, layers, world, dtype)

    def build_loader(self) -> BatchLoader:
        """The loader of training batches, with cu_seqlens if the attention kernel uses them."""
        config = self.config
        encoders = self.master_weights.forward_model.encoders()
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
            rank=self.world.rank,
            world_size=self.world.size,
        )

    def build_objective_context(self) -> ObjectiveContext:
        """What the objective is called with besides models and batches."""
        config, vocabulary = self.config, self.shards.tokenizer.vocabulary
        uniform = torch.ones_like(self.unigram)  # [V]
        uniform[list(vocabulary.unmaskable_ids())] = 0
        frequencies = {"model": None, "uniform": uniform / uniform.sum(), "unigram": self.unigram}
        return ObjectiveContext(
            vocabulary=vocabulary,
            masking=config.masking,
            objective=config.objective,
            seed=config.seed,
            frequencies=frequencies[config.objective.generator],
        )

    def next_batch(self) -> Batch:
        return next(self.batches)

    def close(self) -> None:
        """Stop the thread that reads batches ahead."""
        self.batches.close()

    def losses(self, batch: Batch) -> Losses:
        self.master_weights.update_half_precision_weights()
        with self.master_weights.autocast():
            if self.config.shard_weights:
                return {name: Loss(*fields) for name, fields in self.model(self.flat_losses, batch).items()}
            return self.compute_losses(self.master_weights.forward_model, batch, self.context)

    def flat_losses(self, model: Electra, batch: Batch) -> dict[str, tuple[Tensor, Tensor, float]]:
        """The losses as tuples, in which FSDP finds the tensors that gradients come from."""
        losses = self.compute_losses(model, batch, self.context)
        return {name: (loss.sum, loss.count, loss.weight) for name, loss in losses.items()}

    def loss_counts(self, batch: Batch) -> Counts:
        return self.objective.count_predictions(batch, self.context)

    def lr_scale(self, parameter_name: str) -> float:
        return 1.0

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics on held-out rows, in smaller batches if they do not fit into memory; writes samples.md."""
        while True:
            try:
                return self.evaluate_batches()
            except Exception as error:
                is_divisible = not self.world.is_distributed and all(batch.num_rows % 2 == 0 for batch in self.held_out)
                if not is_out_of_memory(error) or not is_divisible:
                    raise
            self.held_out = [half for batch in self.held_out for half in batch.micro_batches(2)]
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def evaluate_batches(self) -> dict[str, float]:
        self.gather_weights()
        model = self.unsharded_model.to(self.device).eval()
        world, tokenizer, batches = self.world, self.shards.tokenizer, self.world.share(self.held_out)
        with self.master_weights.autocast(), torch.no_grad():
            loss = held_out_loss(model, batches, self.context, world.gather)
            metrics = evaluate(model, batches, self.unigram, self.context.vocabulary, world.gather)
            if self.corrupted_rows:
                metrics |= self.corrupted_rows.evaluate(model, tokenizer, world)
            if world.is_main:
                frequencies = self.context.frequencies
                write_samples_page(self.config.output, model, self.held_out[0], tokenizer, frequencies)
        model.train()
        if model is not self.model:
            model.cpu()
        return {"loss": loss} | metrics

    def gather_weights(self) -> None:
        """Copy the weights of a sharded model to `unsharded_model`; all ranks must call this."""
        if self.unsharded_model is not self.model:
            copy_parameters(self.model, self.unsharded_model)

    def scatter_weights(self) -> None:
        """Copy the weights of `unsharded_model` to a sharded model."""
        if self.unsharded_model is not self.model:
            copy_parameters(self.unsharded_model, self.model)

    def describe_metrics(self, metrics: dict[str, float]) -> str:
        return describe_metrics(metrics)

    def should_stop(self) -> bool:
        return False

    def speed_metrics(self, tokens_per_second: float) -> dict[str, float]:
        """TFLOP/s, and on a known GPU the model FLOPs utilization (MFU)."""
        achieved = tokens_per_second * self.phase.flops_per_step() / self.phase.tokens_per_step()
        peak = peak_flops_per_second(self.device)
        utilization = {"mfu": achieved / (peak * self.world.size)} if peak else {}
        return {"tflops_per_second": achieved / 1e12} | utilization

    def write_model(self, folder: Path) -> None:
        if not self.trains_segments:
            copy_first_segment_embedding(self.unsharded_model)
        write_model_into(self.unsharded_model, folder, self.shards.folder / TOKENIZER, self.trained_length)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict() | {"phase": self.phase.index, "objective": self.config.objective.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = self.loader.row_order_settings()
        if all(state[name] == rows[name] for name in rows):
            self.loader.load_state_dict(state)
        else:  # the position refers to other rows, of a trunk or an earlier phase: start an epoch
            self.loader.position = LoaderPosition(step=state["step"], epoch=state["epoch"] + 1)
