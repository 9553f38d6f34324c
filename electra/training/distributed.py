"""Ranks: the processes of one training that torchrun started, sums over them, and what they must agree on.

Each rank computes the gradients of its rows, normalized by the counts of the whole batch; one all-reduce adds them
between backward and update, and every rank makes the same update. Rank 0 alone writes files. Without torchrun there is
no process group, and a `World` of one does nothing.

A model that does not fit on one GPU is sharded (FSDP2): each rank keeps its part of every parameter in fp32, the master
weights. The weights of a layer are gathered when it is computed, on a GPU in bf16, and its gradients are summed and
divided after it.
"""

import io
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, TypeVar

import torch
from torch import Tensor, distributed, nn

from electra.errors import ConfigError, TrainingError
from electra.kernels.master_weights import assign_slices
from electra.objectives.losses import Counts
from electra.training.config import Device, Launch, read_launch
from electra.training.hardware import choose_device

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

MAX_LOSSES = 16
REASON = "reason"  # key in the store: why a rank failed
REASON_SECONDS = 5.0  # to wait for it after a connection was lost
READING_SECONDS = 1.0  # that the store of rank 0 stays when it has failed

Item = TypeVar("Item")
Metrics = dict[str, Tensor]


class LostRankError(TrainingError):
    """Another rank ended before this one."""


