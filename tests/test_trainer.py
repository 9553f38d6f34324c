"""The trainer: steps, schedules, micro-batches, non-finite steps, signals, logging and resuming, on a toy task."""

import itertools
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from electra.errors import ConfigError, TrainingError
from electra.kernels import dispatch
from electra.kernels.master_weights import MasterWeights
from electra.model.storage import WEIGHTS, write_tensors
from electra.objectives.losses import Loss
from electra.runfolder import checkpoint_folders
from electra.training import trainer as trainer_module
from electra.training.config import Budget, OptimizerConfig, TrainerConfig
from electra.training.logging import ProgressBar, read_metrics
from electra.training.optimizer import GROWTH_STEPS, INITIAL_LOSS_SCALE, LossScaler
from electra.training.trainer import Trainer


@dataclass(frozen=True)
class Rows:
    """A batch of a regression."""

    x: Tensor  # [B, 4]
    y: Tensor  # [B, 1]

    @property
    def num_rows(self) -> int:
        return len(self.x)

    @property
    def num_tokens(self) -> int:
        return self.x.numel()

    def micro_batches(self, count: int) -> list["Rows"]:
        return [Rows(x, y) for x, y in zip(self.x.chunk(count), self.y.chunk(count), strict=True)]


class ToyTask:
    """Regression on random rows; dropout makes steps depend on their random seed."""

    def __init__(self, dropout: float = 0.1, nonfinite: tuple[int, ...] = (), held_out: tuple[float, ...] = ()) -> None:
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.model = nn.ModuleDict({"encoder": nn.ModuleDict({"layers": layers}), "head": nn.Linear(4, 1)})
        self.master_weights = MasterWeights(self.model, torch.float32)
        self.dropout, self.nonfinite, self.batch_number = nn.Dropout(dropout), nonfinite, 0
        self.held_out = iter(held_out or itertools.count(10, -0.5))  # losses of evaluations

    def next_batch(self) -> Rows:
        generator = torch.Generator().manual_seed(self.batch_number)
        self.batch_number += 1
        x = torch.randn(8, 4, generator=generator)
        return Rows(x, x.sum(1, keepdim=True))

    def losses(self, batch: Rows) -> dict[str, Loss]:
        hidden = batch.x
        for layer in self.model["encoder"]["layers"]:
            hidden = self.dropout(torch.tanh(layer(hidden)))
        error = (self.model["head"](hidden) - batch.y).square().sum()
        scale = float("inf") if self.batch_number in self.nonfinite else 1.0
        return {"mse": Loss(error * scale, torch.tensor(float(batch.num_rows)))}

    def loss_counts(self, batch: Rows) -> dict[str, Tensor]:
        return {"mse": torch.tensor(float(batch.num_rows))}

    def should_stop(self) -> bool:
        return False

    def lr_scale(self, parameter_name: str) -> float:
        return 0.5 if parameter_name.startswith("encoder") else 1.0

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(next(self.held_out))}

    def describe_metrics(self, metrics: dict[str, float]) -> str:
        return "as in words"

    def speed_metrics(self, tokens_per_second: float) -> dict[str, float]:
        return {"mfu": 0.5}

    def gather_weights(self) -> None:
        pass

    def write_model(self, folder: Path) -> None:
        write_tensors(folder / WEIGHTS, {name: value.detach() for name, value in self.model.named_parameters()})

    def state_dict(self) -> dict[str, int]:
        return {"batch_number": self.batch_number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch_number = state["batch_number"]

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


TRAINER_SETTINGS = (
    "start_file",
    "micro_batches",
    "log_every",
    "evaluate_every",
    "save_every",
    "keep_checkpoints",
    "max_nonfinite_steps",
)


@pytest.fixture
def make_trainer(tmp_path):
    """Build a trainer of a toy task; `settings` are those of the trainer or of the optimizer."""

    def build(task: ToyTask, steps: int = 20, folder: str = "run", budget: Budget | None = None, **settings) -> Trainer:
        (tmp_path / folder).mkdir(exist_ok=True)
        intervals = {"log_every": 5, "evaluate_every": 10, "save_every": 10}
        intervals |= {name: settings.pop(name) for name in TRAINER_SETTINGS if name in settings}
        loss_scaling = settings.pop("loss_scaling", False)
        optimizer, config = OptimizerConfig(**{"learning_rate": 0.01} | settings), TrainerConfig(**intervals)
        budget = budget or Budget(steps=steps)
        trainer = Trainer(task, optimizer, config, budget, tmp_path / folder, seed=1)
        if loss_scaling:
            trainer.loss_scaler = LossScaler(torch.device("cpu"))
        return trainer

    return build


def train_lines(trainer: Trainer) -> list[dict]:
    return [line for line in read_metrics(trainer.folder / "metrics.jsonl") if line["kind"] == "train"]


def test_steps_equal_a_plain_loop(make_trainer):
    """AdamW with clipping, a learning rate per parameter, and the linear schedule at the middle of each step."""
    task, other = ToyTask(dropout=0.0), ToyTask(dropout=0.0)
    make_trainer(task, steps=10, max_grad_norm=0.5, weight_decay=0.1).train()
    named = list(other.model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [value], "scale": other.lr_scale(name), "weight_decay": 0.1 if value.dim() > 1 else 0.0}
            for name, value in named
        ],
        lr=1.0,
        eps=1e-6,
    )
    for step in range(10):
        batch = other.next_batch()
        loss = other.losses(batch)["mse"]
        (loss.sum / loss.count).backward()
        nn.utils.clip_grad_norm_(other.model.parameters(), 0.5)
        progress = (step + 0.5) / 10
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * group["scale"] * min(progress / 0.1, (1 - progress) / 0.9)
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(task.weights(), other.weights(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_micro_batches_do_not_change_the_result(make_trainer):
    whole, split = ToyTask(dropout=0.0), ToyTask(dropout=0.0)
    trainers = make_trainer(whole, folder="a"), make_trainer(split, folder="b", micro_batches=4)
    for trainer in trainers:
        trainer.train()
    torch.testing.assert_close(whole.weights(), split.weights())
    losses = [[line["mse"] for line in train_lines(trainer)] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
def test_a_resumed_training_equals_an_uninterrupted_one(make_trainer, optimizer):
    whole, first, second = ToyTask(), ToyTask(), ToyTask()
    make_trainer(whole, name=optimizer, folder="whole").train()
    trainer = make_trainer(first, name=optimizer)
    trainer.stop_at = Budget(steps=10)
    trainer.train()
    resumed = make_trainer(second, name=optimizer)
    resumed.resume(checkpoint_folders(trainer.folder)[-1])
    assert resumed.state.step == 10
    resumed.train()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(second.weights(), whole.weights(), strict=True))
    assert [line["step"] for line in train_lines(resumed)] == [5, 10, 15, 20]


def test_metrics_written_after_the_checkpoint_are_replaced(make_trainer):
    make_trainer(ToyTask(), steps=14, save_every=10).train()
    resumed = make_trainer(ToyTask(), steps=20)
    resumed.resume(checkpoint_folders(resumed.folder)[0])
    resumed.train()
    assert [line["step"] for line in train_lines(resumed)] == [5, 10, 15, 20]


def test_a_branch_restarts_the_budget_and_a_new_optimizer_also_its_state(make_trainer):
    trunk = make_trainer(ToyTask(), steps=10, folder="trunk")
    checkpoint = Path(trunk.train().checkpoint)
    branch, phase = make_trainer(ToyTask(), steps=4, folder="branch"), make_trainer(ToyTask(), steps=4, folder="phase")
    branch.start_branch(checkpoint)
    phase.continue_with_new_optimizer(checkpoint)
    assert branch.optimizers[0].state
    assert not phase.optimizers[0].state
    for trainer in (branch, phase):
        assert (trainer.state.step, trainer.budget_fraction_used(), trainer.task.batch_number) == (10, 0.0, 10)
        assert trainer.train().step == 14


def test_the_last_steps_are_logged_and_evaluated(make_trainer):
    trainer = make_trainer(ToyTask(), steps=13)
    result = trainer.train()
    assert [line["step"] for line in train_lines(trainer)] == [5, 10, 13]
    lines = read_metrics(trainer.folder / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [10, 13]
    assert result.metrics == {"loss": 9.5}
    assert train_lines(trainer)[-1].keys() >= {"mse", "gradient_norm", "learning_rate", "tokens_per_second", "mfu"}


def test_a_nonfinite_step_changes_no_weight_and_is_counted(make_trainer):
    task = ToyTask(nonfinite=(3, 8))
    trainer = make_trainer(task, steps=2, evaluate_every=100)
    trainer.train()
    before = task.weights()
    trainer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, task.weights(), strict=True))
    task = ToyTask(nonfinite=(3, 8))
    trainer = make_trainer(task, folder="all")
    result = trainer.train()
    assert (result.step, result.nonfinite_steps) == (20, 2)
    assert "2 steps skipped" in str(result)
    assert [line["nonfinite_steps"] for line in train_lines(trainer)] == [1, 2, 2, 2]
    assert all(weight.isfinite().all() for weight in task.weights())


def test_nonfinite_steps_of_earlier_phases_are_counted(make_trainer):
    checkpoint = Path(make_trainer(ToyTask(nonfinite=(3,)), steps=5).train().checkpoint)
    phase = make_trainer(ToyTask(nonfinite=(8,)), steps=5, folder="phase")
    phase.continue_with_new_optimizer(checkpoint)
    assert phase.train().nonfinite_steps == 2


def test_a_training_stops_after_consecutive_nonfinite_steps(make_trainer):
    scattered = (*range(1, 20, 2), 2)  # at most three in a row
    assert make_trainer(ToyTask(nonfinite=scattered), max_nonfinite_steps=4, folder="a").train().nonfinite_steps == 11
    trainer = make_trainer(ToyTask(nonfinite=(13, 14, 15, 16)), max_nonfinite_steps=4, folder="b")
    with pytest.raises(TrainingError, match=r"step 16: .* 4 consecutive steps; .*step-000000010; try a lower"):
        trainer.train()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_a_checkpoint_and_stops(make_trainer, monkeypatch, capfd, number):
    handler = signal.getsignal(number)
    step = Trainer.step

    def step_then_signal(self):
        step(self)
        if self.state.step == 7:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Trainer, "step", step_then_signal)
    result = make_trainer(ToyTask()).train()
    assert (result.step, result.signal, result.exit_code) == (7, number, 128 + number)
    assert result.checkpoint.endswith("step-000000007")
    assert "stopping after this step" in capfd.readouterr().err
    assert f"stopped by {signal.Signals(number).name}, continue with --resume" in str(result)
    assert signal.getsignal(number) == handler


