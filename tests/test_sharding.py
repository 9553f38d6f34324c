"""FSDP2: a model divided over ranks trains as one that is not; its checkpoints load anywhere. On the CPU with gloo."""

import itertools
import os
import signal
from typing import NoReturn

import pytest
from ranks import finish_ranks, largest_difference, largest_loss_difference, run_ranks, start_ranks
from safetensors.torch import load_file
from test_distributed import LOSS_BOUND, WEIGHTS_BOUND, dataset_config, stop_after

from electra.errors import ConfigError
from electra.pretraining.command import pretrain
from electra.pretraining.task import PretrainingTask
from electra.runfolder import checkpoint_folders
from electra.training.checkpoint import TRAINING
from electra.training.distributed import LostRankError
from electra.training.trainer import Trainer

assert dataset_config  # a fixture

SHARDED = {"optimizer": "adamw", "shard_weights": True}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sharded_ranks_train_as_one_process(dataset_config, size):
    alone = dataset_config("alone", optimizer="adamw")
    pretrain(alone)
    config = dataset_config("sharded", **SHARDED)
    run_ranks(size, lambda rank: pretrain(config))
    assert largest_difference(alone.output, config.output) < WEIGHTS_BOUND
    assert largest_loss_difference(alone.output, config.output) < LOSS_BOUND
    ours, theirs = (load_file(checkpoint_folders(run.output)[-1] / TRAINING) for run in (alone, config))
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: each.shape for name, each in theirs.items()}


def test_a_run_is_resumed_on_other_numbers_of_ranks_sharded_or_not(dataset_config):
    """Two sharded ranks, then one process, then three sharded ranks: as an unbroken run."""
    settings = {"steps": 20, "optimizer": "adamw"}
    unbroken, config = (dataset_config(name, **settings) for name in ("unbroken", "broken"))
    pretrain(unbroken)
    for size, is_sharded, steps in ((2, True, 6), (1, False, 7), (3, True, 99)):
        resumed = dataset_config("broken", resume=size != 2, shard_weights=is_sharded, **settings)
        run_ranks(size, lambda rank, config=resumed, steps=steps: stop_after(config, steps, rank, stopped_rank=0))
    assert largest_difference(unbroken.output, config.output) < WEIGHTS_BOUND
    assert largest_loss_difference(unbroken.output, config.output, ["validation"]) < LOSS_BOUND


def test_ranks_keep_only_their_part(dataset_config):
    """Of weights and of optimizer states, for which each parameter is divided along its first dimension."""
    config = dataset_config(steps=2, **SHARDED)
    sizes = {}

    def train(rank: int):
        original = Trainer.save_checkpoint

        def measure(trainer):
            parameters = list(trainer.task.model.parameters())
            states = [state["exp_avg"] for state in trainer.optimizers[0].state.values()]
            local = [sum(each.to_local().numel() for each in tensors) for tensors in (parameters, states)]
            sizes.update(local=local, whole=sum(parameter.numel() for parameter in parameters))
            return original(trainer)

        Trainer.save_checkpoint = measure  # in a forked process
        pretrain(config)
        return sizes

    first, second = run_ranks(2, train)
    assert first["local"][0] + second["local"][0] == first["whole"]
    assert first["local"][1] + second["local"][1] == first["whole"]
    assert max(first["local"][0], second["local"][0]) < 0.6 * first["whole"]


def fail(task: PretrainingTask, batch: object) -> NoReturn:
    raise RuntimeError("out of memory")


def end(task: PretrainingTask, batch: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("losses", [fail, end])
def test_only_errors_of_communication_are_reported_as_a_lost_rank(dataset_config, monkeypatch, losses):
    """Rank 1 ends while rank 0 gathers the weights of layers."""
    config = dataset_config(**SHARDED)
    monkeypatch.setattr("electra.training.distributed.REASON_SECONDS", 3 if losses is fail else 0.1)

    def train(rank: int):
        if rank == 1:
            PretrainingTask.losses = losses  # in a forked process
        return pretrain(config)

    first, second = finish_ranks(start_ranks(2, train))
    assert isinstance(first, LostRankError)
    if losses is fail:
        assert type(second) is RuntimeError
        assert str(second) == "out of memory"
        assert str(first) == "rank 1 ended: RuntimeError out of memory; all ranks stop"
    else:
        assert str(first).startswith("another rank ended or cannot be reached (")


@pytest.mark.parametrize(("optimizer", "size"), [("muon", None), ("adam", None), ("adamw", 1)])
def test_what_cannot_be_sharded_is_refused(dataset_config, optimizer, size):
    message = f"needs --optimizer adamw, not {optimizer}" if size is None else "start them with torchrun"
    with pytest.raises(ConfigError, match=message):
        pretrain(dataset_config(optimizer=optimizer, shard_weights=True))


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "style"), list(itertools.product(("rtd", "mlm"), ("classic", "modern"))))
def test_sharded_ranks_differ_as_little_as_micro_batches(dataset_config, objective, style, capsys):
    """Over 50 steps in fp32."""
    settings = {"objective": objective, "style": style, "optimizer": "adamw", "steps": 50, "precision": "fp32"}
    settings |= {"evaluate_every": 25, "save_every": 50, "sinusoidal_positions": style == "classic"}
    whole = dataset_config("whole", **settings)
    pretrain(whole)
    for size in (1, 2, 3):
        config = dataset_config(f"sharded-{size}", shard_weights=True, **settings)
        run_ranks(size, lambda rank, config=config: pretrain(config))
        weights = largest_difference(whole.output, config.output)
        loss = largest_loss_difference(whole.output, config.output)
        with capsys.disabled():
            print(f"\n{objective} {style}, {size} sharded ranks: weights {weights:.1e}, losses {loss:.1e}", end="")
        assert weights < WEIGHTS_BOUND
        assert loss < LOSS_BOUND
