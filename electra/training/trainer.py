"""The loop: one step, then named questions. It knows nothing of masks, tasks or vocabularies."""

import math
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from electra.errors import ConfigError, TrainingError
from electra.kernels.cuda_graph import GraphedStep
from electra.objectives.losses import Counts, Losses, total
from electra.training.checkpoint import (
    checkpoint_folders,
    checkpoint_name,
    load_checkpoint,
    prune_checkpoints,
    read_state,
    save_checkpoint,
)
from electra.training.logging import MetricsLogger, ProgressBar, Window, duration
from electra.training.optimizer import SCHEDULES, OptimizerConfig, build_optimizers
from electra.training.signals import stop_signals

SHOWN_EVERY = 10.0  # seconds of training between lines for people; metrics are by steps, so that runs compare
SAVED_EVERY = 300.0  # seconds of training between checkpoints at most, however long steps take


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(OptimizerConfig):
    """How a run goes: how often it looks, saves and reports."""

    micro_batches: int = 1
    """Take each step's batch in so many pieces, to fit memory; the result is the same."""
    log_every: int = 50
    """Steps between lines of training metrics in metrics.jsonl; the screen has one every ten seconds."""
    evaluate_every: int = 1000
    """Steps between measures on held-out text."""
    save_every: int = 1000
    """Steps between checkpoints; five minutes of training are the longest."""
    keep: int = 3
    """Checkpoints kept: the last so many, and the best."""
    max_nonfinite_steps: int = 20
    """A step whose loss or gradient is not finite is skipped; after so many the run stops."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("micro_batches", "log_every", "evaluate_every", "save_every", "keep", "max_nonfinite_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long a run trains: a number of steps, or seconds of training."""

    steps: int | None = None
    seconds: float | None = None

    def share(self, steps: float, seconds: float) -> float:
        """How much of it is spent, from 0 to 1."""
        return min(1.0, steps / self.steps if self.steps else seconds / self.seconds if self.seconds else 1.0)

    def minutes_left(self, steps: float, seconds: float, pace: float) -> float:
        """How much of it is left, where a step takes `pace` seconds."""
        left = (self.steps - steps) * pace if self.steps else (self.seconds or 0.0) - seconds
        return max(0.0, left) / 60

    def plus(self, other: "Budget") -> "Budget":
        """Both, one after the other."""
        if self.steps is not None and other.steps is not None:
            return Budget(steps=self.steps + other.steps)
        return Budget(seconds=(self.seconds or 0.0) + (other.seconds or 0.0))


class Rows(Protocol):
    """What a trainer asks of a batch."""

    @property
    def num_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    def micro_batches(self, count: int) -> list[Any]: ...


class TrainingTask(Protocol):
    """What a trainer is given: a model, batches and their losses, measures, and a way to write the model down."""

    @property
    def model(self) -> nn.Module: ...
    def next_batch(self) -> Rows: ...
    def losses(self, batch: Any) -> Losses: ...
    def counts(self, batch: Any) -> Counts: ...  # what losses are divided by, before there are any
    def backward(self, loss: Tensor) -> None: ...  # adds its gradients to those of the model's parameters
    def rate_share(self, name: str) -> float: ...  # of the learning rate, for the parameter of this name
    def evaluate(self) -> dict[str, float]: ...  # "loss" decides which checkpoint is best
    def rates(self, tokens_per_second: float) -> dict[str, float]: ...
    def write_model(self, folder: Path) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass
