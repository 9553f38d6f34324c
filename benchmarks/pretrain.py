"""Steps of joint pre-training (replaced token detection): ours against transformers' models in a plain loop.

    python benchmarks/pretrain.py [--data shards/] [--settings small:128x128 base:128x512] [--dropout 0 0.1] [--json]
    python benchmarks/pretrain.py --follow 200 [--data shards/] [--settings small:128x128]

A step is forward, backward, clipping and the optimizer, over batches that come from shards; without --data, of made-up
words. Ours is the trainer of `electra pretrain`: with --compile off, and fast (--compile on). The peers are
ElectraForMaskedLM and ElectraForPreTraining with one set of embeddings, autocast and fused AdamW: `eager` as people
write it (vocabulary logits of every token, a mask of ones), `compiled` the fastest of its kind (torch.compile, logits
of masked rows only, no mask). Ours also keeps attention within the documents of a row, which the peers do not; with
--reach rows it sees whole rows as theirs does. All have the same sizes, dropout, batch and masked positions, and the
same operations are counted for all (whole rows, logits of masked positions). Start-up is building, compiling and the
first step; kernels compiled in earlier runs are cached by torch.

--profile also says what the kernels of a step are for, and how long each kind takes.
--follow trains our plain path in fp32 and our fastest one on the same batches, and compares their losses.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_shards import made_shards
from profiling import Kind, kinds_of, told
from timing import attempted, ceiling, clear, median_seconds, seconds_of
from torch import nn
from transformers import ElectraForPreTraining
from transformers_pair import Pair, eager_losses, lean_losses, their_config

from electra.config import construct
from electra.data.loader import BatchLoader
from electra.data.shards import Shards, open_shards
from electra.errors import ConfigError, DataError
from electra.huggingface.convert import to_huggingface
from electra.huggingface.names import ARCHITECTURES
from electra.model.config import SIZES, ModelConfig
from electra.model.electra import Electra
from electra.model.flops import training_flops
from electra.objectives.masking import mask_slots
from electra.pretraining.command import plan
from electra.pretraining.config import PretrainConfig, recipe_settings
from electra.pretraining.initialize import build_pair
from electra.pretraining.task import PretrainingTask
from electra.training.logging import RunningAverages
from electra.training.trainer import Trainer

WAYS = {"plain": "off", "fast": "on"}  # --compile of `electra pretrain`; on a GPU compiled steps become CUDA graphs
PEERS = {"eager": eager_losses, "compiled": lean_losses}
LOSSES = ("generator", "discriminator")
WARMUPS = 5  # steps after the first, before time is taken: recording takes place in them
SMOOTHED = 20  # steps that --follow takes the mean of
FORWARD = 128  # tokens of a row in a forward pass
ROUNDS = 7  # in which ours and theirs take turns going forward
Report = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What is trained: a size, and the shape of its batches."""

    size: str
    rows: int
    length: int
    dropout: float = 0.0

    def __str__(self) -> str:
        return f"{self.size}:{self.rows}x{self.length}"


