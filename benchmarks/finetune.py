"""Fine-tuning, ours against a plain loop over transformers' model: its seconds or, with --scores, its dev scores.

    python benchmarks/finetune.py --data glue/ --vocab vocab.txt [--model hf-folder] [--tasks cola rte] [--json]
    python benchmarks/finetune.py --data glue/ --model hf-folder --scores --seeds 5 [--tasks cola rte] [--json]

Both have the same weights, rows, batch, epochs, precision and dropout (the model's own); clipping and AdamW as in both
defaults. Ours is `electra finetune`, run to its end. The loop is what people write: rows tokenised beforehand, a
DataLoader that shuffles and pads to the longest row, autocast, fused AdamW, a linear schedule.

Speed is of one seed: the loop's time a step is measured over `--peer-steps` steps after ten to warm up, times the steps
that ours took. Tokenising and loading count for neither. Without --model both start from the same fresh ELECTRA-Small:
speed does not depend on weights.

Scores are the medians over seeds of the task's first metric on its dev rows, with the standard deviation: does the
exported folder give the same ones to those who never heard of us? The loop then has our learning rate for the size, a
share of it for each layer, warm-up and epochs, goes to its end, and keeps transformers' own head (a hidden layer more).
"""

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from timing import synchronize

from electra.config import build
from electra.data.tokenizer import load_tokenizer
from electra.export.command import export
from electra.export.config import ExportConfig
from electra.finetuning.command import finetune
from electra.finetuning.config import FinetuneConfig
from electra.finetuning.features import make_targets
from electra.finetuning.glue import GLUE_6
from electra.finetuning.job import EVALUATION_BATCH_SIZE, RESULT
from electra.finetuning.metrics import METRICS, median, standard_deviation
from electra.finetuning.model import OUTPUT_TYPES
from electra.finetuning.tasks import Examples, Task, glue_task, read_examples
from electra.huggingface.folders import read_part
from electra.model.config import ModelConfig
from electra.model.electra import Electra
from electra.model.storage import save_model
from electra.runfolder import read_json


def fresh_model(vocab: Path, folder: Path, size: str) -> Path:
    """A Hugging Face folder of a pair that was never trained."""
    tokenizer = load_tokenizer(vocab)
    tokenizer.save(folder / "tokenizer")
    torch.manual_seed(0)
    electra = Electra(ModelConfig(size=size).electra_config(tokenizer.vocabulary.size, tokenizer.vocabulary.pad_id))
    save_model(electra, folder / "fresh", folder / "tokenizer")
    export(ExportConfig(model=folder / "fresh", output=folder / "huggingface"))
    return folder / "huggingface"


def settings_of(model: Path, task: str, data: str, folder: Path, device: str, seeds: int = 1) -> FinetuneConfig:
    """How both sides fine-tune; what is not named is ours by default."""
    settings = {"model": model, "task": task, "data": data, "output": folder / task, "device": device, "seeds": seeds}
    return build(FinetuneConfig, **settings)


