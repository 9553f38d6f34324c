"""Fine-tuning in electra and in a plain loop over transformers' model: speed or, with --scores, dev scores.

    python benchmarks/finetune.py --data glue/ --vocab vocab.txt [--model hf-folder] [--tasks cola rte] [--json]
    python benchmarks/finetune.py --data glue/ --model hf-folder --scores --seeds 5 [--tasks cola rte] [--json]
    python benchmarks/finetune.py --data conll/ --model hf-folder --tasks ner chunking pos [--scores --seeds 5]
    python benchmarks/finetune.py --data squad/ --model hf-folder --tasks squad --length 512 [--scores --seeds 3]

Both have the same weights, rows, batch size, epochs, precision and dropout. electra is `electra finetune`. The peer is
the usual loop: rows tokenized beforehand, a DataLoader that shuffles and pads to the longest row of the batch,
autocast, gradient clipping, fused AdamW and a linear schedule.

Speed: seconds of training of one seed; for the peer, the time of a step over `--peer-steps` steps times the number of
steps of electra. Loading and tokenizing do not count. Without --model both start from the same random ELECTRA-Small,
because speed does not depend on the weights.

Scores: median and standard deviation over seeds of the task's first metric on its dev rows. The peer uses electra's
learning rate, layer-wise decay, warm-up and epochs, and transformers' own classification head (of texts: with one more
layer). Of question answering both have the same windows and find answers in the same way. In tagging the loss of the
peer is at the first token of each word, and words after the maximum length are tagged O.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from timing import synchronize
from torch import Tensor

from electra.config import build_config
from electra.data.tokenizer import load_tokenizer
from electra.exporting.command import export
from electra.exporting.config import ExportConfig
from electra.finetuning.command import finetune
from electra.finetuning.config import FinetuneConfig
from electra.finetuning.features import IGNORED, NO_LOGIT, Features, Outputs, compute_logits
from electra.finetuning.glue import GLUE_6
from electra.finetuning.job import EVALUATION_BATCH_SIZE
from electra.finetuning.kinds import KINDS, define_task, read_examples, with_targets
from electra.finetuning.metrics import METRICS, median, standard_deviation
from electra.finetuning.models import is_context_or_cls
from electra.finetuning.question_answering import make_windows
from electra.finetuning.tags import compute_tag_metrics, split_sentences
from electra.finetuning.tasks import Examples, Task, stack_labels
from electra.huggingface.convert import read_part_config_and_tensors
from electra.model.config import ModelConfig
from electra.model.electra import Electra
from electra.model.storage import save_model
from electra.runfolder import RESULT, read_json


def random_model(vocab: Path, folder: Path, size: str) -> Path:
    """A Hugging Face folder of an untrained model."""
    tokenizer = load_tokenizer(vocab)
    tokenizer.save(folder / "tokenizer")
    torch.manual_seed(0)
    electra = Electra(ModelConfig(size=size).electra_config(tokenizer.vocabulary.size, tokenizer.vocabulary.pad_id))
    save_model(electra, folder / "model", folder / "tokenizer")
    export(ExportConfig(model=folder / "model", output=folder / "huggingface"))
    return folder / "huggingface"


def finetune_config(model: Path, task: str, data: str, folder: Path, device: str, **settings: Any) -> FinetuneConfig:
    """The settings of both contenders: the defaults of `electra finetune`."""
    files = {"model": model, "task": task, "data": data, "output": folder / task}
    return build_config(FinetuneConfig, **files, device=device, **settings)


class Peer:
    """Transformers' model with a new head, in a plain training loop."""

    def __init__(self, config: FinetuneConfig, task: Task) -> None:
        from transformers import AutoTokenizer

        self.config, self.task, self.device = config, task, torch.device(config.hardware.device)
        self.tokenizer = AutoTokenizer.from_pretrained(config.model)
        model_class = self.model_class()
        self.model = model_class.from_pretrained(config.model, num_labels=self.num_labels()).to(self.device).train()

    def model_class(self) -> Any:
        from transformers import ElectraForSequenceClassification

        return ElectraForSequenceClassification

    def num_labels(self) -> int:
        return self.task.num_labels

    def loader(self, examples: Examples, **settings: Any) -> torch.utils.data.DataLoader:
        """Batches of tokenized examples, padded to the longest row."""
        from transformers import DataCollatorWithPadding

        encoded = self.tokenizer(
            examples.texts, examples.texts_b, truncation=True, max_length=self.config.tuning.length_for(self.task)
        )
        columns = dict(encoded) | {"labels": with_targets(self.task, examples).labels.tolist()}
        rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        return torch.utils.data.DataLoader(rows, collate_fn=DataCollatorWithPadding(self.tokenizer), **settings)

    def forward(self, batch: Any) -> Any:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.model(**batch.to(self.device))

    def step(self, batch: Any, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        self.forward(batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def score(self, examples: Examples) -> float:
        """The task's first metric."""
        self.model.eval()
        loader = self.loader(examples, batch_size=EVALUATION_BATCH_SIZE)
        logits = torch.cat([self.forward(batch).logits.float().cpu() for batch in loader]).numpy()
        predictions = KINDS[self.task.kind].predict(Outputs(logits), self.task)
        return METRICS[self.task.metrics[0]](predictions, examples.labels)


class QuestionAnsweringPeer(Peer):
    """Transformers' model of question answering, on the windows of electra."""

    def model_class(self) -> Any:
        from transformers import ElectraForQuestionAnswering

        return ElectraForQuestionAnswering

    def num_labels(self) -> int:
        return 2

    def make_features(self, examples: Examples) -> Features:
        return make_windows(examples, load_tokenizer(self.config.model), self.config.tuning.length_for(self.task))

    def loader(self, examples: Examples, **settings: Any) -> torch.utils.data.DataLoader:
        from transformers import DataCollatorWithPadding

        features = self.make_features(examples)
        rows = []
        for ids, first, (start, end) in zip(
            features.input_ids.split(features.lengths.tolist()),
            features.lengths_a.tolist(),
            features.labels.tolist(),
            strict=True,
        ):
            segments = [0] * first + [1] * (len(ids) - first)
            inputs = {"input_ids": ids.tolist(), "token_type_ids": segments, "attention_mask": [1] * len(ids)}
            rows.append(inputs | {"start_positions": start, "end_positions": end})
        return torch.utils.data.DataLoader(rows, collate_fn=DataCollatorWithPadding(self.tokenizer), **settings)

    def token_logits(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, *_: Any) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            output = self.model(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=segment_ids)
        logits = torch.stack([output.start_logits, output.end_logits], 2).float()
        return logits.masked_fill(~is_context_or_cls(attention_mask, segment_ids)[..., None], NO_LOGIT)

    def score(self, examples: Examples) -> float:
        self.model.eval()
        features, length = self.make_features(examples).to(self.device), self.config.tuning.length_for(self.task)
        pad_id = self.tokenizer.pad_token_id
        logits = compute_logits(self.token_logits, features, EVALUATION_BATCH_SIZE, length, pad_id)
        kind = KINDS[self.task.kind]
        predicted = kind.predict(Outputs(logits, features, examples), self.task)
        task = kind.calibrate(predicted, examples.labels, self.task)
        return kind.compute_metrics(predicted, examples.labels, task)[task.metrics[0]]


class TagPeer(Peer):
    """Transformers' model of tags, with targets at the first token of each word."""

    def model_class(self) -> Any:
        from transformers import ElectraForTokenClassification

        return ElectraForTokenClassification

    def loader(self, examples: Examples, **settings: Any) -> torch.utils.data.DataLoader:
        from transformers import DataCollatorForTokenClassification

        sentences = split_sentences(examples.texts, examples.text_counts)
        length = self.config.tuning.length_for(self.task)
        encoded = self.tokenizer(sentences, is_split_into_words=True, truncation=True, max_length=length)
        rows = []
        for number, tags in enumerate(examples.labels):
            words = encoded.word_ids(number)
            is_first = [word is not None and word != before for before, word in pairwise([None, *words])]
            labels = [tags[word] if first else IGNORED for word, first in zip(words, is_first, strict=True)]
            rows.append({name: cells[number] for name, cells in encoded.items()} | {"labels": labels})
        collate = DataCollatorForTokenClassification(self.tokenizer)
        return torch.utils.data.DataLoader(rows, collate_fn=collate, **settings)

    @torch.no_grad()
    def score(self, examples: Examples) -> float:
        self.model.eval()
        predicted: list[list[int]] = []
        for batch in self.loader(examples, batch_size=EVALUATION_BATCH_SIZE):
            is_word = batch.pop("labels") != IGNORED  # tags that no training row has would have no loss
            tags = self.forward(batch).logits.argmax(2).cpu()
            predicted += [row[mask].tolist() for row, mask in zip(tags, is_word, strict=True)]
        padded = zip(predicted, examples.text_counts, strict=True)
        all_words = stack_labels([tags + [0] * (count - len(tags)) for tags, count in padded])
        return compute_tag_metrics(all_words, examples.labels, self.task)[self.task.metrics[0]]


class ChoicePeer(Peer):
    """Transformers' model of multiple choice; all rows have equally many choices."""

    def model_class(self) -> Any:
        from transformers import ElectraForMultipleChoice

        return ElectraForMultipleChoice

    def loader(self, examples: Examples, **settings: Any) -> torch.utils.data.DataLoader:
        from transformers import BatchEncoding

        length, choices = self.config.tuning.length_for(self.task), int(examples.text_counts[0])
        encoded = self.tokenizer(examples.texts, examples.texts_b, truncation=True, max_length=length)
        rows = list(zip(torch.arange(len(examples.texts)).view(-1, choices).tolist(), examples.labels, strict=True))

        def collate(batch: list[Any]) -> Any:
            sequences = [number for numbers, _ in batch for number in numbers]
            inputs = {name: [cells[number] for number in sequences] for name, cells in encoded.items()}
            padded = self.tokenizer.pad(inputs, return_tensors="pt")
            inputs = {name: tensor.unflatten(0, (-1, choices)) for name, tensor in padded.items()}  # [B, choices, L]
            return BatchEncoding(inputs | {"labels": torch.tensor([int(label) for _, label in batch])})

        return torch.utils.data.DataLoader(rows, collate_fn=collate, **settings)

    @torch.no_grad()
    def score(self, examples: Examples) -> float:
        self.model.eval()
        loader = self.loader(examples, batch_size=EVALUATION_BATCH_SIZE)
        predictions = torch.cat([self.forward(batch).logits.argmax(1).cpu() for batch in loader]).numpy()
        return METRICS[self.task.metrics[0]](predictions, examples.labels)


PEERS = {"question-answering": QuestionAnsweringPeer, "tags": TagPeer, "choice": ChoicePeer}


def create_peer(config: FinetuneConfig, task: Task) -> Peer:
    return PEERS.get(task.kind, Peer)(config, task)


def electra_seconds(config: FinetuneConfig) -> tuple[float, float, int]:
    """Seconds of training, total seconds, and steps of one seed."""
    start = time.perf_counter()
    finetune(config)
    result = read_json(config.output / "seed-1" / RESULT)
    return result["seconds"], time.perf_counter() - start, result["steps"]


def peer_step_seconds(config: FinetuneConfig, task: Task, steps: int) -> float:
    """Seconds per step of the peer, after ten warm-up steps."""
    peer, examples = create_peer(config, task), read_examples(task, "train")
    rows = range(min(len(examples), config.tuning.batch_size * (steps + 20)))
    loader = peer.loader(examples.select(rows), batch_size=config.tuning.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(peer.model.parameters(), lr=3e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10_000))
    count, start = 0, 0.0
    while True:
        for batch in loader:
            if count == 10:
                synchronize(peer.device)
                start = time.perf_counter()
            if count == steps + 10:
                synchronize(peer.device)
                return (time.perf_counter() - start) / steps
            peer.step(batch, optimizer, schedule)
            count += 1


def compare_speed(config: FinetuneConfig, task: Task, peer_steps: int) -> dict[str, Any]:
    """Seconds of both contenders for one seed of a task."""
    seconds, total, steps = electra_seconds(config)
    peer = steps * peer_step_seconds(config, task, peer_steps)
    return {"steps": steps, "electra": seconds, "electra_total": total, "peer": peer, "speedup": peer / seconds}


def format_speed(speed: dict[str, Any]) -> str:
    electra = f"electra {speed['electra']:7.1f} s ({speed['electra_total']:.1f} s with loading and evaluation)"
    return f"{speed['steps']:>7,} steps   {electra}   transformers {speed['peer']:7.1f} s   {speed['speedup']:5.2f}×"


def train_peer(config: FinetuneConfig, task: Task, seed: int) -> tuple[Peer, float]:
    """The peer after the task's epochs, and the seconds of its training after the first step."""
    from transformers import get_linear_schedule_with_warmup

    torch.manual_seed(seed)
    peer, train = create_peer(config, task), read_examples(task, "train")
    loader = peer.loader(
        train.with_swapped_pairs() if task.double_unordered else train,
        batch_size=config.tuning.batch_size,
        shuffle=True,
    )
    encoder, _ = read_part_config_and_tensors(config.model)
    tuning, epochs = config.tuning, config.tuning.epochs_for(task)
    settings, steps = tuning.optimizer_config(encoder), epochs * len(loader)
    groups = layer_groups(peer.model, settings.learning_rate, tuning.layer_decay_for(encoder))
    optimizer = torch.optim.AdamW(groups, weight_decay=settings.weight_decay, eps=settings.epsilon, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, round(settings.warmup * steps), steps)
    start = None
    for _ in range(epochs):
        for batch in loader:
            peer.step(batch, optimizer, schedule)
            if start is None:
                synchronize(peer.device)
                start = time.perf_counter()
    assert start is not None
    synchronize(peer.device)
    return peer, time.perf_counter() - start


def layer_groups(model: torch.nn.Module, rate: float, decay: float) -> list[dict[str, Any]]:
    """Parameter groups by layer: the head at the full rate, each layer at `decay` times the rate of the layer above."""
    layers, groups = model.config.num_hidden_layers, {}
    for name, parameter in model.named_parameters():
        layer = re.match(r"electra\.encoder\.layer\.(\d+)\.", name)
        is_head = name.startswith(("classifier.", "qa_outputs."))
        below = layers - int(layer[1]) if layer else 0 if is_head else layers + 1
        groups.setdefault(below, []).append(parameter)
    return [{"params": parameters, "lr": rate * decay**below} for below, parameters in groups.items()]


def compare_scores(config: FinetuneConfig, task: Task) -> dict[str, Any]:
    """Dev scores of both contenders."""
    metric = task.metrics[0]
    scores, peers = [seed["dev"][metric] for seed in finetune(config).seeds], []
    for seed in range(1, config.jobs.seeds + 1):
        peers.append(train_peer(config, task, seed)[0].score(read_examples(task, "dev")))
        print(f"{task.name}, seed {seed}: transformers {metric} {100 * peers[-1]:.1f}", file=sys.stderr, flush=True)
    return {"metric": metric, "electra": summarize(scores), "peer": summarize(peers)}


def summarize(scores: list[float]) -> dict[str, Any]:
    return {"median": median(scores), "spread": standard_deviation(scores), "seeds": scores}


def format_scores(scores: dict[str, Any]) -> str:
    contenders = {"electra": scores["electra"], "transformers": scores["peer"]}
    parts = [f"{name} {100 * each['median']:6.2f} ± {100 * each['spread']:.2f}" for name, each in contenders.items()]
    return f"  {scores['metric']:<9}{'   '.join(parts)}   (medians of {len(scores['electra']['seeds'])} seeds)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of GLUE or SQuAD, or of CoNLL-2003 and CoNLL-2000")
    parser.add_argument("--vocab", type=Path, help="vocabulary of the random model")
    parser.add_argument("--model", type=Path, help="Hugging Face folder of ELECTRA (default: a random model)")
    parser.add_argument("--size", default="small", help="size of the random model")
    parser.add_argument("--tasks", nargs="+", default=list(GLUE_6))
    parser.add_argument("--length", type=int, help="maximum length in tokens (default: that of electra finetune)")
    parser.add_argument("--peer-steps", type=int, default=150, help="timed steps of the peer")
    parser.add_argument("--scores", action="store_true", help="compare dev scores instead of speed")
    parser.add_argument("--seeds", type=int, default=5, help="of --scores")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.model is None and arguments.vocab is None:
        parser.error("give --model, or --vocab for a random model")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = arguments.model or random_model(arguments.vocab, folder, arguments.size)
        for name in arguments.tasks:
            settings = {"seeds": arguments.seeds if arguments.scores else 1, "length": arguments.length}
            config = finetune_config(model, name, arguments.data, folder, device, **settings)
            task = define_task(config.task)
            if arguments.scores:
                results[name] = compare_scores(config, task)
                line = format_scores(results[name])
            else:
                results[name] = compare_speed(config, task, arguments.peer_steps)
                line = format_speed(results[name])
            if not arguments.json:
                print(f"{name:<6}{line}", flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