@dataclass(frozen=True)
class Ground:
    """What all sides stand on."""

    shards: Shards
    device: torch.device
    ceiling: float  # operations a second of a matrix product


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one side."""

    setting: str
    dropout: float
    side: str
    parameters: int = 0
    losses: dict[str, float] | None = None  # of the first step
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    ratio: float | None = None  # of speeds, to the eager peer's
    tflops: float = 0.0
    share: float = 0.0  # of the ceiling
    memory_gb: float | None = None  # the most that was allocated on the GPU
    first_step_seconds: float = 0.0  # from nothing to the end of the first step
    ready_seconds: float = 0.0  # and of the next few, in which steps are recorded
    kinds: dict[str, Kind] | None = None  # of kernels, with --profile
    failed: str | None = None

    def __str__(self) -> str:
        name = f"{self.setting:<15} dropout {self.dropout:<4} {self.side:<25}"
        if self.failed is not None:
            return f"{name} failed: {self.failed}"
        ratio = f"{self.ratio:5.2f}×" if self.ratio else "     –"
        memory = f"{self.memory_gb:6.1f} GB" if self.memory_gb is not None else "     – GB"
        speed = f"{self.tokens_per_second:>11,.0f} tokens/s  {ratio}  {1000 * self.step_seconds:8.2f} ms"
        work = f"{self.tflops:7.3g} TFLOP/s  {self.share:6.1%} of the ceiling"
        kinds = f"\n    {told(self.kinds)}" if self.kinds else ""
        return f"{name} {speed}  {work}  {memory}  first step after {self.first_step_seconds:.1f} s{kinds}"


@dataclass(frozen=True)
class Side:
    """Something that takes training steps."""

    model: nn.Module
    step: Callable[[], None]
    losses: Callable[[], dict[str, float]]  # of the last step


def peer_side(setting: Setting, ground: Ground, way: str) -> Side:
    """Transformers' models in a plain loop."""
    config, shards, device = our_config(setting, ground.shards, "plain"), ground.shards, ground.device
    torch.manual_seed(config.seed)
    pair = Pair(build_pair(config, shards)).to(device).train()
    decay, count = config.optimizer.weight_decay, mask_slots(config.loader.length, config.masking)
    optimizer = torch.optim.AdamW(pair.parameters(), lr=config.optimizer.learning_rate, weight_decay=decay, fused=True)
    losses_of = torch.compile(PEERS[way]) if way == "compiled" else PEERS[way]
    stream, last = iter(BatchLoader(shards, config.loader, seed=config.seed, device=device)), {}

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses = losses_of(pair, next(stream).input_ids, count, shards.tokenizer.vocabulary)
            loss = losses["generator"] + config.objective.discriminator_weight * losses["discriminator"]
        loss.backward()
        nn.utils.clip_grad_norm_(pair.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        last.update({name: loss.detach() for name, loss in losses.items()})

    return Side(pair, step, lambda: {name: loss.item() for name, loss in last.items()})


def our_side(setting: Setting, ground: Ground, way: str, **departures: Any) -> Side:
    """The trainer of `electra pretrain`, ready for its first step."""
    config = our_config(setting, ground.shards, way, **departures)
    torch.manual_seed(config.seed)
    [phase] = plan(config, ground.shards)
    lesson = PretrainingTask(phase, ground.shards, ground.device)
    trainer = Trainer(
        lesson,
        config.optimizer,
        config.trainer,
        phase.stage_budget,
        config.output,
        seed=config.seed,
        cuda_graphs=lesson.captures_graph,
        stop_at=phase.stage_end,
    )
    trainer.run_step = trainer.graphed_step() if lesson.captures_graph else trainer.compute_step

    def step() -> None:
        trainer.averages = RunningAverages()
        trainer.step()

    return Side(lesson.model, step, lambda: trainer.averages.means())


def our_config(setting: Setting, shards: Shards, way: str, **departures: Any) -> PretrainConfig:
    """The settings of our run, which the peers' are read from; weights start as transformers' do."""
    usual = recipe_settings("faithful", setting.size)
    settings = {name: usual[name] for name in ("learning_rate", "mask_fraction")} | {"compile": WAYS[way]}
    settings |= {"size": setting.size, "length": setting.length, "batch_size": setting.rows, "steps": 10_000}
    settings |= {"dropout": setting.dropout, "evaluation_rows": 32}
    values = {"data": shards.folder, "output": shards.folder / "never-written"} | settings | departures
    return construct(PretrainConfig, values)


def timed(build: Callable[[], Side], setting: Setting, ground: Ground, arguments: argparse.Namespace) -> Report:
    """What one side takes for a step, in the words of a row."""
    began = time.perf_counter()
    side = build()
    side.step()
    losses = side.losses()  # waits for the device
    first = time.perf_counter() - began
    ready = first + WARMUPS * seconds_of(side.step, WARMUPS, ground.device)
    seconds = median_seconds(side.step, arguments.steps, ground.device)
    speed = step_flops(setting, ground.shards) / seconds
    return {
        "parameters": sum(parameter.numel() for parameter in side.model.parameters()),
        "losses": {name: losses[name] for name in LOSSES},
        "step_seconds": seconds,
        "tokens_per_second": setting.rows * setting.length / seconds,
        "tflops": speed / 1e12,
        "share": speed / ground.ceiling,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if ground.device.type == "cuda" else None,
        "first_step_seconds": first,
        "ready_seconds": ready,
        "kinds": kinds_of(side.step, ground.device) if arguments.profile else None,
    }


def step_flops(setting: Setting, shards: Shards) -> float:
    """Operations of a step with vocabulary logits of masked rows only."""
    config = our_config(setting, shards, "plain")
    return setting.rows * training_flops(
        build_pair(config, shards), config.loader.length, mask_slots(config.loader.length, config.masking)
    )


def sides(arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Side]]]:
    """What is measured, by name, peers first."""
    for way in arguments.peers:
        yield f"transformers {way}", partial(peer_side, way=way)
    optimizers = dict.fromkeys(("adamw", arguments.optimizer))
    for optimizer, reach, way in product(optimizers, arguments.reach, arguments.ours):
        others = [*(["whole rows"] if reach == "rows" else []), *([optimizer] if optimizer != "adamw" else [])]
        departures = {"optimizer": optimizer, "cross_document_attention": reach == "rows"}
        yield ", ".join([f"electra {way}", *others]), partial(our_side, way=way, **departures)


