"""The training loop: knows batches, losses and metrics, but nothing about masking, tasks or vocabularies."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from electra.errors import ConfigError, TrainingError
from electra.formatting import format_duration
from electra.kernels.cuda_graph import CaptureError, GraphedStep
from electra.kernels.dispatch import disable_largest_kernel, is_out_of_shared_memory
from electra.kernels.master_weights import MasterWeights
from electra.objectives.losses import Counts, Losses, total_loss
from electra.runfolder import CHECKPOINTS, checkpoint_folders
from electra.signals import collect_stop_signals, exit_on_error_after, wait_for_file
from electra.training.checkpoint import (
    CheckpointState,
    TrainState,
    checkpoint_name,
    load_checkpoint,
    optimizer_state_tensors,
    prune_checkpoints,
    read_training_state,
    save_checkpoint,
)
from electra.training.config import Budget, OptimizerConfig, TrainerConfig
from electra.training.distributed import DistributedStep, GradientBuffer, World, gather_shards, seed_dropout
from electra.training.hardware import WaitPolicy, is_out_of_memory
from electra.training.logging import MetricsLogger, ProgressBar, RunningAverages, Tracker, TrainResult
from electra.training.optimizer import SCHEDULES, LossScaler, build_optimizers

REPORT_SECONDS = 10.0  # of training between lines on the screen
SAVE_SECONDS = 300.0  # of training between checkpoints, at most


class TrainingBatch(Protocol):
    """What the trainer needs of a batch."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    def micro_batches(self, count: int) -> list[Any]: ...


