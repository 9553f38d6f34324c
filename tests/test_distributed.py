"""Ranks: the same training on any number of them, one writer, signals and failures; on the CPU with gloo."""

import itertools
import os
import random
import signal
import sys
import time
from contextlib import suppress

import pytest
import torch
from conftest import error_message
from ranks import (
    child_processes,
    finish_ranks,
    largest_difference,
    largest_loss_difference,
    run_ranks,
    start_ranks,
    torchrun,
)

from electra.cli import main
from electra.errors import ConfigError, DataError, TrainingError
from electra.pretraining.command import pretrain
from electra.pretraining.task import PretrainingTask
from electra.runfolder import checkpoint_folders, lock_folder
from electra.training.checkpoint import read_training_state
from electra.training.distributed import LostRankError, World, join_ranks, seed_dropout
from electra.training.logging import read_metrics

WEIGHTS_BOUND, LOSS_BOUND = 1e-5, 1e-5  # the same batch in other parts is summed in another order
CASES = {
    "rtd": {"optimizer": "adamw"},
    "mlm, modern, Muon": {"objective": "mlm", "style": "modern", "optimizer": "muon", "sinusoidal_positions": False},
    "segment pairs, micro-batches": {"packing": "segment-pairs", "micro_batches": 2, "whole_word_masking": True},
}


@pytest.fixture
def dataset_config(run_config):
    """Build the config of a small run with a batch that divides over 1, 2 and 3 ranks, evaluated in four batches."""

    def build(output: str = "run", **settings):
        base = {"batch_size": 12, "steps": 10, "learning_rate": 1e-3, "evaluation_rows": 100, "evaluate_every": 5}
        return run_config(output, **base | settings)

    return build