class TrainState:
    """Where a run stands."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    best: str | None = None  # the checkpoint with the lowest held-out loss
    best_loss: float | None = None
    start_step: int = 0  # where the budget counts from: the trunk's place for a branch
    start_seconds: float = 0.0


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    run: str
    checkpoint: str
    step: int
    tokens: int
    seconds: float
    skipped: int
    measures: dict[str, float]
    signal: int = 0  # the one that ended it; 0: the budget is spent
    was_finished: bool = False  # before it was resumed

    @property
    def exit_code(self) -> int:
        """As the shell has it for programs that a signal ended."""
        return 128 + self.signal if self.signal else 0

    def __str__(self) -> str:
        done = f"{self.step:,} steps, {self.tokens:,} tokens, {self.seconds / 60:.1f} minutes of training"
        lines = [f"{self.end()}: {done}"]
        lines += [f"{self.skipped} steps were skipped: their loss was not finite"] if self.skipped else []
        lines += [f"  {name:<24}{number:.4f}" for name, number in self.measures.items()]
        lines += [f"checkpoint: {self.checkpoint}"]
        lines += [f"to train its model on: a new --output with --init {self.run}"] if self.was_finished else []
        return "\n".join(lines)

    def end(self) -> str:
        """Why there are no more steps."""
        if self.signal:
            return f"stopped by {signal.Signals(self.signal).name}, go on with --resume"
        return "was finished, its budget is spent" if self.was_finished else "finished"


class Trainer:
    """Moves a lesson's weights down its losses until the budget is spent, and loses nothing on the way."""

    def __init__(
        self,
        lesson: TrainingTask,
        config: TrainerConfig,
        budget: Budget,
        run: Path,
        seed: int = 0,
        records: bool = False,
        is_quiet: bool = False,
        end: Budget | None = None,
    ) -> None:
        self.lesson, self.config, self.budget, self.run, self.seed = lesson, config, budget, run, seed
        self.end = end or budget  # where in the budget to stop: another trainer may have the rest
        self.optimizers = build_optimizers(lesson.model, config, lesson.rate_share)
        self.records = records  # steps are CUDA graphs: batches have few shapes
        self.is_quiet = is_quiet  # no bar: others report what this run does
        self.place = TrainState()
        self.measures: dict[str, float] = {}
        self.window = Window()  # since the last line of metrics
        self.unseen = Window()  # since the last line that was shown
        self.patience = math.inf if is_quiet else 0.0  # seconds of training until the next one
        self.is_warm = False  # the first step compiles and fills caches: its time is not training's

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        state = load_checkpoint(checkpoint, self.lesson.model, self.optimizers)
        self.lesson.restore(state["lesson"])
        self.place = TrainState(**state["place"])

    def branch(self, checkpoint: Path) -> None:
        """Go on from a checkpoint of another run; the budget counts from there."""
        self.resume(checkpoint)
        self.start_budget()

    def follow(self, checkpoint: Path) -> None:
        """Go on where another lesson's training ended, with new optimizers; this lesson has taken over the weights."""
        state = read_state(checkpoint)
        self.lesson.restore(state["lesson"])
        self.place = TrainState(**state["place"])
        self.start_budget()

    def start_budget(self) -> None:
        """Count the budget from here."""
        step, seconds = self.place.step, self.place.seconds
        self.place = TrainState(step, self.place.tokens, seconds, start_step=step, start_seconds=seconds)

    def train(self) -> TrainResult:
        """Steps, until the budget is spent or a signal asks to stop."""
        self.journal, self.saved_at = MetricsLogger(self.run, self.place.step), self.place.seconds
        self.step = self.recorded_step() if self.records else self.compute
        with stop_signals(self.is_quiet) as asked, ProgressBar(self.is_quiet) as self.bar:
            if not self.is_over():
                begin = f"step {self.place.step:,} on" if self.place.step else "the start"
                self.bar.say(f"training from {begin}")
            while not self.is_over() and not asked:
                self.take_step()
                self.bar.move(self.share())
                if self.unseen.seconds > self.patience:
                    self.show()
                if self.is_time(self.config.log_every):
                    self.log()
                if self.is_time(self.config.evaluate_every):
                    self.evaluate()
                if self.is_time(self.config.save_every) or self.is_long_unsaved():
                    self.save()
            if not asked and self.is_warm and not self.is_time(self.config.log_every):
                self.log()
            if not asked and self.is_warm and not self.is_time(self.config.evaluate_every):
                self.evaluate()
            checkpoint = self.save()
        self.journal.close()
        return self.outcome(checkpoint, asked[0] if asked else 0)

    def share(self, ahead: float = 0.0) -> float:
        """How much of the budget is spent, `ahead` steps from now."""
        steps, seconds = self.spent()
        return self.budget.share(steps + ahead, seconds)

    def spent(self) -> tuple[int, float]:
        """Steps and seconds since the budget's start."""
        return self.place.step - self.place.start_step, self.place.seconds - self.place.start_seconds

    def is_over(self) -> bool:
        """Whether there is no step left to take."""
        return self.end.share(*self.spent()) >= 1

    def is_time(self, every: int) -> bool:
        """Whether this step is one of `every` so many."""
        return self.place.step % every == 0

    def is_long_unsaved(self) -> bool:
        """Whether the last checkpoint is old; what is over is measured first, and saved then."""
        return self.place.seconds - self.saved_at >= SAVED_EVERY and not self.is_over()

    def take_step(self) -> None:
        """One batch: learning rate, losses and gradients, update."""
        began = time.perf_counter()
        batch = self.lesson.next_batch()
        torch.manual_seed(self.seed * 1_000_003 + self.place.step)  # dropout, too, is a function of the step
        self.set_learning_rate()
        numbers = self.step(batch)
        self.place.step += 1
        self.place.tokens += batch.num_tokens
        seconds = time.perf_counter() - began if self.is_warm else None
        self.place.seconds += seconds or 0.0
        for window in (self.window, self.unseen):
            window.add(numbers, batch.num_tokens, seconds)
        self.is_warm = True

    def set_learning_rate(self) -> None:
        """Give every group the rate of this step."""
        self.rate = self.config.learning_rate * self.rate_factor()
        for group in self.groups():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.rate * group["share"])
            else:
                group["lr"] = self.rate * group["share"]

    def groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def recorded_step(self) -> GraphedStep:
        """The step as a recording, which reads learning rates from the device."""
        for group in self.groups():
            group["lr"] = torch.tensor(0.0, device=group["params"][0].device)
        return GraphedStep(self.compute)

    def compute(self, batch: Rows) -> dict[str, Tensor]:
        """The step itself: losses, gradients, update."""
        return self.update(self.backward(batch))

    def rate_factor(self) -> float:
        """The schedule at the middle of this step, so that neither the first nor the last step is for nothing."""
        schedule, share, warmup = SCHEDULES[self.config.schedule], self.share(ahead=0.5), self.config.warmup
        if warmup < 1:
            return schedule(share, warmup, self.config)
        if self.budget.steps:
            return schedule(share, warmup / self.budget.steps, self.config)
        rise = min(1.0, (self.place.step + 0.5 - self.place.start_step) / warmup)  # in steps, in a run of minutes
        return rise * schedule(share, 0.0, self.config)

    def backward(self, batch: Rows) -> dict[str, Tensor]:
        """Gradients of the batch; returns its losses. If it does not fit memory, says in how many pieces it would."""
        try:
            return self.accumulate(batch, self.config.micro_batches)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        pieces = self.fitting_pieces(batch)
        advice = f"try --micro-batches {pieces}" if pieces else "not even single rows fit: choose a smaller model"
        raise ConfigError(f"a batch of {batch.num_rows} rows does not fit the device's memory; {advice}")

    def accumulate(self, batch: Rows, count: int) -> dict[str, Tensor]:
        """Add up the gradients of `count` pieces, each divided by the counts of the whole batch."""
        counts = self.lesson.counts(batch) if count > 1 else None
        means: dict[str, Tensor] = {}
        for piece in batch.micro_batches(count):
            losses = self.lesson.losses(piece)
            self.lesson.backward(total(losses, counts))
            for name, loss in losses.items():
                share = loss.sum.detach() / (loss.count if counts is None else counts[name]).clamp(min=1)
                means[name] = means[name] + share if name in means else share
        return means

    def fitting_pieces(self, batch: Rows) -> int | None:
        """The smallest number of pieces, by doubling, in which the batch fits memory."""
        count = 2 * self.config.micro_batches
        while count <= batch.num_rows:
            self.lesson.model.zero_grad()
            torch.cuda.empty_cache()
            try:
                self.accumulate(batch, count)
                return count
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            count *= 2
        return None

    def update(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """Clip the gradient and move the weights, unless loss or gradient is not finite; returns what to write down."""
        gradients = [parameter.grad for parameter in self.lesson.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        numbers = losses | {"gradient_norm": norm}
        is_finite = torch.isfinite(torch.stack(list(numbers.values()))).all()
        if self.records:
            self.move_if(is_finite, norm)
        elif bool(is_finite):
            nn.utils.clip_grads_with_norm_(self.lesson.model.parameters(), self.config.clip or float("inf"), norm)
            self.move()
        else:
            self.skip(1)
        self.lesson.model.zero_grad()
        numbers = {name: number.where(is_finite, 0.0) for name, number in numbers.items()}
        return numbers | {"skipped": (~is_finite).float()}

    def move(self) -> None:
        """Move the weights."""
        for optimizer in self.optimizers:
            optimizer.step()

    def move_if(self, is_finite: Tensor, norm: Tensor) -> None:
        """Move the weights where the device says so; Python does not wait to hear it, and clipping is left to kernels.

        Both are attributes that torch's fused optimizers ask for; gradients are divided by the scale."""
        scale = (norm / (self.config.clip or float("inf"))).clamp(min=1)
        for optimizer in self.optimizers:
            optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]  # torch's types do not name it
            optimizer.grad_scale = scale  # type: ignore[attr-defined]  # nor this
        self.move()

    def skip(self, count: int) -> None:
        """Count steps that were not taken; too many end the run."""
        self.place.skipped += count
        if self.place.skipped >= self.config.max_nonfinite_steps:
            saved = checkpoint_folders(self.run)
            left = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint was saved before"
            raise TrainingError(
                f"step {self.place.step}: loss or gradient not finite, {self.place.skipped} times in this run; "
                f"{left}; try a lower --learning-rate or a longer --warmup"
            )

    def log(self) -> None:
        """A line of training metrics since the last."""
        if self.records:
            self.skip(self.window.skipped())
        speed, place = self.window.speed(), self.place
        numbers = self.window.means() | {"learning_rate": self.rate, "tokens": place.tokens, "seconds": place.seconds}
        numbers |= {"skipped": place.skipped, "tokens_per_second": speed} | self.lesson.rates(speed)
        self.journal.write("train", place.step, numbers)
        self.window = Window()

    def show(self) -> None:
        """A line for people: the budget, losses and speed since the last."""
        unseen = self.unseen
        left = duration(self.budget.minutes_left(*self.spent(), unseen.pace()))
        place = f"step {self.place.step:,} ({self.share():.0%}, {left} left)"
        losses = [f"{name} {number:.3f}" for name, number in unseen.means().items() if name != "gradient_norm"]
        self.bar.describe("  ".join([place, *losses, f"{unseen.speed():,.0f} tokens/s"]))
        self.unseen, self.patience = Window(), SHOWN_EVERY

    def evaluate(self) -> None:
        """Measure on held-out text."""
        self.measures = self.lesson.evaluate()
        self.journal.write("validation", self.place.step, self.measures)
        if not self.is_over():  # the last ones are in the outcome
            shown = ", ".join(f"{name} {number:.3f}" for name, number in self.measures.items())
            self.bar.say(f"step {self.place.step:,}, measured: {shown}")
        self.measured_step = self.place.step

    def save(self) -> Path:
        """Write a checkpoint, and remove those that are neither recent nor best."""
        place, loss, self.saved_at = self.place, self.measures.get("loss"), self.place.seconds
        best_loss = float("inf") if place.best_loss is None else place.best_loss
        if loss is not None and self.measured_step == place.step and loss < best_loss:  # NaN never is
            place.best, place.best_loss = checkpoint_name(place.step), loss
        skipped = place.skipped + (self.window.skipped() if self.records else 0)  # those not logged yet, too
        there = asdict(place) | {"skipped": skipped}
        state = {"step": place.step, "place": there, "lesson": self.lesson.state()}
        folder = save_checkpoint(self.run, self.lesson.model, self.optimizers, state, self.lesson.write_model)
        prune_checkpoints(self.run, self.config.keep, place.best)
        return folder

    def outcome(self, checkpoint: Path, signal: int) -> TrainResult:
        """How the run ended."""
        place = self.place
        numbers = (place.step, place.tokens, place.seconds, place.skipped)
        was_finished = not signal and not self.is_warm  # no step was taken
        return TrainResult(str(self.run), str(checkpoint), *numbers, self.measures, signal, was_finished)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory: on CUDA it says so by type, on the CPU by words."""
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)