class TrainingTask(Protocol):
    """What the trainer trains: a model with its batches, losses and evaluation."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def master_weights(self) -> MasterWeights: ...  # of the model; accumulates gradients in its parameters
    def next_batch(self) -> TrainingBatch: ...
    def losses(self, batch: Any) -> Losses: ...
    def loss_counts(self, batch: Any) -> Counts: ...  # the denominators of the losses, computed without the model
    def lr_scale(self, parameter_name: str) -> float: ...  # multiplies the learning rate of that parameter
    def evaluate(self) -> dict[str, float]: ...  # "loss" selects the best checkpoint
    def should_stop(self) -> bool: ...  # before the budget is used up
    def describe_metrics(self, metrics: dict[str, float]) -> str: ...  # those of `evaluate`, in words
    def speed_metrics(self, tokens_per_second: float) -> dict[str, float]: ...  # further metrics of speed
    def gather_weights(self) -> None: ...  # of a sharded model, on all ranks, before one of them calls `write_model`
    def write_model(self, folder: Path) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...  # JSON, such as the position in the data
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Trainer:
    """Trains a task until its budget is used up, with logging, evaluation and checkpoints."""

    def __init__(
        self,
        task: TrainingTask,
        optimizer_config: OptimizerConfig,
        config: TrainerConfig,
        budget: Budget,
        folder: Path,
        *,
        seed: int = 0,
        cuda_graphs: bool = False,  # for batches of few different shapes
        quiet: bool = False,
        stop_at: Budget | None = None,  # stop before the end of the budget, which the schedule covers
        world: World | None = None,  # the ranks, which share the rows of each batch
        gradients: GradientBuffer | None = None,  # of the task's model, if the world is distributed
        settings: Mapping[str, Any] | None = None,  # of the command, for a tracker
    ) -> None:
        self.task = task
        self.optimizer_config = optimizer_config
        self.config = config
        self.budget = budget
        self.stop_at = stop_at or budget
        self.folder = folder
        self.seed, self.quiet, self.cuda_graphs = seed, quiet, cuda_graphs
        device = next(task.model.parameters()).device
        self.world = world or World(device)
        self.gradients = gradients
        self.settings = settings or {}
        self.optimizers = build_optimizers(task.model, optimizer_config, task.lr_scale)
        self.micro_batches = config.micro_batches  # more if they do not fit into memory
        self.loss_scaler = LossScaler(device) if task.master_weights.needs_loss_scaling else None
        self.state = TrainState()
        self.metrics: dict[str, float] = {}  # of the last evaluation
        self.evaluated_step = -1
        self.averages = RunningAverages()  # since the last line of metrics.jsonl
        self.screen_averages = RunningAverages()  # since the last line on the screen
        self.screen_interval = math.inf if quiet else 0.0  # seconds of training before the next one
        self.bar = ProgressBar(quiet)
        self.wait_policy = WaitPolicy(device)
        self.received: list[int] = []  # signals to this rank
        self.is_warm = False  # the first step compiles and fills caches; its time does not count
        self.nonfinite_run = torch.zeros(2, device=device)  # consecutive non-finite steps: current, longest so far

    def resume(self, checkpoint: Path) -> None:
        """Continue from a checkpoint."""
        state = load_checkpoint(checkpoint, self.task.model, self.optimizers)
        self.task.load_state_dict(state.task)
        self.state = state.trainer

    def start_branch(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of another run with a budget that starts there."""
        self.resume(checkpoint)
        self.restart_budget()

    def continue_with_new_optimizer(self, checkpoint: Path) -> None:
        """Continue the data and the step count of a checkpoint with new optimizers and a budget that starts there."""
        state = read_training_state(checkpoint)
        self.task.load_state_dict(state.task)
        self.state = state.trainer
        self.restart_budget()

    def restart_budget(self) -> None:
        self.state.best_checkpoint = self.state.best_loss = None
        self.state.start_step, self.state.start_seconds = self.state.step, self.state.seconds

    def train(self) -> TrainResult:
        """Train until the budget is used up or SIGTERM, SIGHUP or SIGINT arrives, and save a checkpoint."""
        if self.world.is_distributed:
            self.world.check_same_start(self.task.model, self.state.step)
        self.logger = self.open_logger() if self.world.is_main else None
        evaluated_before = self.world.broadcast(self.logger and self.logger.evaluated_step)
        self.saved_at = self.state.seconds
        self.run_step = self.build_step()
        with collect_stop_signals(self.quiet, self.world.is_distributed) as self.received, self.bar, self.wait_policy:
            signals = self.signals = [] if self.world.is_distributed else self.received
            if not self.is_finished():
                self.bar.print_line(f"training from step {self.state.step:,}")
            while not self.is_finished() and not signals:
                with exit_on_error_after(() if self.is_warm else self.received):  # Ctrl-C reaches compilers, too
                    self.step()
                self.bar.set_fraction(self.budget_fraction_used())
                if self.screen_averages.seconds > self.screen_interval:
                    self.show_progress()
                if self.is_due(self.config.log_every):
                    self.log_metrics()
                if self.is_due(self.config.evaluate_every):
                    self.evaluate()
                if self.is_save_due():
                    self.save_checkpoint()
            if self.is_finished() and not signals:
                if self.is_warm and not self.is_due(self.config.log_every):
                    self.log_metrics()
                if self.state.step not in (self.evaluated_step, evaluated_before):  # perhaps stopped in the last step
                    self.evaluate()
            checkpoint = self.save_checkpoint()
        if self.logger is not None:
            self.logger.close()
        self.world.barrier()  # the checkpoint is written
        return self.build_result(checkpoint, signals[0] if signals else 0)

    def open_logger(self) -> MetricsLogger:
        tracker = None if self.config.track == "none" else Tracker(self.config.track, self.folder, self.settings)
        return MetricsLogger(self.folder, self.state.step, self.config.tensorboard, tracker)

    def budget_fraction_used(self, ahead_steps: float = 0.0) -> float:
        """Fraction of the budget used up, `ahead_steps` steps from now."""
        steps, seconds = self.steps_and_seconds_used()
        return self.budget.fraction_used(steps + ahead_steps, seconds)

    def steps_and_seconds_used(self) -> tuple[int, float]:
        """Steps and seconds since the start of the budget."""
        return self.state.step - self.state.start_step, self.state.seconds - self.state.start_seconds

    def is_finished(self) -> bool:
        return self.stop_at.fraction_used(*self.steps_and_seconds_used()) >= 1 or self.task.should_stop()

    def is_due(self, every: int) -> bool:
        return self.state.step % every == 0

    def is_save_due(self) -> bool:
        """Whether to save a checkpoint before the last one, which is saved after the last evaluation."""
        is_old = self.state.seconds - self.saved_at >= SAVE_SECONDS
        return (is_old or self.is_due(self.config.save_every)) and not self.is_finished()

    def step(self) -> None:
        """Train on one batch."""
        start = time.perf_counter()
        batch = self.task.next_batch()
        seed_dropout(self.seed, self.state.step, self.world.rank)
        self.set_learning_rate()
        metrics = self.run_and_divide(batch)
        tokens = batch.num_tokens * self.world.size
        self.state.step += 1
        self.state.tokens += tokens
        seconds = time.perf_counter() - start if self.is_warm else None
        self.state.seconds += seconds or 0.0
        for averages in (self.averages, self.screen_averages):
            averages.add_step(metrics, tokens, seconds)
        if not self.is_warm:
            wait_for_file(self.config.start_file, self.received)
        self.is_warm = True
        self.wait_policy.update()
        if not self.cuda_graphs:  # with CUDA graphs, reading the device each step would stall it
            self.check_nonfinite_steps()
        if self.world.is_distributed:
            self.agree_with_ranks()

    def run_and_divide(self, batch: TrainingBatch) -> dict[str, Tensor]:
        """Run a step, in more micro-batches if it does not fit into memory, which is reported once."""
        micro_batches = self.micro_batches
        try:
            metrics = self.run_step(batch)
        except CaptureError:
            if self.gradients is not None:  # the other ranks do not repeat the step
                raise ConfigError(f"not enough memory; use --micro-batches {2 * self.micro_batches}") from None
            self.divide_batches(batch.num_rows)
            self.task.master_weights.discard_gradients()
            self.run_step = self.build_step()
            metrics = self.run_step(batch)
        if self.micro_batches > micro_batches:
            self.bar.print_line(
                f"a batch of {batch.num_rows} rows does not fit into the device's memory: divided into "
                f"{self.micro_batches} micro-batches, with equal results (--micro-batches {self.micro_batches})"
            )
        return metrics

    def agree_with_ranks(self) -> None:
        """Stop if any rank received a signal; budgets, schedules and intervals follow the clock of rank 0."""
        received = next(iter(self.received), 0)
        signal, self.state.seconds = self.world.agree(received, self.state.seconds)
        if signal:
            self.signals.append(signal)

    def set_learning_rate(self) -> None:
        self.learning_rate = self.optimizer_config.learning_rate * self.schedule_factor()
        for group in self.parameter_groups():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.learning_rate * group["lr_scale"])
            else:
                group["lr"] = self.learning_rate * group["lr_scale"]

    def schedule_factor(self) -> float:
        """The schedule at the middle of this step; with a budget in seconds, at its start, where a warm-up gives 0."""
        config = self.optimizer_config
        schedule = SCHEDULES[config.schedule]
        progress = self.budget_fraction_used(ahead_steps=0.5)
        if config.warmup < 1:
            return schedule(progress, config.warmup, config)
        if self.budget.steps:
            return schedule(progress, config.warmup / self.budget.steps, config)
        warmup_factor = min(1.0, (self.state.step + 0.5 - self.state.start_step) / config.warmup)  # budget in seconds
        return warmup_factor * schedule(progress, 0.0, config)

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def build_step(self) -> Callable[[Any], dict[str, Tensor]]:
        """A training step of one rank or several; CUDA graphs read learning rates from the device."""
        for group in self.parameter_groups() if self.cuda_graphs else ():
            group["lr"] = torch.as_tensor(group["lr"], device=group["params"][0].device)
        wrap: Callable[[Any], Any] = GraphedStep if self.cuda_graphs else lambda part: part
        if self.gradients is None:
            return wrap(self.compute_step)
        return DistributedStep(
            self.world, self.gradients, self.task.loss_counts, self.forward_backward, self.update_weights, wrap
        )

    def compute_step(self, batch: TrainingBatch) -> dict[str, Tensor]:
        """Forward, backward and update; returns the metrics of the step."""
        return self.update_weights(self.forward_backward(batch))

    def forward_backward(self, batch: TrainingBatch) -> dict[str, Tensor]:
        """Compute gradients and return the losses; a batch that does not fit into memory is divided further, and
        kernels that need more shared memory than the GPU has are switched off."""
        while True:
            try:
                return self.accumulate_gradients(batch)
            except Exception as error:
                is_capturing = self.cuda_graphs and torch.cuda.is_current_stream_capturing()
                is_memory = is_out_of_memory(error)
                is_sharded = self.gradients is not None and self.gradients.is_sharded
                if is_memory and is_sharded:  # the other ranks wait for this one in the middle of a batch
                    raise ConfigError(f"not enough memory; use --micro-batches {2 * self.micro_batches}") from None
                if is_capturing or not (is_memory or is_out_of_shared_memory(error)):
                    raise
                kernel = None if is_memory else disable_largest_kernel()
                if not is_memory and kernel is None:
                    raise
            if is_memory:  # outside of `except`, which keeps the tensors of the failed attempt
                self.divide_batches(batch.num_rows)
            else:
                self.bar.print_line(f"kernel {kernel}: this GPU has too little shared memory, PyTorch's is used")
            self.task.master_weights.discard_gradients()
            seed_dropout(self.seed, self.state.step, self.world.rank)

    def divide_batches(self, rows: int) -> None:
        """Divide batches into at least twice as many micro-batches."""
        if self.config.start_file is not None and not self.config.start_file.exists():
            raise ConfigError("no memory for a second run beside the one that is trained; start it after that one")
        count = next((each for each in range(2 * self.micro_batches, rows + 1) if rows % each == 0), None)
        if count is None:
            raise ConfigError(
                f"not even {self.micro_batches} micro-batches of a batch of {rows} rows fit into the device's memory; "
                "use a smaller model, shorter rows or --activation-checkpointing"
            )
        self.micro_batches = count
        torch.cuda.empty_cache()

    def accumulate_gradients(self, batch: TrainingBatch) -> dict[str, Tensor]:
        """Accumulate the gradients of micro-batches, normalized by the counts of the whole batch."""
        counts = self.task.loss_counts(batch) if self.micro_batches > 1 else None
        if self.gradients is not None:
            counts = self.gradients.counts()  # of all ranks
        means: dict[str, Tensor] = {}
        for micro_batch in batch.micro_batches(self.micro_batches):
            losses = self.task.losses(micro_batch)
            total = total_loss(losses, counts)
            self.task.master_weights.backward(total if self.loss_scaler is None else total * self.loss_scaler.scale)
            for name, loss in losses.items():
                mean = loss.sum.detach() / (loss.count if counts is None else counts[name]).clamp(min=1)
                means[name] = means[name] + mean if name in means else mean
        return means

    def update_weights(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """Clip gradients and update the weights, unless a loss or the gradient is not finite."""
        gradients = [parameter.grad for parameter in self.task.model.parameters() if parameter.grad is not None]
        loss_scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        norm = gather_shards(nn.utils.get_total_norm(gradients)) / loss_scale
        metrics = losses | {"gradient_norm": norm}
        is_finite = torch.isfinite(torch.stack(list(metrics.values()))).all()
        max_norm = self.optimizer_config.max_grad_norm or math.inf
        if self.cuda_graphs:
            scale = (norm / max_norm).clamp(min=1) * loss_scale
            for optimizer in self.optimizers:  # fused optimizers divide by the scale, and skip the step on the device
                optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]  # missing in torch's types
                optimizer.grad_scale = scale  # type: ignore[attr-defined]  # likewise
                optimizer.step()
        elif is_finite:
            if self.loss_scaler is not None:
                torch._foreach_div_(gradients, loss_scale)
            nn.utils.clip_grads_with_norm_(self.task.model.parameters(), max_norm, norm)
            for optimizer in self.optimizers:
                optimizer.step()
        self.task.model.zero_grad()
        if self.loss_scaler is not None:
            self.loss_scaler.update(is_finite)
        self.nonfinite_run[0].add_(1).mul_(~is_finite)
        self.nonfinite_run[1].copy_(self.nonfinite_run.max())
        metrics = {name: value.where(is_finite, 0.0) for name, value in metrics.items()}
        return metrics | {"nonfinite_steps": (~is_finite).float()}

    def check_nonfinite_steps(self) -> None:
        """Raise after too many consecutive non-finite steps."""
        count = int(self.nonfinite_run[1].item())
        if count >= self.config.max_nonfinite_steps:
            checkpoints = checkpoint_folders(self.folder)
            last = f"the last checkpoint is {checkpoints[-1]}" if checkpoints else "no checkpoint was saved before"
            raise TrainingError(
                f"step {self.state.step}: loss or gradient not finite in {count} consecutive steps; {last}; "
                "try a lower --learning-rate or a longer --warmup"
            )

    def log_metrics(self) -> None:
        """Write the training metrics since the last line."""
        self.check_nonfinite_steps()
        state = self.state
        state.nonfinite_steps = self.count_nonfinite_steps()
        tokens_per_second = self.averages.tokens_per_second()
        metrics = {
            **self.averages.means(),
            "learning_rate": self.learning_rate,
            "tokens": state.tokens,
            "seconds": state.seconds,
            "nonfinite_steps": state.nonfinite_steps,
            "tokens_per_second": tokens_per_second,
            **self.task.speed_metrics(tokens_per_second),
        }
        self.write_metrics("train", metrics)
        self.averages = RunningAverages()

    def write_metrics(self, kind: str, metrics: dict[str, float]) -> None:
        if self.logger is not None:
            self.logger.write(kind, self.state.step, metrics)

    def count_nonfinite_steps(self) -> int:
        """The number of skipped steps, also those that are not logged yet."""
        return self.state.nonfinite_steps + self.averages.count_nonfinite_steps()

    def show_progress(self) -> None:
        """Show progress, losses and speed since the last line on the screen."""
        averages = self.screen_averages
        left = format_duration(self.budget.minutes_left(*self.steps_and_seconds_used(), averages.seconds_per_step()))
        progress = f"step {self.state.step:,} ({self.budget_fraction_used():.0%}, {left} left)"
        losses = [f"{name} {value:.3f}" for name, value in averages.means().items() if name != "gradient_norm"]
        self.bar.show_status(progress, "  ".join([*losses, f"{averages.tokens_per_second():,.0f} tokens/s"]))
        self.screen_averages = RunningAverages()
        self.screen_interval = REPORT_SECONDS

    def evaluate(self) -> None:
        """Evaluate on held-out data."""
        self.metrics = self.task.evaluate()
        self.evaluated_step = self.state.step
        self.write_metrics("validation", self.metrics)
        if not self.is_finished():  # the result shows the last ones
            loss, lowest = self.metrics["loss"], self.state.best_loss
            text = f"loss {loss:.3f}" + (f" (lowest: {lowest:.3f})" if lowest is not None and loss > lowest else "")
            description = self.task.describe_metrics(self.metrics)
            self.bar.print_line(f"step {self.state.step:,}, evaluation: {text}, {description}")

    def save_checkpoint(self) -> Path:
        """Write a checkpoint, and remove those that are neither recent nor best."""
        state, self.saved_at = self.state, self.state.seconds
        best_loss = math.inf if state.best_loss is None else state.best_loss
        if self.evaluated_step == state.step and self.metrics["loss"] < best_loss:  # False for NaN
            state.best_checkpoint = checkpoint_name(state.step)
            state.best_loss = self.metrics["loss"]
        self.task.gather_weights()
        optimizer_states = optimizer_state_tensors(self.task.model, self.optimizers)
        if not self.world.is_main:
            return self.folder / CHECKPOINTS / checkpoint_name(state.step)
        content = CheckpointState(replace(state, nonfinite_steps=self.count_nonfinite_steps()), self.task.state_dict())
        folder = save_checkpoint(self.folder, optimizer_states, content, self.task.write_model)
        prune_checkpoints(self.folder, self.config.keep_checkpoints, state.best_checkpoint)
        return folder

    def build_result(self, checkpoint: Path, signal: int) -> TrainResult:
        return TrainResult(
            run=str(self.folder),
            checkpoint=str(checkpoint),
            step=self.state.step,
            tokens=self.state.tokens,
            seconds=self.state.seconds,
            nonfinite_steps=self.count_nonfinite_steps(),
            metrics=self.metrics,
            signal=signal,
            was_finished=not signal and not self.is_warm,
        )