class Peer:
    """transformers' model with a new head for a task, and what a plain loop needs around it."""

    def __init__(self, config: FinetuneConfig, task: Task) -> None:
        from transformers import AutoTokenizer, ElectraForSequenceClassification

        self.config, self.task, self.device = config, task, torch.device(config.hardware.device)
        self.tokenizer = AutoTokenizer.from_pretrained(config.model)
        model = ElectraForSequenceClassification.from_pretrained(config.model, num_labels=task.num_labels)
        self.model = model.to(self.device).train()

    def loader(self, examples: Examples, **settings: Any) -> torch.utils.data.DataLoader:
        """BatchLoader of examples, tokenised beforehand, padded to the longest row."""
        from transformers import DataCollatorWithPadding

        encoded = self.tokenizer(
            examples.texts, examples.texts_b, truncation=True, max_length=self.config.tuning.length
        )
        columns = dict(encoded) | {"labels": make_targets(self.task, examples.labels).tolist()}
        rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        return torch.utils.data.DataLoader(rows, collate_fn=DataCollatorWithPadding(self.tokenizer), **settings)

    def said(self, batch: Any) -> Any:
        """Logits and loss of a batch."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.model(**batch.to(self.device))

    def update(self, batch: Any, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        """One step of the loop."""
        self.said(batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def our_seconds(config: FinetuneConfig) -> tuple[float, float, int]:
    """Seconds of training, seconds altogether, and steps of one seed."""
    began = time.perf_counter()
    finetune(config)
    result = read_json(config.output / "seed-1" / RESULT)
    return result["seconds"], time.perf_counter() - began, result["steps"]


def peer_step(config: FinetuneConfig, task: Task, steps: int) -> float:
    """Seconds a step of the plain loop."""
    peer, examples = Peer(config, task), read_examples(task, "train")
    kept = range(min(len(examples), config.tuning.batch_size * (steps + 20)))
    loader = peer.loader(examples.select(kept), batch_size=config.tuning.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(peer.model.parameters(), lr=3e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10_000))
    taken, began = 0, 0.0
    while True:
        for batch in loader:
            if taken == 10:
                synchronize(peer.device)
                began = time.perf_counter()
            if taken == steps + 10:
                synchronize(peer.device)
                return (time.perf_counter() - began) / steps
            peer.update(batch, optimizer, schedule)
            taken += 1


def speed(config: FinetuneConfig, task: Task, peer_steps: int) -> dict[str, Any]:
    """Seconds that both sides take for a seed of a task."""
    ours, altogether, steps = our_seconds(config)
    peer = steps * peer_step(config, task, peer_steps)
    return {"steps": steps, "ours": ours, "altogether": altogether, "peer": peer, "ratio": peer / ours}


def told_speed(found: dict[str, Any]) -> str:
    """The same in words."""
    ours = f"ours {found['ours']:7.1f} s ({found['altogether']:.1f} s with loading and measuring)"
    return f"{found['steps']:>7,} steps   {ours}   transformers {found['peer']:7.1f} s   {found['ratio']:5.2f}×"


def peer_score(config: FinetuneConfig, task: Task, seed: int) -> float:
    """The first metric on the dev rows when the plain loop has seen the training rows as often as the task wants."""
    from transformers import get_linear_schedule_with_warmup

    torch.manual_seed(seed)
    peer, train = Peer(config, task), read_examples(task, "train")
    loader = peer.loader(
        train.with_swapped_pairs() if task.double_unordered else train,
        batch_size=config.tuning.batch_size,
        shuffle=True,
    )
    encoder, _ = read_part(config.model)
    tuning, epochs = config.tuning, config.tuning.epochs_for(task)
    settings, steps = tuning.optimizer_config(encoder), epochs * len(loader)
    groups = layer_groups(peer.model, settings.learning_rate, tuning.layer_decay_for(encoder))
    optimizer = torch.optim.AdamW(groups, weight_decay=settings.weight_decay, eps=settings.epsilon, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, round(settings.warmup * steps), steps)
    for _ in range(epochs):
        for batch in loader:
            peer.update(batch, optimizer, schedule)
    return measured(peer, read_examples(task, "dev"))


def layer_groups(model: torch.nn.Module, rate: float, decay: float) -> list[dict[str, Any]]:
    """Parameters with the rates of their layers: the head at the full one, each layer at a share of the one above."""
    layers, groups = model.config.num_hidden_layers, {}
    for name, parameter in model.named_parameters():
        layer = re.match(r"electra\.encoder\.layer\.(\d+)\.", name)
        below = layers - int(layer[1]) if layer else 0 if name.startswith("classifier.") else layers + 1
        groups.setdefault(below, []).append(parameter)
    return [{"params": parameters, "lr": rate * decay**below} for below, parameters in groups.items()]


@torch.no_grad()
def measured(peer: Peer, examples: Examples) -> float:
    """The task's first metric of what the loop's model says of examples."""
    peer.model.eval()
    loader = peer.loader(examples, batch_size=EVALUATION_BATCH_SIZE)
    logits = torch.cat([peer.said(batch).logits.float().cpu() for batch in loader]).numpy()
    answers = OUTPUT_TYPES[peer.task.kind].predict(logits, peer.task)
    return METRICS[peer.task.metrics[0]](answers, examples.labels)


def scores(config: FinetuneConfig, task: Task) -> dict[str, Any]:
    """The dev scores of both sides, seed by seed."""
    metric = task.metrics[0]
    ours, peers = [seed["dev"][metric] for seed in finetune(config).seeds], []
    for seed in range(1, config.jobs.seeds + 1):
        peers.append(peer_score(config, task, seed))
        print(f"{task.name}, seed {seed}: transformers {metric} {100 * peers[-1]:.1f}", file=sys.stderr, flush=True)
    return {"metric": metric, "ours": over_seeds(ours), "peer": over_seeds(peers)}


def over_seeds(found: list[float]) -> dict[str, Any]:
    """Median, standard deviation and each seed."""
    return {"median": median(found), "spread": standard_deviation(found), "seeds": found}


def told_scores(found: dict[str, Any]) -> str:
    """The same in words."""
    sides = {"ours": found["ours"], "transformers": found["peer"]}
    told = [f"{name} {100 * side['median']:6.2f} ± {100 * side['spread']:.2f}" for name, side in sides.items()]
    return f"  {found['metric']:<9}{'   '.join(told)}   (medians of {len(found['ours']['seeds'])} seeds)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="the folder of GLUE")
    parser.add_argument("--vocab", type=Path, help="vocabulary of the fresh model")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder of ELECTRA, in place of a fresh one")
    parser.add_argument("--size", default="small", help="size of the fresh model")
    parser.add_argument("--tasks", nargs="+", default=list(GLUE_6))
    parser.add_argument("--peer-steps", type=int, default=150, help="steps of the loop that are timed")
    parser.add_argument("--scores", action="store_true", help="run both sides to the end, and compare dev scores")
    parser.add_argument("--seeds", type=int, default=5, help="of --scores")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.model is None and arguments.vocab is None:
        parser.error("give --vocab for a fresh model, or --model")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model or fresh_model(arguments.vocab, folder, arguments.size)
        for task in arguments.tasks:
            config = settings_of(
                model, task, arguments.data, folder, device, arguments.seeds if arguments.scores else 1
            )
            rows = glue_task(task, arguments.data)
            found[task] = scores(config, rows) if arguments.scores else speed(config, rows, arguments.peer_steps)
            if not arguments.json:
                told = told_scores(found[task]) if arguments.scores else told_speed(found[task])
                print(f"{task:<6}{told}", flush=True)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
