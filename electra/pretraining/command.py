"""`electra pretrain`: train a generator and a discriminator on shards, phase by phase."""

import gc
import math
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from electra.data.shards import Shards, open_shards
from electra.data.tokenizer import read_trained_length
from electra.errors import ConfigError
from electra.plotting import plot_pretraining_curves
from electra.pretraining.checks import (
    build_run_record,
    check_branch_matches_trunk,
    check_discriminator_init,
    check_new_run_settings,
    find_resume_checkpoint,
    write_extended_budget,
)
from electra.pretraining.config import PretrainConfig, read_pretraining_state
from electra.pretraining.describe import RunEstimate, assess_run, estimate_run, run_warnings, summarize_run
from electra.pretraining.initialize import (
    InitialWeights,
    has_trained_segments,
    load_previous_phase_weights,
    pair_config,
    read_initial_weights,
)
from electra.pretraining.phases import Phase, plan_phases, read_phase_index
from electra.pretraining.task import PretrainingTask
from electra.runfolder import CONFIG, checkpoint_folders, lock_folder, write_stored
from electra.training.checkpoint import find_model_folder
from electra.training.distributed import World, join_ranks
from electra.training.hardware import should_compile
from electra.training.logging import METRICS_FILE, TrainResult, check_not_diverged, check_tracker, read_metrics
from electra.training.trainer import Trainer


def pretrain(config: PretrainConfig) -> TrainResult | RunEstimate:
    """Pre-train a model and write its run folder; a dry run returns an estimate instead."""
    with join_ranks(config.hardware.device, config.resume) as world:
        shards, device = open_shards(config.data), world.device
        should_compile(config.hardware, device)  # raises if there is no compiler
        check_tracker(config.trainer.track, config.trainer.tensorboard)
        phases = plan_and_check_phases(config, shards)
        for phase in phases:
            world.check_batch_size(phase.config.loader.batch_size, phase.config.trainer.micro_batches)
        for warning in run_warnings(config, phases, shards, device):
            world.print(warning)
        if config.dry_run:
            if world.size > 1:
                raise ConfigError(
                    f"--dry-run needs a single process, not {world.size} ranks; start it without torchrun"
                )
            read_initial_weights(config, phases[0].model)  # raises where the run would
            return estimate_run(config, phases, shards, device)
        with lock_folder(config.output) if world.is_main else nullcontext():
            return train_phases(config, phases, shards, world)


def plan_and_check_phases(config: PretrainConfig, shards: Shards) -> list[Phase]:
    """The phases of a run; raises a ConfigError for settings that contradict each other."""
    is_new = not config.resumes_checkpoint()
    if is_new:
        check_new_run_settings(config, shards)
    phases = plan_phases(config, pair_config(config, shards))
    check_discriminator_init(phases)
    if is_new and config.init.branch_from is not None:
        check_branch_matches_trunk(config, phases[0].model, shards)
    return phases


def train_phases(config: PretrainConfig, phases: list[Phase], shards: Shards, world: World) -> TrainResult:
    """Train all phases, or those after the last checkpoint."""
    record = build_run_record(config, phases, shards)
    checkpoint = world.broadcast(find_resume_checkpoint(config, record) if world.is_main else None)
    weights = read_initial_weights(config, phases[0].model)
    world.print(*summarize_run(config, phases))
    for phase in phases[0 if checkpoint is None else read_phase_index(checkpoint, phases) :]:
        if len(phases) > 1:
            name = phase.config.objective.name
            world.print(f"phase {phase.index + 1} of {len(phases)}: {name}")
        torch.manual_seed(config.seed)
        with closing(PretrainingTask(phase, shards, world)) as task:  # raises before anything is written
            if world.is_main and checkpoint_folders(config.output):
                write_extended_budget(config)
            elif world.is_main:
                write_stored(config.output / CONFIG, asdict(record))
            result = train_phase(task, checkpoint, weights)
        checkpoint, weights = Path(result.checkpoint), None
        del task
        gc.collect()  # the trainer and its CUDA graphs are in reference cycles, and the next phase needs their memory
        if world.device.type == "cuda":
            torch.cuda.empty_cache()  # DeviceTokens asks the driver how much is free
        if result.signal:
            break
    if not world.is_main:
        return result
    metrics = read_metrics(config.output / METRICS_FILE)
    plot_pretraining_curves(config.output, metrics, config.objective.loss_weights())
    if result.signal:
        return result
    check_final_losses(metrics, shards.tokenizer.vocabulary.size, result.checkpoint)
    epochs = result.tokens / max(1, shards.index.totals_by_split("tokens")["train"])
    return replace(result, assessment=assess_run(metrics, epochs, result.run))


def train_phase(task: PretrainingTask, checkpoint: Path | None, weights: InitialWeights | None) -> TrainResult:
    """Train one phase from a checkpoint of it or of the previous phase, a trunk, initial weights, or from scratch."""
    config, trainer = task.config, build_trainer(task)
    if checkpoint is not None:
        restore_from_checkpoint(checkpoint, trainer, task)
    elif config.init.branch_from is not None:
        trainer.start_branch(find_model_folder(config.init.branch_from))
    elif weights is not None:
        weights.load_into(task.unsharded_model)
        task.scatter_weights()
    if source := config.init.branch_from or config.init.model or checkpoint:
        task.gather_weights()
        task.trains_segments |= has_trained_segments(task.unsharded_model)
        positions = max(encoder.positions for encoder in task.phase.model.encoder_configs().values())
        trained_length = read_trained_length(checkpoint or find_model_folder(source)) or positions
        task.trained_length = max(task.trained_length, trained_length)
    if task.is_compiled and not trainer.is_finished():
        task.world.print("compiling the first step takes about a minute, less with a warm cache")
    return trainer.train()


def build_trainer(task: PretrainingTask) -> Trainer:
    """The trainer of a task's phase."""
    config, phase = task.config, task.phase
    return Trainer(
        task,
        config.optimizer,
        config.trainer,
        phase.schedule_budget,
        config.output,
        seed=config.seed,
        cuda_graphs=task.captures_graph,
        quiet=not task.world.is_main,
        world=task.world,
        gradients=task.gradients,
        stop_at=phase.stop_at,
        settings=asdict(config),
    )


def restore_from_checkpoint(checkpoint: Path, trainer: Trainer, task: PretrainingTask) -> None:
    """Continue a phase from its checkpoint, or start it from the last checkpoint of the previous phase."""
    is_previous = read_pretraining_state(checkpoint).phase < task.phase.index
    if is_previous and task.phase.starts_optimizer:
        load_previous_phase_weights(task.unsharded_model, checkpoint, task.config)
        task.scatter_weights()
        trainer.continue_with_new_optimizer(checkpoint)
    else:
        trainer.resume(checkpoint)
        if is_previous:
            trainer.state.best_loss = None  # losses of phases are not comparable: masks may differ


def check_final_losses(metrics: list[dict[str, Any]], vocab_size: int, checkpoint: str) -> None:
    """Raise a TrainingError if the last evaluation of a finished run shows that it diverged."""
    evaluation: dict[str, Any] = next((line for line in reversed(metrics) if line["kind"] == "validation"), {})
    token_loss = math.log(vocab_size)
    uniform = {"mlm_loss": token_loss, "replace_mlm_loss": token_loss, "rtd_loss": math.log(2), "loss": math.inf}
    for name, uniform_loss in uniform.items():
        if name in evaluation:
            check_not_diverged(f"held-out {name}", evaluation[name], uniform_loss, f"the checkpoint is {checkpoint}")