def compare(setting: Setting, ground: Ground, arguments: argparse.Namespace, say: Callable[[Any], None]) -> list[Row]:
    """The rows of a setting."""
    rows: list[Row] = []
    for name, build in sides(arguments):
        act = partial(timed, partial(build, setting, ground), setting, ground, arguments)
        row = Row(setting=str(setting), dropout=setting.dropout, side=name, **attempted(act, ground.device))
        eager = next((each for each in [*rows, row] if each.side == "transformers eager"), row)
        if "eager" in arguments.peers and not row.failed and not eager.failed:
            row = replace(row, ratio=row.tokens_per_second / eager.tokens_per_second)
        rows.append(row)
        say(row)
    say(check(rows))
    return rows


def check(rows: list[Row]) -> str:
    """Whether all sides did the same work: as many parameters, and about the same losses at first."""
    taken = [row for row in rows if row.losses]
    if not taken:
        return "no side could be measured"
    counts = sorted({row.parameters for row in taken})
    spans = {name: sorted(row.losses[name] for row in taken if row.losses) for name in LOSSES}
    is_same = len(counts) == 1 and all(found[-1] - found[0] < 0.1 * found[-1] for found in spans.values())
    told = ", ".join(f"{name} {found[0]:.3f} to {found[-1]:.3f}" for name, found in spans.items())
    parameters = " and ".join(f"{count:,}" for count in counts)
    return f"{'the same' if is_same else 'NOT the same'} work: {parameters} parameters; first losses: {told}"


def follow(setting: Setting, ground: Ground, arguments: argparse.Namespace) -> Report:
    """How far the smoothed losses of our fastest path are from those of the plain one in fp32, relatively and at most,
    and where both end."""
    train = partial(our_side, setting, ground, optimizer=arguments.optimizer, steps=arguments.follow)
    plain = curves(train(way="plain", precision="fp32"), arguments.follow)
    clear(ground.device)
    fast = curves(train(way=arguments.ours[-1]), arguments.follow)
    apart = {f"{name}_apart": float((np.abs(fast[name] - plain[name]) / plain[name]).max()) for name in LOSSES}
    ends = {f"{name}_ends": [float(found[name][-1]) for found in (plain, fast)] for name in LOSSES}
    return {"side": f"electra {arguments.ours[-1]}", "steps": arguments.follow} | apart | ends


def curves(side: Side, steps: int) -> dict[str, np.ndarray]:
    """Smoothed losses of some steps."""
    taken = []
    for _ in range(steps):
        side.step()
        taken.append(side.losses())
    window = np.ones(min(SMOOTHED, steps)) / min(SMOOTHED, steps)
    return {name: np.convolve([losses[name] for losses in taken], window, "valid") for name in LOSSES}


@torch.no_grad()
def forward(setting: Setting, device: torch.device) -> Report:
    """Milliseconds of the discriminator's forward pass, ours and theirs with the same weights, taking turns."""
    config = ModelConfig(size=setting.size).electra_config()
    ours = Electra(config).require_discriminator().to(device).eval()
    theirs = ElectraForPreTraining(their_config(config.discriminator)).to(device).eval()
    theirs.load_state_dict(to_huggingface(ours.state_dict(), ARCHITECTURES["ElectraForPreTraining"]))
    text = torch.randint(config.discriminator.vocab_size, (setting.rows, setting.length), device=device)
    apart = (ours(text) - theirs(text).logits).abs().max().item()
    times = max(2, 64 // setting.rows)
    rounds = [[seconds_of(partial(model, text), times, device) for model in (ours, theirs)] for _ in range(ROUNDS)]
    mine, peer = (1000 * statistics.median(column) for column in zip(*rounds, strict=True))
    return {"electra_ms": mine, "transformers_ms": peer, "ratio": peer / mine, "logits_apart": apart}


def entry(setting: Setting, act: Callable[[], Report], device: torch.device, say: Callable[[Any], None]) -> Report:
    """What was found of a setting, which is also said."""
    found = {"setting": str(setting), "dropout": setting.dropout} | attempted(act, device)
    say(
        "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
        )
    )
    return found


