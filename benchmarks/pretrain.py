"""Steps of joint pre-training (replaced token detection): ours against transformers' models in a plain loop.

    python benchmarks/pretrain.py [--data shards/] [--settings small:128x128 base:128x512] [--dropout 0 0.1] [--json]
    python benchmarks/pretrain.py --follow 200 [--data shards/] [--settings small:128x128]

A step is forward, backward, clipping and the optimizer, over batches that come from shards; without --data, of made-up
words. Ours is the trainer of `electra pretrain`: plain, with --compile, and with --compile --record. The peers are
ElectraForMaskedLM and ElectraForPreTraining with one set of embeddings, autocast and fused AdamW: `eager` as people
write it (vocabulary logits of every token, a mask of ones), `compiled` the fastest of its kind (torch.compile, logits
of masked rows only, no mask). Ours also keeps attention within the documents of a row, which the peers do not. All
have the same sizes, dropout, batch and masked positions, and the same operations are counted for all (logits of masked
rows). Start-up is building, compiling and the first step; kernels compiled in earlier runs are cached by torch.

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
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from made_shards import made_shards
from timing import ceiling, clear, median_seconds, reason, seconds_of
from torch import nn
from transformers_pair import Pair, eager_losses, lean_losses, their_config

from electra.errors import ConfigError, DataError
from electra.model.electra import Electra
from electra.model.flops import TRAINING, flops, items_of
from electra.model.huggingface import ARCHITECTURES, to_huggingface
from electra.model.sizes import SIZES, ModelConfig
from electra.objective.masking import slots
from electra.text.batches import Batches
from electra.text.shards import Shards, open_shards
from electra.training.journal import Window
from electra.training.plan import PretrainConfig, plan
from electra.training.pretraining import PretrainingLesson, batches_config
from electra.training.recipes import settings_for
from electra.training.trainer import Trainer

WAYS = {"plain": (), "compiled": ("compile",), "recorded": ("compile", "record")}  # flags of `electra pretrain`
PEERS = ("eager", "compiled")
WARMUPS = 5  # steps before time is taken: recording takes its own in them
SMOOTHED = 20  # steps that --follow takes the mean of
FORWARD_ROUNDS = 7


@dataclass(frozen=True)
class Setting:
    """What is trained: a size, and the shape of its batches."""

    size: str
    rows: int
    length: int
    dropout: float = 0.0

    def __str__(self) -> str:
        return f"{self.size}:{self.rows}x{self.length}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one side."""

    setting: str
    dropout: float
    side: str
    parameters: int = 0
    losses: dict[str, float] | None = None  # of the first step
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    ratio: float | None = None  # of speeds, to the eager peer's
    tflops: float | None = None
    share: float | None = None  # of the ceiling
    memory_gb: float | None = None  # the most that was allocated on the GPU
    first_step_seconds: float | None = None  # from nothing to the end of the first step
    failed: str | None = None

    def __str__(self) -> str:
        name = f"{self.setting:<15} dropout {self.dropout:<4} {self.side:<22}"
        if self.failed is not None:
            return f"{name} failed: {self.failed}"
        ratio = f"{self.ratio:5.2f}×" if self.ratio else "     –"
        memory = f"{self.memory_gb:6.1f} GB" if self.memory_gb is not None else ""
        speed = f"{self.tokens_per_second:>11,.0f} tokens/s  {ratio}  {1000 * (self.step_seconds or 0):8.2f} ms"
        work = f"{self.tflops:7.2f} TFLOP/s  {100 * (self.share or 0):5.1f} % of the ceiling"
        return f"{name} {speed}  {work}  {memory}  first step after {self.first_step_seconds:.1f} s"


@dataclass(frozen=True)
class Side:
    """Something that takes training steps."""

    model: nn.Module
    step: Callable[[], None]
    losses: Callable[[], dict[str, float]]  # of the last step