@pytest.mark.parametrize("case", CASES)
def test_two_and_three_ranks_train_as_one_process(dataset_config, case):
    alone = dataset_config("alone", **CASES[case])
    pretrain(alone)
    for size in (2, 3):
        config = dataset_config(f"ranks-{size}", **CASES[case])
        run_ranks(size, lambda rank, config=config: pretrain(config))
        assert largest_difference(alone.output, config.output) < WEIGHTS_BOUND
        assert largest_loss_difference(alone.output, config.output) < LOSS_BOUND
        lines, expected = (read_metrics(run / "metrics.jsonl") for run in (config.output, alone.output))
        assert [(line["kind"], line["step"]) for line in lines] == [(line["kind"], line["step"]) for line in expected]
        assert lines[-2]["tokens"] == expected[-2]["tokens"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_world_of_one_gives_the_same_bits_as_none(dataset_config, precision):
    """The counts, the gradient buffer and the separate parts of a step change nothing."""
    alone, world = (dataset_config(name, precision=precision, dropout=0.1) for name in ("alone", "world"))
    pretrain(alone)
    run_ranks(1, lambda rank: pretrain(world))
    assert largest_difference(alone.output, world.output) == 0
    assert largest_loss_difference(alone.output, world.output) == 0


def test_rank_0_alone_writes(dataset_config):
    """Rank 1 opens no file of the run folder for writing, and both return the same result."""
    config = dataset_config()

    def forbid_writing(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).startswith(str(config.output)) and arguments[1] not in ("r", "rb"):
            raise AssertionError(f"rank 1 writes {arguments[0]}")

    def train(rank: int):
        if rank == 1:
            sys.addaudithook(forbid_writing)
        return pretrain(config)

    first, second = run_ranks(2, train)
    assert (first.step, first.tokens, first.metrics) == (second.step, second.tokens, second.metrics)


def test_a_run_begun_on_two_ranks_continues_on_one_and_three(dataset_config):
    settings = {"steps": 20, "optimizer": "adamw"}
    unbroken = dataset_config("unbroken", **settings)
    pretrain(unbroken)
    for size in (1, 3):
        name = f"begun-{size}"
        run_ranks(2, lambda rank, name=name: stop_after(dataset_config(name, **settings), steps=7, rank=rank))
        config = dataset_config(name, resume=True, **settings)
        assert read_training_state(checkpoint_folders(config.output)[-1]).trainer.step == 8
        run_ranks(size, lambda rank, config=config: pretrain(config))
        assert largest_difference(unbroken.output, config.output) < WEIGHTS_BOUND
        assert largest_loss_difference(unbroken.output, config.output, ["validation"]) < LOSS_BOUND


def stop_after(config, steps: int, rank: int, stopped_rank: int = 1):
    """Train, and send SIGTERM to one rank when it has trained on this many batches."""
    next_batch, taken = PretrainingTask.next_batch, []

    def count_batches(task):
        taken.append(None)
        if len(taken) == steps + 1 and rank == stopped_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return next_batch(task)

    PretrainingTask.next_batch = count_batches  # in a forked process
    return pretrain(config)


@pytest.mark.parametrize("stopped_rank", [0, 2])
def test_a_signal_to_any_rank_saves_and_stops_all(dataset_config, stopped_rank):
    config = dataset_config()
    results = run_ranks(3, lambda rank: stop_after(config, 3, rank, stopped_rank))
    assert [(result.signal, result.step) for result in results] == [(signal.SIGTERM, 4)] * 3
    [checkpoint] = checkpoint_folders(config.output)
    assert checkpoint.name == "step-000000004"


def test_a_rank_that_fails_ends_the_others_with_its_reason(dataset_config):
    config = dataset_config()

    def train(rank: int):
        if rank == 1:
            PretrainingTask.next_batch = fail
        return pretrain(config)

    def fail(task):
        raise DataError("shard 7 is damaged")

    first, second = finish_ranks(start_ranks(2, train))
    assert str(second) == "shard 7 is damaged"
    assert isinstance(first, LostRankError)
    assert str(first) == "rank 1 ended: shard 7 is damaged; all ranks stop"


def test_a_rank_that_is_killed_ends_the_others(dataset_config, monkeypatch):
    config = dataset_config()
    monkeypatch.setattr("electra.training.distributed.REASON_SECONDS", 0.1)

    def train(rank: int):
        if rank == 0:
            PretrainingTask.next_batch = lambda task: os.kill(os.getpid(), signal.SIGKILL)
        return pretrain(config)

    results = finish_ranks(start_ranks(3, train))
    assert results[0] is None
    assert all(isinstance(result, LostRankError) for result in results[1:])
    assert str(results[1]).startswith("another rank ended or cannot be reached (")


def test_a_locked_folder_ends_all_ranks(dataset_config):
    config = dataset_config()
    with lock_folder(config.output):
        first, second = finish_ranks(start_ranks(2, lambda rank: pretrain(config)))
    assert isinstance(first, ConfigError)
    assert str(second).startswith("rank 0 ended: process ")


def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do():
    world = World(torch.device("cpu"), rank=0, size=3)
    world.check_batch_size(12, 2)
    with pytest.raises(ConfigError, match="batch_size is 8 and not divisible by 3 ranks; use 6 or 9, or another"):
        world.check_batch_size(8, 1)
    with pytest.raises(ConfigError, match="is 3 and not divisible by 3 ranks × 2 micro-batches; use 6, or"):
        world.check_batch_size(3, 2)


def test_a_run_refuses_a_batch_that_does_not_divide(dataset_config):
    results = finish_ranks(start_ranks(2, lambda rank: pretrain(dataset_config(batch_size=9))))
    assert all("not divisible by 2 ranks; use 8 or 10" in str(result) for result in results)


def test_items_are_shared_and_their_results_gathered_in_order():
    def square(rank: int):
        with join_ranks("cpu", resumes=False) as world:
            squares = world.gather([torch.tensor(item) ** 2 for item in world.share(range(5))])
            return [int(square) for square in squares], world.broadcast(rank)

    for results, broadcast in run_ranks(3, square):
        assert results == [0, 1, 4, 9, 16]
        assert broadcast == 0


def test_ranks_agree_on_a_signal_and_on_the_clock_of_rank_0():
    def agree(rank: int):
        with join_ranks("cpu", resumes=False) as world:
            return world.agree(signal.SIGTERM if rank == 1 else 0, 7.5 + rank), world.agree(0, 8.5 - rank)

    assert run_ranks(2, agree) == [((signal.SIGTERM, 7.5), (0, 8.5))] * 2


def test_ranks_with_different_weights_do_not_start():
    def start(rank: int):
        with join_ranks("cpu", resumes=False) as world:
            model = torch.nn.Linear(2, 2)
            torch.nn.init.constant_(model.weight, rank)
            torch.nn.init.zeros_(model.bias)
            world.check_same_start(model, step=5 * rank)

    for error in finish_ranks(start_ranks(2, start)):
        assert isinstance(error, TrainingError)
        assert "different weights (rank 0 at step 0 and rank 1 at step 5)" in str(error)


def test_dropout_differs_between_ranks():
    """Also on a CPU, where torch uses 32 bits of the seed."""
    seeds = []
    with torch.random.fork_rng():
        for rank in range(64):
            seed_dropout(seed=3, step=7, rank=rank)
            seeds.append(torch.initial_seed() % 2**32)
    assert len(set(seeds)) == 64


def test_dropout_has_any_seed():
    with torch.random.fork_rng():
        for seed in (0, 2**44, 2**63):
            seed_dropout(seed, step=7, rank=1)
            assert torch.initial_seed() == (seed * 1_000_003 + 7 + 2_654_435_761) % 2**64


def test_other_commands_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "WORLD_SIZE is 4 but RANK is not set; start with torchrun" in error_message("flops", capsys)
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "torchrun started 4 processes; start electra flops without it" in error_message("flops", capsys)
    monkeypatch.setenv("WORLD_SIZE", "1")
    main(["flops"])


def test_restarts_need_a_command_that_resumes(dataset_config, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    [error] = finish_ranks(start_ranks(1, lambda rank: pretrain(dataset_config())))
    assert "add --resume" in str(error)


MATRIX = list(itertools.product(("rtd", "mlm"), ("classic", "modern"), ("adamw", "muon")))


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "style", "optimizer"), MATRIX)
def test_ranks_differ_as_little_as_micro_batches(dataset_config, objective, style, optimizer, capsys):
    """Over 50 steps in fp32. The sum of two gradients does not depend on their order, that of three does."""
    settings = {"objective": objective, "style": style, "optimizer": optimizer, "steps": 50, "precision": "fp32"}
    settings |= {"evaluate_every": 25, "save_every": 50, "sinusoidal_positions": style == "classic"}
    runs = {}
    for count in (1, 2, 3):
        for kind in ("micro-batches", "ranks"):
            is_split = kind == "micro-batches"
            config = dataset_config(f"{count}-{kind}", micro_batches=count if is_split else 1, **settings)
            run_ranks(1 if is_split else count, lambda rank, config=config: pretrain(config))
            runs[count, kind] = config.output
    whole = runs[1, "micro-batches"]
    with capsys.disabled():
        for (count, kind), run in runs.items():
            weights, loss = largest_difference(whole, run), largest_loss_difference(whole, run)
            print(
                f"\n{objective} {style} {optimizer}, {count} {kind}: weights {weights:.1e}, losses {loss:.1e}", end=""
            )
            assert weights < WEIGHTS_BOUND
            assert loss < LOSS_BOUND
    for count in (1, 2):
        assert largest_difference(runs[count, "micro-batches"], runs[count, "ranks"]) == 0