@dataclass(frozen=True)
class World:
    """The ranks of a training; by default a single process without a process group."""

    device: torch.device  # of this rank
    rank: int = 0
    size: int = 1
    store: Any = None  # of the process group; None: there is no group

    @property
    def is_distributed(self) -> bool:
        """Whether there is a process group, perhaps of one rank."""
        return self.store is not None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def print(self, *lines: str) -> None:
        """Print lines to standard error, on one rank."""
        if self.is_main:
            print(*lines, sep="\n", file=sys.stderr, flush=True)

    def add_over_ranks(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks."""
        with self.report_lost_rank():
            if tensor.is_cuda and backend_is_gloo():  # several ranks share a GPU
                summed = tensor.cpu()
                distributed.all_reduce(summed)
                tensor.copy_(summed)
            else:
                distributed.all_reduce(tensor)

    def agree(self, signal: int, seconds: float) -> tuple[int, float]:
        """A signal that any rank received (0: none), and the seconds of rank 0."""
        values = torch.tensor([float(signal), seconds if self.is_main else 0.0], dtype=torch.float64)
        with self.report_lost_rank():
            distributed.all_reduce(values, op=distributed.ReduceOp.MAX)
        return int(values[0].item()), values[1].item()

    def share(self, items: Sequence[Item]) -> list[Item]:
        """The items that this rank works on."""
        return list(items[self.rank :: self.size])

    def gather(self, results: list[Item]) -> list[Item]:
        """The results of the items that `share` distributed, of all ranks and in the order of the items."""
        if not self.is_distributed:
            return results
        file = io.BytesIO()
        torch.save(results, file)
        parts: list[Any] = [None] * self.size
        with self.report_lost_rank():
            distributed.all_gather_object(parts, file.getvalue())
        ranks = [torch.load(io.BytesIO(part), self.device, weights_only=False) for part in parts]  # of this training
        return [ranks[index % self.size][index // self.size] for index in range(sum(len(part) for part in ranks))]

    def broadcast(self, value: Item) -> Item:
        """The value of rank 0."""
        return self.gather([value])[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather([None])

    def check_same_start(self, model: nn.Module, step: int) -> None:
        """Raise if the ranks do not start with the same weights at the same step."""
        parameters = [each.detach() for each in model.parameters() if type(each) is nn.Parameter]  # not those of FSDP
        starts = self.gather([(step, [each.view(torch.int32).sum(dtype=torch.int64).item() for each in parameters])])
        for rank, start in enumerate(starts):
            if start != starts[0]:
                steps = " and ".join(f"rank {each} at step {starts[each][0]:,}" for each in (0, rank))
                raise TrainingError(
                    f"the ranks start with different weights ({steps}); all nodes need the same --output, a folder on "
                    "a shared file system, and the same version of electra"
                )

    def check_batch_size(self, rows: int, micro_batches: int) -> None:
        """Raise if a batch is not divisible by ranks and micro-batches."""
        parts = self.size * micro_batches
        if rows % parts:
            below, above = rows // parts * parts, (rows // parts + 1) * parts
            micro = f" × {micro_batches} micro-batches" if micro_batches > 1 else ""
            sizes = " or ".join(str(size) for size in (below, above) if size)
            raise ConfigError(
                f"is {rows} and not divisible by {self.size} ranks{micro}; use {sizes}, or another number of ranks or "
                "micro-batches",
                field="batch_size",
            )

    @contextmanager
    def report_lost_rank(self) -> Iterator[None]:
        """Turn the error of a communication that another rank does not take part in any more into one sentence."""
        try:
            yield
        except RuntimeError as error:
            if is_communication_error(error):
                self.raise_lost_rank(error)
            raise

    def raise_lost_rank(self, error: RuntimeError) -> NoReturn:
        try:
            self.store.wait([REASON], timedelta(seconds=REASON_SECONDS))
            reason = self.store.get(REASON).decode()
        except RuntimeError:  # no reason was stored, or the store ended with rank 0
            cause = re.sub(r"^\[[^]]*\] |\. .*", "", str(error), flags=re.DOTALL)  # without the line of gloo's source
            reason = f"another rank ended or cannot be reached ({cause})"
        raise LostRankError(f"{reason}; all ranks stop") from error


@contextmanager
def join_ranks(device: Device, resumes: bool) -> Iterator[World]:
    """Join the process group that torchrun started this process for, if it did, and leave it at the end.

    Raises a ConfigError if torchrun would restart a command that does not resume."""
    launch = read_launch()
    if launch is None:
        yield World(choose_device(device))
        return
    if launch.max_restarts and not resumes:
        raise ConfigError("torchrun --max-restarts repeats this command after a failure; add --resume to continue then")
    chosen, backend = choose_device_and_backend(device, launch)
    store = connect_store(launch)
    distributed.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size)
    try:
        yield World(chosen, launch.rank, launch.world_size, store)
    except BaseException as error:
        if not isinstance(error, LostRankError):
            kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__} "
            store_reason(store, launch, f"rank {launch.rank} ended: {kind}{error}")
        raise
    distributed.destroy_process_group()


def choose_device_and_backend(device: Device, launch: Launch) -> tuple[torch.device, str]:
    """NCCL if each rank of this node has a GPU of its own; gloo on CPUs, and for ranks that share a GPU."""
    chosen = choose_device(device)
    if chosen.type == "cpu":
        return chosen, "gloo"
    gpus = torch.cuda.device_count()
    chosen = torch.device("cuda", launch.local_rank % gpus)
    torch.cuda.set_device(chosen)
    return chosen, "cpu:gloo,cuda:nccl" if launch.local_world_size <= gpus else "gloo"


def connect_store(launch: Launch) -> Any:
    """The key-value store of the ranks.

    torchrun keeps its own store after a restart: without a prefix gloo would connect to the addresses of dead ranks.
    """
    try:
        store, _, _ = next(distributed.rendezvous("env://"))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot connect to the other ranks ({error}); start them all with torchrun") from None
    return distributed.PrefixStore(f"attempt-{launch.restart_count}", store) if launch.has_agent_store else store


def store_reason(store: Any, launch: Launch, reason: str) -> None:
    """Tell the other ranks why this one ends; the first reason counts."""
    with suppress(RuntimeError):  # rank 0, which had the store, has ended
        store.compare_set(REASON, "", reason)
    if launch.rank == 0 and launch.world_size > 1 and not launch.has_agent_store and backend_is_gloo():
        distributed.destroy_process_group()  # the others notice it and read the reason before this process ends
        time.sleep(READING_SECONDS)


def backend_is_gloo() -> bool:
    return distributed.get_backend() == "gloo"


def is_communication_error(error: RuntimeError) -> bool:
    """Whether an error comes from NCCL, the store or gloo; of gloo it is known by the source file in its message."""
    return isinstance(error, distributed.DistError) or re.match(r"\[[^]]*\bgloo\b", str(error)) is not None


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Seed torch's generator for a step; on a CPU it uses 32 bits of the seed."""
    torch.manual_seed((seed * 1_000_003 + step + rank * 2_654_435_761) % 2**64)  # its limit


class GradientBuffer:
    """The gradients of parameters, and the losses, as views of one tensor; FSDP sums the gradients of sharded ones."""

    def __init__(self, parameters: list[nn.Parameter], device: torch.device) -> None:
        slices, size = assign_slices(parameters)
        self.flat = torch.zeros(size + MAX_LOSSES, device=device)
        self.views = {parameter: self.flat[part].view_as(parameter) for parameter, part in slices.items()}
        self.loss_values = self.flat[size:]  # [MAX_LOSSES]
        self.count_values = torch.zeros(MAX_LOSSES, device=device)
        self.is_sharded = not parameters
        self.loss_names: list[str] = []
        self.count_names: list[str] = []

    def write_counts(self, counts: Counts) -> None:
        self.count_names = list(counts)
        self.count_values[: len(counts)] = torch.stack([count.float() for count in counts.values()])

    def counts(self) -> Counts:
        return dict(zip(self.count_names, self.count_values, strict=False))

    def write_gradients_and_losses(self, losses: Metrics) -> None:
        """Copy gradients into the buffer, where the optimizer then reads them; those that are views stay."""
        views, gradients = [], []
        for parameter, view in self.views.items():
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                views.append(view)
                gradients.append(parameter.grad)
                parameter.grad = view
        if views:
            torch._foreach_copy_(views, gradients)
        self.loss_names = list(losses)
        self.loss_values[: len(losses)] = torch.stack(list(losses.values()))

    def clear_gradients(self) -> None:
        """Set gradients to None: a captured update does not do it when it is replayed."""
        for parameter in self.views:
            parameter.grad = None

    def losses(self) -> Metrics:
        return dict(zip(self.loss_names, self.loss_values, strict=False))


class DistributedStep:
    """A training step in three parts, with a sum over the ranks after the first two; `wrap` may capture each part."""

    def __init__(
        self,
        world: World,
        buffer: GradientBuffer,
        count: Callable[[Any], Counts],
        backward: Callable[[Any], Metrics],  # with the buffer's counts; returns the losses
        update: Callable[[Metrics], Metrics],
        wrap: Callable[[Any], Any],
    ) -> None:
        self.world, self.buffer = world, buffer
        self.count, self.backward, self.update = count, backward, update
        self.parts = [wrap(part) for part in (self.write_counts, self.write_gradients, self.update_weights)]

    def __call__(self, batch: Any) -> Metrics:
        write_counts, write_gradients, update_weights = self.parts
        write_counts(batch)
        self.world.add_over_ranks(self.buffer.count_values)
        with self.world.report_lost_rank() if self.buffer.is_sharded else nullcontext():  # FSDP communicates meanwhile
            write_gradients(batch)
        self.world.add_over_ranks(self.buffer.flat)
        return update_weights(None)

    def write_counts(self, batch: Any) -> Metrics:
        self.buffer.write_counts(self.count(batch))
        return {}

    def write_gradients(self, batch: Any) -> Metrics:
        self.buffer.clear_gradients()
        self.buffer.write_gradients_and_losses(self.backward(batch))
        return {}

    def update_weights(self, _: None) -> Metrics:
        return self.update(self.buffer.losses())


# Sharded models; what FSDP needs of torch is imported where it is used: that takes a second.


def shard_model(model: nn.Module, layers: Iterable[nn.Module], world: World, dtype: torch.dtype) -> None:
    """Divide the parameters of a model over the ranks; those of `layers` are gathered layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if not world.is_distributed:
        raise ConfigError("--shard-weights divides the weights over ranks; start them with torchrun")
    if world.device.type == "cuda" and backend_is_gloo():
        raise ConfigError("--shard-weights needs a GPU for each rank; start as many ranks as there are GPUs")
    if dtype == torch.float16:
        raise ConfigError("--shard-weights needs --precision bf16 or fp32, not fp16")
    mesh = init_device_mesh(world.device.type, (world.size,))
    casts = {} if dtype == torch.float32 else {"param_dtype": dtype, "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(**casts, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # losses are divided by the counts of all ranks already
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether each rank has a part of a tensor, which is a DTensor then."""
    return hasattr(tensor, "full_tensor")


def gather_shards(tensor: Tensor) -> Tensor:
    """A tensor of which each rank may have a part, as a whole; all ranks must call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def shard_like(whole: Tensor, other: Tensor) -> Tensor:
    """A tensor, which all ranks have, sharded over the ranks if `other`, of the same shape, is."""
    if not is_sharded(other) or whole.shape != other.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


@torch.no_grad()
def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Copy all parameters between models of which one may be sharded; all ranks must call this."""
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        theirs.copy_(shard_like(gather_shards(ours), theirs))