def peer_side(setting: Setting, shards: Shards, device: torch.device, way: str) -> Side:
    """Transformers' models in a plain loop."""
    config, vocabulary = our_config(setting, shards, "plain"), shards.tokenizer.vocabulary
    torch.manual_seed(config.seed)
    pair = Pair(config.pair(shards)).to(device).train()
    decay, count = config.weight_decay, slots(config.length, config)
    optimizer = torch.optim.AdamW(pair.parameters(), lr=config.learning_rate, weight_decay=decay, fused=True)
    losses_of = torch.compile(lean_losses) if way == "compiled" else eager_losses
    stream, last = iter(Batches(shards, batches_config(config), device=device)), {}

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses = losses_of(pair, next(stream).input_ids, count, vocabulary)
            loss = losses["generator"] + config.discriminator_weight * losses["discriminator"]
        loss.backward()
        nn.utils.clip_grad_norm_(pair.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        last.update({name: loss.detach() for name, loss in losses.items()})

    return Side(pair, step, lambda: {name: loss.item() for name, loss in last.items()})


def our_side(setting: Setting, shards: Shards, device: torch.device, way: str, **departures: Any) -> Side:
    """The trainer of `electra pretrain`, ready for its first step."""
    config = our_config(setting, shards, way, **departures)
    torch.manual_seed(config.seed)
    [phase] = plan(config, shards)
    lesson, records = PretrainingLesson(phase, shards, device), "record" in WAYS[way]
    trainer = Trainer(lesson, config, phase.stage, config.output, config.seed, records=records, end=phase.end)
    trainer.step = trainer.recorded_step() if records else trainer.compute

    def step() -> None:
        trainer.window = Window()
        trainer.take_step()

    return Side(lesson.model, step, lambda: trainer.window.means())


def our_config(setting: Setting, shards: Shards, way: str, **departures: Any) -> PretrainConfig:
    """The settings of our run, which the peers' are read from; weights start as transformers' do."""
    missing = set(WAYS[way]) - {field.name for field in fields(PretrainConfig)}
    if missing:
        raise ConfigError(f"`electra pretrain` has no --{missing.pop()} here")
    usual = settings_for("faithful", setting.size)
    settings = {name: usual[name] for name in ("learning_rate", "mask_fraction")} | dict.fromkeys(WAYS[way], True)
    settings |= {"size": setting.size, "length": setting.length, "batch_size": setting.rows, "steps": 10_000}
    settings |= {"dropout": setting.dropout, "evaluation_rows": 32}
    return PretrainConfig(data=shards.folder, output=shards.folder / "never-written", **settings | departures)


def measured(row: Row, build: Callable[[], Side], setting: Setting, steps: int, device: torch.device) -> Row:
    """A row with what one side takes for a step; or with why it failed, so that others can go on."""
    try:
        began = time.perf_counter()
        side = build()
        side.step()
        losses = {name: side.losses()[name] for name in ("generator", "discriminator")}  # waits for the device
        first = time.perf_counter() - began
        for _ in range(WARMUPS):
            side.step()
        seconds = median_seconds(side.step, steps, device)
        memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
        return replace(
            row,
            parameters=sum(parameter.numel() for parameter in side.model.parameters()),
            losses=losses,
            step_seconds=seconds,
            tokens_per_second=setting.rows * setting.length / seconds,
            memory_gb=memory,
            first_step_seconds=first,
        )
    except Exception as error:  # whatever it is, the other rows are still wanted
        return replace(row, failed=reason(error))
    finally:
        clear(device)


def step_flops(setting: Setting, shards: Shards) -> float:
    """Operations of a step with vocabulary logits of masked rows only."""
    config = our_config(setting, shards, "plain")
    items = items_of(config.pair(shards), config.length, slots(config.length, config))
    return TRAINING * setting.rows * sum(map(flops, items.values()))


def sides(arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Side]]]:
    """What is measured, by name, peers first."""
    for way in arguments.peers:
        yield f"transformers {way}", partial(peer_side, way=way)
    for optimizer in dict.fromkeys(("adamw", arguments.optimizer)):
        for way in arguments.ours:
            name = f"electra {way}" + (f", {optimizer}" if optimizer != "adamw" else "")
            yield name, partial(our_side, way=way, optimizer=optimizer)


def compared(
    setting: Setting, shards: Shards, device: torch.device, top: float, arguments: argparse.Namespace
) -> Iterator[Row]:
    """The rows of a setting, one by one."""
    work, eager = step_flops(setting, shards), None
    for name, build in sides(arguments):
        row = Row(setting=str(setting), dropout=setting.dropout, side=name)
        row = measured(row, partial(build, setting, shards, device), setting, arguments.steps, device)
        if row.step_seconds is not None:
            eager = row.step_seconds if name == "transformers eager" else eager
            speed, ratio = work / row.step_seconds, eager and eager / row.step_seconds
            row = replace(row, ratio=ratio, tflops=speed / 1e12, share=speed / top)
        yield row


def check(rows: list[Row]) -> str:
    """Whether all sides did the same work: as many parameters, and about the same losses at first."""
    taken = [row for row in rows if row.losses is not None]
    if not taken:
        return "nothing was measured"
    counts = sorted({row.parameters for row in taken})
    spans = {name: [f(row.losses[name] for row in taken) for f in (min, max)] for name in taken[0].losses or {}}
    is_same = len(counts) == 1 and all(high - low < 0.1 * high for low, high in spans.values())
    told = ", ".join(f"{name} {low:.3f} to {high:.3f}" for name, (low, high) in spans.items())
    verdict = "the same work" if is_same else "NOT THE SAME WORK"
    return f"{verdict}: {' and '.join(f'{count:,}' for count in counts)} parameters; first losses: {told}"