@pytest.mark.slow
def test_runs_that_are_killed_and_restarted_end_as_an_undisturbed_one(dataset_config):
    """Twenty kills of random ranks at random moments, also while they start; torchrun repeats the command."""
    settings = {"steps": 400, "save_every": 20, "evaluate_every": 100, "log_every": 20, "keep_checkpoints": 2}
    undisturbed = dataset_config("undisturbed", micro_batches=2, **settings)  # the same bits as two ranks
    pretrain(undisturbed)
    draw, kills = random.Random(0), 0
    while kills < 20:
        config = dataset_config(f"killed-{kills}", resume=True, **settings)
        agent = torchrun(2, config, restarts=20)
        while kills < 20 and agent.poll() is None:
            time.sleep(draw.uniform(0, 20))
            ranks = child_processes(agent.pid)
            with suppress(ProcessLookupError, IndexError):  # they have just ended
                os.kill(draw.choice(ranks), signal.SIGKILL)
                kills += 1
        output, _ = agent.communicate(timeout=300)
        print(output)
        assert agent.returncode == 0, output[-3000:]
        assert largest_difference(undisturbed.output, config.output) == 0
        assert largest_loss_difference(undisturbed.output, config.output) == 0
        assert sorted(path.name for path in config.output.iterdir()) == sorted(
            path.name for path in undisturbed.output.iterdir()
        )
        assert not list(config.output.rglob("*.electra-partial"))