def test_a_first_step_that_fails_after_a_signal_ends_the_process_without_a_checkpoint(make_trainer):
    trainer = make_trainer(ToyTask(), steps=4)

    def compile_and_fail(batch):
        os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, which the compiler gets, too
        raise RuntimeError("C++ compile error")

    trainer.task.losses = compile_and_fail
    with pytest.raises(SystemExit) as stop:
        trainer.train()
    assert stop.value.code == 128 + signal.SIGINT
    assert checkpoint_folders(trainer.folder) == []


def test_a_training_that_was_stopped_in_its_last_step_is_evaluated_when_it_is_resumed(make_trainer, monkeypatch):
    step = Trainer.step

    def step_then_signal(self):
        step(self)
        if self.state.step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "step", step_then_signal)
    trainer = make_trainer(ToyTask(), steps=13)
    checkpoint = Path(trainer.train().checkpoint)
    for metrics in ({"loss": 10.0}, {}):  # once
        resumed = make_trainer(ToyTask(), steps=13)
        resumed.resume(checkpoint)
        assert resumed.train().metrics == metrics
    lines = read_metrics(trainer.folder / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [10, 13]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_training_waits_after_its_first_step_for_its_start_file_or_a_signal(
    make_trainer, monkeypatch, tmp_path, is_stopped
):
    start_file, polls = tmp_path / "start", itertools.count()
    trainer = make_trainer(ToyTask(), start_file=start_file)

    def poll(seconds):
        assert (trainer.state.step, trainer.state.seconds) == (1, 0.0)
        if next(polls) == 2:
            os.kill(os.getpid(), signal.SIGTERM) if is_stopped else start_file.touch()

    monkeypatch.setattr("electra.signals.time", SimpleNamespace(sleep=poll))
    assert trainer.train().step == (1 if is_stopped else 20)
    assert next(polls) == 3


def test_a_training_whose_parent_process_has_ended_does_not_wait_for_its_start_file(
    make_trainer, monkeypatch, tmp_path
):
    monkeypatch.setattr("electra.signals.PARENT", -1)
    with pytest.raises(TrainingError, match=r"ended before it created .*start"):
        make_trainer(ToyTask(), start_file=tmp_path / "start").train()


def test_a_prepared_training_is_not_divided_because_another_run_uses_the_memory(make_trainer, monkeypatch, tmp_path):
    limit_rows(monkeypatch, 3)
    with pytest.raises(ConfigError, match="no memory for a second run"):
        make_trainer(ToyTask(), start_file=tmp_path / "start").train()


def test_resuming_a_finished_training_changes_nothing(make_trainer):
    trainer = make_trainer(ToyTask())
    checkpoint = Path(trainer.train().checkpoint)
    metrics = (trainer.folder / "metrics.jsonl").read_bytes()
    again = make_trainer(ToyTask())
    again.resume(checkpoint)
    result = again.train()
    assert result.was_finished
    assert "already finished" in str(result)
    assert (trainer.folder / "metrics.jsonl").read_bytes() == metrics


def limit_rows(monkeypatch, rows: int) -> None:
    """Let batches of more rows run out of memory in the backward pass, after some gradients were computed."""
    backward, losses = MasterWeights.backward, ToyTask.losses

    def limited(weights, loss):
        backward(weights, loss)
        if weights.rows > rows:
            raise torch.OutOfMemoryError

    def counted(task, batch):
        task.master_weights.rows = batch.num_rows
        return losses(task, batch)

    monkeypatch.setattr(ToyTask, "losses", counted)
    monkeypatch.setattr(MasterWeights, "backward", limited)


def test_a_batch_that_does_not_fit_into_memory_is_divided_and_trained_alike(make_trainer, monkeypatch, capsys):
    divided = make_trainer(ToyTask(dropout=0.5), folder="divided", micro_batches=4)
    divided.train()
    limit_rows(monkeypatch, rows=2)
    trainer = make_trainer(ToyTask(dropout=0.5), folder="limited")
    trainer.train()
    assert trainer.micro_batches == 4
    assert capsys.readouterr().err.count("divided into 4 micro-batches") == 1
    for ours, theirs in zip(trainer.task.model.parameters(), divided.task.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_row_that_does_not_fit_into_memory_is_an_error(make_trainer, monkeypatch):
    limit_rows(monkeypatch, rows=0)
    with pytest.raises(ConfigError, match=r"not even 8 micro-batches of a batch of 8 rows fit .*smaller model"):
        make_trainer(ToyTask()).train()


def test_other_errors_of_a_step_are_not_hidden(make_trainer, monkeypatch):
    monkeypatch.setattr(ToyTask, "losses", lambda task, batch: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"inconsistent tensor size|size mismatch"):
        make_trainer(ToyTask()).train()


def test_kernels_that_need_too_much_shared_memory_are_switched_off_one_by_one(make_trainer, monkeypatch, capsys):
    class OutOfResources(Exception):
        pass

    losses = ToyTask.losses

    def limited(task, batch):
        if dispatch.is_kernel_enabled("mlm_head"):
            raise OutOfResources("shared memory")
        return losses(task, batch)

    monkeypatch.setattr(dispatch, "disabled", set())
    monkeypatch.setattr(ToyTask, "losses", limited)
    make_trainer(ToyTask()).train()
    assert dispatch.disabled == {"short_attention", "mlm_head"}
    assert "kernel mlm_head: this GPU has too little shared memory" in capsys.readouterr().err
    monkeypatch.setattr(dispatch, "is_kernel_enabled", lambda kernel: True)  # none helps
    monkeypatch.setattr(dispatch, "LARGEST_KERNELS", ())
    with pytest.raises(OutOfResources):
        make_trainer(ToyTask(), folder="again").train()


def test_loss_scaling_does_not_change_weights(make_trainer):
    trainers = [make_trainer(ToyTask(), folder=f"run-{scaling}", loss_scaling=scaling) for scaling in (False, True)]
    for trainer in trainers:
        trainer.train()
    for ours, theirs in zip(*(each.task.model.parameters() for each in trainers), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_loss_scale_is_halved_after_a_non_finite_step(make_trainer):
    trainer = make_trainer(ToyTask(nonfinite=(2, 3)), loss_scaling=True)
    trainer.train()
    assert trainer.loss_scaler.scale == INITIAL_LOSS_SCALE / 4


def test_the_loss_scale_doubles_after_many_finite_steps():
    scaler = LossScaler(torch.device("cpu"))
    for _ in range(GROWTH_STEPS):
        scaler.update(torch.tensor(True))
    assert scaler.scale == 2 * INITIAL_LOSS_SCALE
    assert scaler.finite_steps == 0
    for _ in range(100):
        scaler.update(torch.tensor(False))
    assert scaler.scale == 1


def test_checkpoints_are_also_saved_by_time_and_the_last_after_the_evaluation(make_trainer, monkeypatch):
    seconds = itertools.count()  # each step takes one second; the first, which compiles, is not timed
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    monkeypatch.setattr(trainer_module, "SAVE_SECONDS", 2.0)
    task = ToyTask()
    trainer = make_trainer(task, steps=9, save_every=100, evaluate_every=100, keep_checkpoints=9)
    saved_before_evaluation: list[list[int]] = []
    monkeypatch.setattr(task, "evaluate", lambda: saved_before_evaluation.append(saved_steps(trainer)) or {"loss": 1.0})
    trainer.train()
    assert saved_steps(trainer) == [3, 5, 7, 9]
    assert saved_before_evaluation == [[3, 5, 7]]


def saved_steps(trainer: Trainer) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in checkpoint_folders(trainer.folder)]


def test_the_last_checkpoints_and_the_best_are_kept(make_trainer):
    task = ToyTask(held_out=(5.0, 1.0, 4.0, 3.0, 2.0, float("nan")))
    trainer = make_trainer(task, steps=60, keep_checkpoints=2)
    trainer.train()
    assert saved_steps(trainer) == [20, 50, 60]


@pytest.mark.parametrize(
    ("seconds", "steps", "left"),
    [
        (0.1, [2], ["0.0 minutes"]),
        (4.0, [2, 5, 8, 11, 14, 17, 20], ["1.2", "1.0", "0.8", "0.6", "0.4", "0.2", "0.0"]),
        (900.0, list(range(2, 21)), ["4.5 hours", "4.2 hours"]),
    ],
)
def test_without_a_terminal_progress_is_printed_every_ten_seconds(
    make_trainer, monkeypatch, capsys, seconds, steps, left
):
    clock = SimpleNamespace(perf_counter=itertools.count(step=seconds).__next__)
    monkeypatch.setattr(trainer_module, "time", clock)
    trainer = make_trainer(ToyTask())
    trainer.train()
    shown = [line for line in capsys.readouterr().err.splitlines() if "tokens/s" in line]
    assert [int(line.split()[1]) for line in shown] == steps
    assert all(f"%, {time}" in line for line, time in zip(shown, left, strict=False))
    assert [line["step"] for line in train_lines(trainer)] == [5, 10, 15, 20]


def test_the_last_evaluation_is_printed_once(make_trainer, capsys):
    trainer = make_trainer(ToyTask())
    result = trainer.train()
    assert [line for line in capsys.readouterr().err.splitlines() if "loss" in line] == [
        "step 10, evaluation: loss 10.000, as in words"
    ]
    assert "loss" in str(result)


def test_a_budget_of_seconds_decides_length_and_schedule(make_trainer, monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    trainer = make_trainer(ToyTask(), budget=Budget(seconds=10.0), log_every=1, warmup=4, schedule="wsd")
    assert trainer.train().step == 11  # the first step is not timed
    rates = [line["learning_rate"] / 0.01 for line in train_lines(trainer)]
    assert rates[:4] == pytest.approx([0.125, 0.375, 0.625, 0.875])  # a warm-up in steps
    assert rates[-1] == pytest.approx(0.5)  # the last second of a decay over two


def test_the_rest_of_a_budget_is_estimated():
    assert Budget(seconds=600).minutes_left(steps=50, seconds=120, seconds_per_step=1.0) == 8
    assert Budget(steps=110).minutes_left(steps=50, seconds=120, seconds_per_step=2.0) == 2
    assert Budget(steps=3) + Budget(steps=4) == Budget(steps=7)


def test_intervals_must_be_positive():
    with pytest.raises(ConfigError, match="log_every is 0; it must be at least 1"):
        TrainerConfig(log_every=0)


def test_the_progress_bar_fits_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    bar = ProgressBar()
    losses = "generator 7.082  discriminator 0.676  21,233 tokens/s"
    bar.show_status("step 123,456 (100%, 12.3 minutes left)", losses * 2)
    with bar.console.capture() as capture:
        bar.console.print(bar.get_renderable())
    first, second = capture.get().splitlines()
    assert first.rstrip().endswith("(100%, 12.3 minutes left)")
    assert second.startswith(losses)
    assert [len(first) <= 80, len(second) <= 80] == [True, True]