def followed(setting: Setting, shards: Shards, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """How far the smoothed losses of our fastest path are from those of the plain one in fp32."""
    steps, way, found = arguments.follow, arguments.ours[-1], {}
    settings = {"optimizer": arguments.optimizer, "steps": steps}
    try:
        plain = curves(our_side(setting, shards, device, "plain", precision="fp32", **settings), steps)
        clear(device)
        fast = curves(our_side(setting, shards, device, way, **settings), steps)
        for name in plain:
            found[name] = float((np.abs(fast[name] - plain[name]) / plain[name]).max())
            found[f"{name}_last"] = [float(plain[name][-1]), float(fast[name][-1])]
    except Exception as error:  # other settings are still wanted
        found = {"failed": reason(error)}
    finally:
        clear(device)
    return {"setting": str(setting), "dropout": setting.dropout, "side": f"electra {way}", "steps": steps, **found}


def curves(side: Side, steps: int) -> dict[str, np.ndarray]:
    """Smoothed losses of some steps."""
    taken = []
    for _ in range(steps):
        side.step()
        taken.append(side.losses())
    window = np.ones(min(SMOOTHED, steps)) / min(SMOOTHED, steps)
    names = ("generator", "discriminator")
    return {name: np.convolve([losses[name] for losses in taken], window, "valid") for name in names}


@torch.no_grad()
def forward(size: str, rows: int, device: torch.device, length: int = 128) -> dict[str, Any]:
    """A forward pass of the discriminator, ours and theirs with the same weights, in turn."""
    config = ModelConfig(size=size).electra()
    ours = Electra(config).the_discriminator().to(device).eval()
    theirs = transformers.ElectraForPreTraining(their_config(config.discriminator)).to(device).eval()
    theirs.load_state_dict(to_huggingface(ours.state_dict(), ARCHITECTURES["ElectraForPreTraining"]))
    input_ids = torch.randint(1000, 30000, (rows, length), device=device)
    apart = (ours(input_ids) - theirs(input_ids).logits).abs().max().item()
    times = max(3, 60 // rows)
    rounds = [
        [seconds_of(partial(model, input_ids), times, device) for model in (ours, theirs)]
        for _ in range(FORWARD_ROUNDS)
    ]
    mine, peer = (statistics.median(column) for column in zip(*rounds, strict=True))
    return {"size": size, "rows": rows, "ours": mine, "peer": peer, "ratio": peer / mine, "apart": apart}


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
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS if is_cuda else PEERS[:1])
    parser.add_argument("--ours", nargs="*", choices=WAYS, default=list(WAYS) if is_cuda else ["plain"])
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: ours also with it")
    parser.add_argument("--steps", type=int, default=30 if is_cuda else 10, help="steps that are timed")
    parser.add_argument("--forward", nargs="*", type=int, default=[] if is_cuda else [1, 32], help="rows of a forward")
    parser.add_argument("--follow", type=int, help="compare the losses of so many steps instead of speeds")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(words)


def report(shards: Shards, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """All that was measured; rows are printed as they come."""
    say = (lambda said: None) if arguments.json else partial(print, flush=True)
    top = ceiling(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    found |= {"ceiling_tflops": top / 1e12, "rows": [], "checks": [], "forward": [], "follow": []}
    say(f"{name}; ceiling of a matrix product {top / 1e12:.2f} TFLOP/s")
    for setting in [replace(each, dropout=dropout) for each in arguments.settings for dropout in arguments.dropout]:
        if arguments.follow:
            found["follow"].append(followed(setting, shards, device, arguments))
            say(json.dumps(found["follow"][-1]))
            continue
        rows = []
        for row in compared(setting, shards, device, top, arguments):
            rows.append(row)
            say(row)
        found["rows"] += map(asdict, rows)
        found["checks"].append(check(rows))
        say(found["checks"][-1])
    for size, rows in product(dict.fromkeys(each.size for each in arguments.settings), arguments.forward):
        found["forward"].append(forward(size, rows, device))
        say(found["forward"][-1])
    return found


def main(words: list[str] | None = None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments = read_arguments(words, is_cuda=device.type == "cuda")
    with tempfile.TemporaryDirectory() as folder:
        try:
            shards = open_shards(arguments.data or made_shards(Path(folder)))
        except DataError as error:
            sys.exit(str(error))
        found = report(shards, device, arguments)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