def read_setting(word: str) -> Setting:
    """A setting as the command line has it."""
    found = re.fullmatch(r"(\w+):(\d+)x(\d+)", word)
    if found is None or found[1] not in SIZES:
        sizes = ", ".join(SIZES)
        raise argparse.ArgumentTypeError(f"{word!r} is no SIZE:ROWSxLENGTH such as small:128x128; sizes are {sizes}")
    return Setting(found[1], int(found[2]), int(found[3]))


def read_arguments(words: list[str] | None, is_cuda: bool) -> argparse.Namespace:
    """The command line; a CPU is asked for less."""
    settings = "small:128x128 small:1024x128 base:128x512 large:64x512" if is_cuda else "tiny:16x64 small:8x128"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder that `electra shard` wrote; made-up words without")
    parser.add_argument("--settings", nargs="+", type=read_setting, default=list(map(read_setting, settings.split())))
    parser.add_argument("--dropout", nargs="+", type=float, default=[0.0, 0.1])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS) if is_cuda else ["eager"])
    parser.add_argument(
        "--ours", nargs="*", choices=WAYS, help="default: both on a GPU; plain on a CPU, fast to follow"
    )
    parser.add_argument(
        "--reach", nargs="+", choices=["documents", "rows"], default=["documents"], help="of our tokens"
    )
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: ours also with it")
    parser.add_argument("--steps", type=int, default=30 if is_cuda else 10, help="steps that are timed")
    parser.add_argument("--forward", nargs="*", type=int, default=[] if is_cuda else [1, 32], help="rows of a forward")
    parser.add_argument("--profile", action="store_true", help="say what the kernels of a step are for")
    parser.add_argument("--follow", type=int, help="compare the losses of so many steps instead of speeds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    if arguments.ours is None:
        arguments.ours = list(WAYS) if is_cuda else ["plain" if arguments.follow is None else "fast"]
    least = {
        "--steps": arguments.steps,
        "--follow": arguments.follow,
        "--forward": min(arguments.forward, default=None),
    }
    if small := [name for name, number in least.items() if number is not None and number < 1]:
        parser.error(f"{small[0]} is {least[small[0]]}; it must be at least 1")
    if arguments.follow is not None and not arguments.ours:
        parser.error("--follow needs a way of --ours")
    return arguments


def all_settings(arguments: argparse.Namespace) -> list[Setting]:
    """Every setting with every dropout."""
    return [replace(each, dropout=dropout) for each in arguments.settings for dropout in arguments.dropout]


def report(ground: Ground, arguments: argparse.Namespace, say: Callable[[Any], None]) -> Report:
    """All that was measured; it is said as it comes."""
    device, follows = ground.device, arguments.follow is not None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    say(f"{name}; ceiling of a matrix product {ground.ceiling / 1e12:.3g} TFLOP/s")
    settings = all_settings(arguments)
    forwards = [Setting(*each, FORWARD) for each in product({each.size: 0 for each in settings}, arguments.forward)]
    groups = [] if follows else [compare(each, ground, arguments, say) for each in settings]
    following = [entry(each, partial(follow, each, ground, arguments), device, say) for each in settings if follows]
    return {
        "device": name,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "ceiling_tflops": ground.ceiling / 1e12,
        "rows": [asdict(row) for rows in groups for row in rows],
        "checks": [check(rows) for rows in groups],
        "follow": following,
        "forward": [entry(each, partial(forward, each, device), device, say) for each in forwards if not follows],
    }


def main(words: list[str] | None = None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments = read_arguments(words, is_cuda=device.type == "cuda")
    say = (lambda said: None) if arguments.json else partial(print, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            shards = open_shards(arguments.data or made_shards(Path(folder)))
            for setting in all_settings(arguments):
                plan(our_config(setting, shards, "plain"), shards)
        except (ConfigError, DataError) as error:
            print(error, file=sys.stderr)
            sys.exit(2)
        found = report(Ground(shards, device, ceiling(device)), arguments, say)
    if arguments.json:
        print(json.dumps(found))
    if found["rows"] and all(row["failed"] for row in found["rows"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
