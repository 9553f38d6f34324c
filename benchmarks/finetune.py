"""Fine-tuning one seed of each task: ours, whole, against a plain loop over transformers' model.

    python benchmarks/finetune.py --data glue/ --vocab vocab.txt [--model hf-folder] [--tasks cola rte] [--json]

Both have the same weights, rows, batch, epochs and precision; dropout 0.1, clipping and AdamW as in both defaults. Ours
is `electra finetune` with one seed, run to its end. The loop is what people write: rows tokenised beforehand, a
DataLoader that shuffles and pads to the longest row, autocast, fused AdamW, a linear schedule; its time a step is
measured over `--peer-steps` steps after ten to warm up, times the steps that ours took. Tokenising and loading
count for neither. Without --model both start from the same fresh ELECTRA-Small: speed does not depend on weights.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from timing import wait

from electra.export.command import ExportConfig, export
from electra.finetune.finetuning import FinetuneConfig, finetune
from electra.finetune.glue import GLUE_6
from electra.finetune.tasks import Task, glue_task, read_examples
from electra.finetune.tuning import RESULT
from electra.model.electra import Electra
from electra.model.sizes import ModelConfig
from electra.model.storage import read_json, save_model
from electra.text.tokenizer import load_tokenizer


def fresh_model(vocab: Path, folder: Path, size: str) -> Path:
    """A Hugging Face folder of a pair that was never trained."""
    tokenizer = load_tokenizer(vocab)
    tokenizer.save(folder / "tokenizer")
    torch.manual_seed(0)
    electra = Electra(ModelConfig(size=size).electra(tokenizer.vocabulary.size, tokenizer.vocabulary.pad_id))
    save_model(electra, folder / "fresh", folder / "tokenizer")
    export(ExportConfig(model=folder / "fresh", output=folder / "huggingface"))
    return folder / "huggingface"


def our_seconds(model: Path, task: str, data: str, folder: Path, device: str) -> tuple[float, float, int]:
    """Seconds of training, seconds altogether, and steps of one seed."""
    began = time.perf_counter()
    finetune(FinetuneConfig(model=model, task=task, data=data, output=folder / task, device=device))
    result = read_json(folder / task / "seed-1" / RESULT)
    return result["seconds"], time.perf_counter() - began, result["steps"]


def peer_step(model: Path, task: Task, steps: int, device: torch.device) -> float:
    """Seconds a step of the plain loop."""
    from transformers import AutoTokenizer, DataCollatorWithPadding, ElectraForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(model)
    examples = read_examples(task, "train")
    kept = 32 * (steps + 20)
    encoded = tokenizer(
        examples.texts[:kept], examples.pairs[:kept] if examples.pairs else None, truncation=True, max_length=128
    )
    labels = task.scaled(examples.labels) if not task.labels else examples.labels
    rows = [
        {key: encoded[key][row] for key in encoded} | {"labels": labels[row]}
        for row in range(len(encoded["input_ids"]))
    ]
    loader = torch.utils.data.DataLoader(
        rows, batch_size=32, shuffle=True, drop_last=True, collate_fn=DataCollatorWithPadding(tokenizer)
    )
    peer = ElectraForSequenceClassification.from_pretrained(model, num_labels=task.outputs).to(device).train()
    optimizer = torch.optim.AdamW(peer.parameters(), lr=3e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10_000))
    taken, began = 0, 0.0
    while True:
        for batch in loader:
            if taken == 10:
                wait(device)
                began = time.perf_counter()
            if taken == steps + 10:
                wait(device)
                return (time.perf_counter() - began) / steps
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = peer(**batch.to(device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            taken += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="the folder of GLUE")
    parser.add_argument("--vocab", type=Path, help="vocabulary of the fresh model")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder of ELECTRA, in place of a fresh one")
    parser.add_argument("--size", default="small", help="size of the fresh model")
    parser.add_argument("--tasks", nargs="+", default=list(GLUE_6))
    parser.add_argument("--peer-steps", type=int, default=150)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.model is None and arguments.vocab is None:
        parser.error("give --vocab for a fresh model, or --model")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = arguments.model or fresh_model(arguments.vocab, folder, arguments.size)
        for task in arguments.tasks:
            ours, altogether, steps = our_seconds(model, task, arguments.data, folder, device.type)
            peer = steps * peer_step(model, glue_task(task, arguments.data), arguments.peer_steps, device)
            found[task] = {"steps": steps, "ours": ours, "altogether": altogether, "peer": peer, "ratio": peer / ours}
            if not arguments.json:
                whole = f"{altogether:.1f} s with loading and measuring"
                times = f"ours {ours:7.1f} s ({whole})   transformers {peer:7.1f} s   {peer / ours:5.2f}×"
                print(f"{task:<6}{steps:>7,} steps   {times}", flush=True)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
