"""The model card of an exported folder: README.md with the metadata that Hugging Face reads.

It states what the run folder and the shards record; what is no longer there is left out.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

from electra.data.shards import ShardIndex, read_index
from electra.errors import DataError
from electra.exporting.config import ExportConfig
from electra.exporting.source import ExportSource
from electra.finetuning.glue import read_glue_table
from electra.finetuning.job import read_job_result
from electra.finetuning.jobs import FinetuningRecord, is_finetuning_output
from electra.finetuning.metrics import format_metric
from electra.finetuning.question_answering import N_BEST
from electra.formatting import format_count, format_duration, markdown_table
from electra.onnx.export import FOLDER, FP32, INT8
from electra.pretraining.config import read_phase_settings, read_run_record, read_run_settings
from electra.reporting.runs import find_glue_tables
from electra.runfolder import CHECKPOINTS, CONFIG, RESULT, read_stored
from electra.training.checkpoint import read_training_state
from electra.training.logging import METRICS_FILE, read_metrics

CARD = "README.md"
PIPELINES = {  # Hugging Face's name of what a model does, if it has one
    "generator": "fill-mask",
    "encoder": "feature-extraction",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
    "QuestionAnswering": "question-answering",
    "MultipleChoice": "multiple-choice",
}
MEANINGS = {
    "discriminator": "For every token it predicts whether the token was replaced (replaced token detection).",
    "generator": "It predicts the tokens at [MASK].",
    "encoder": "It computes a hidden state for every token; their mean is the embedding of a text.",
    "SequenceClassification": "`logits` has a score for each class, in the order of `id2label` in config.json, or the "
    "predicted number if there is only one.",
    "TokenClassification": "`logits` has a score for each token and tag, in the order of `id2label` in config.json; "
    "the first token of a word counts.",
    "MultipleChoice": "`logits` has a score for each choice.",
    "joint": "It finds the answer to a question in a context. `start_logits` are scores of each token as the first one "
    f"of the answer; `end_logits[..., i]` as the last one of an answer that starts at the i-th of the {N_BEST} best "
    "first tokens of the context, in the order of the text; `null_logit` is the log-odds that there is no answer. "
    "`electra serve` and `electra.load(…).predict` read answers from them.",
    "crf": "`logits` are scores of each token's tags, and `start_transitions`, `transitions` (from a tag to the next) "
    "and `end_transitions` those of a CRF over the words, whose first tokens count; the tags are the path with the "
    "highest sum. `electra serve` and `electra.load(…).predict` find it.",
}
RTD_LOGITS = {  # by style
    "classic": "The sigmoid of a token's logit is the probability that it was replaced.",
    "modern": "The softmax of a token's two logits has the probabilities that it is original and that it was replaced.",
}
CARRIED_SECTIONS = ("Text", "Pre-training")  # from the card of a model that is exported or was fine-tuned
MAX_FILES = 5  # of a corpus that are named


def write_card(source: ExportSource, folder: Path, config: ExportConfig) -> None:
    """Write the model card of an exported folder."""
    encoder, is_onnx = source.encoder.config, config.to == "onnx"
    size = f"{source.count_parameters():,} parameters, {format_count(encoder.layers, 'layer')} of width {encoder.width}"
    meaning = MEANINGS.get(source.decoding or source.purpose, "")
    if source.purpose == "discriminator":
        meaning = f"{meaning} {RTD_LOGITS[encoder.style]}"
    windows = 1 if source.finetuned is None else source.finetuned.task.windows
    if windows > 1:
        meaning = f"{meaning} It reads one window of a text; dev metrics are of up to {windows} windows (`--windows`)."
    about = f"`{source.class_name}` of {size}; texts of up to {source.length:,} tokens."
    parts = [
        metadata(source, is_onnx),
        f"# {config.output.name}",
        f"{about} {meaning}".strip(),
        *describe_origin(source.folder, config.training_data),
        "## How to load it",
        onnx_usage(source, config.int8) if is_onnx else transformers_usage(source),
    ]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def metadata(source: ExportSource, is_onnx: bool) -> str:
    """The block between lines of dashes, in YAML, of which JSON is a part."""
    library = "transformers.js" if is_onnx else "transformers"
    has_sentences = not is_onnx and source.purpose == "encoder"
    tags = ["electra", "replaced-token-detection", *(["sentence-transformers"] if has_sentences else [])]
    values = {"library_name": library, "pipeline_tag": PIPELINES.get(source.purpose), "tags": tags}
    index = read_shard_index(source.folder)
    if index is not None and isinstance(corpus := index.settings["corpus"], str):
        values["datasets"] = [corpus.removeprefix("hub:")]
    lines = [f"{name}: {json.dumps(value)}" for name, value in values.items() if value]
    inherited = [line for line in read_card(source.folder)[0] if line.startswith(("language:", "license:"))]
    return "\n".join(["---", *inherited, *lines, "---"])


def read_card(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The lines of metadata and the sections, by title, of a model card; empty without one."""
    path = folder / CARD
    if not path.is_file():
        return [], {}
    text = path.read_text(encoding="utf-8", errors="replace")
    has_metadata = text.startswith("---\n") and "\n---\n" in text
    metadata, _, body = text[4:].partition("\n---\n") if has_metadata else ("", "", text)
    sections = [section.partition("\n") for section in body.split("\n## ")[1:]]
    return metadata.splitlines(), {title.strip(): content.strip() for title, _, content in sections}


def describe_origin(folder: Path, training_data: str | None) -> list[str]:
    """What a model was trained on, how, and what was measured, as far as the folders that it came from still exist."""
    origin = describe_training(folder)
    if not training_data:
        return origin
    return ["## Text", training_data, *(part for part in origin if not part.startswith("## Text\n"))]


def describe_training(folder: Path) -> list[str]:
    output = folder.parent.parent
    try:
        if (folder.parent / RESULT).exists() and is_finetuning_output(output):
            record = read_stored(output / CONFIG, FinetuningRecord)
            return [*describe_finetuning(folder.parent, record), *describe_pretraining(Path(record.settings["model"]))]
        return describe_pretraining(folder)
    except (DataError, OSError) as error:
        reason = str(error)
    except (TypeError, ValueError, AttributeError, KeyError):  # settings and environment may hold any JSON
        reason = f"what is stored about {folder} is damaged or of another version"
    print(f"the model card does not say how the model was trained: {reason}", file=sys.stderr)
    return []


def describe_finetuning(seed_folder: Path, record: FinetuningRecord) -> list[str]:
    result = read_job_result(seed_folder / RESULT)
    rows = ", ".join(format_count(count, f"{split} row") for split, count in result.rows.items())
    model = Path(record.settings["model"])
    facts = {
        "pre-trained model": (model.parent.parent if model.parent.name == CHECKPOINTS else model).name,
        "task": f"{record.task['name']} ({record.task['kind']})",
        "rows": rows,
        "steps": f"{result.steps:,}, {result.seconds:.0f} seconds",
        "length": f"{record.settings['length']} tokens",
        "seed": str(result.seed),
    }
    if result.best_epoch:
        facts["epoch"] = f"{result.best_epoch}, selected on the dev rows, so their metrics are optimistic"
    metrics = result.metrics["dev"]
    cells = [["dev metric", "value", "constant prediction"]]
    for name, value in metrics.items():
        baseline = format_metric(name, result.baseline[name]) if name in result.baseline else ""
        cells.append([name, format_metric(name, value), baseline])
    return ["## Fine-tuning", facts_table(facts), markdown_table(cells)]


def describe_pretraining(checkpoint: Path) -> list[str]:
    """The pre-training of the run that a checkpoint is in, or what the card of a model folder says about it."""
    settings, run = read_phase_settings(checkpoint), checkpoint.parent.parent
    if not settings and checkpoint.parent.name == CHECKPOINTS:
        raise DataError(f"{run} has no {CONFIG}")
    if not settings:
        sections = read_card(checkpoint)[1]
        return [f"## {title}\n\n{sections[title]}" for title in CARRIED_SECTIONS if title in sections]
    state = read_training_state(checkpoint).trainer
    steps = format_count(state.step, "step")
    record = read_run_record(run)
    facts = {
        "text": describe_corpus(checkpoint),
        "trained on": f"{state.tokens:,} tokens in {steps}, {format_duration(state.seconds / 60)}",
        "on": record.environment.get("device", ""),
        "objective": f"{settings['objective']}, recipe {settings['recipe']}",
        "phases": " ".join(settings["phases"]),
        "rows": f"{settings['length']} tokens, batches of {settings['batch_size']}",
        "started from": Path(settings["init"]).name if settings.get("init") else "",
        "electra": record.environment.get("commit", ""),
    }
    parts = ["## Pre-training", facts_table(facts)]
    lines = [
        line for line in read_metrics(run / METRICS_FILE) if line["kind"] == "validation" and line["step"] <= state.step
    ]
    if lines:
        measured = {name: value for name, value in lines[-1].items() if isinstance(value, float)}
        cells = [[name, f"{value:.4g}"] for name, value in measured.items()]
        parts += [
            f"On held-out text, after {format_count(lines[-1]['step'], 'step')}:",
            markdown_table([["metric", "value"], *cells]),
        ]
    for table in find_glue_tables((), [run]).values():
        parts += ["Fine-tuned on GLUE, dev sets:", str(read_glue_table(table))]
    return parts


def read_shard_index(checkpoint: Path) -> ShardIndex | None:
    """What the shards of a run record, its corpus among them; None if one of them was moved or cannot be read."""
    with suppress(DataError, OSError):
        if settings := read_run_settings(checkpoint):
            return read_index(Path(settings["data"]))
    return None


def describe_corpus(checkpoint: Path) -> str:
    index = read_shard_index(checkpoint)
    if index is None:
        return ""
    corpus = index.settings["corpus"]  # sizes of files by name, or its name on the hub
    names = [corpus] if isinstance(corpus, str) else list(corpus)
    more = f" and {format_count(len(names) - MAX_FILES, 'more file')}" if len(names) > MAX_FILES else ""
    documents, tokens = (index.totals_by_split(field)["train"] for field in ("documents", "tokens"))
    megabytes = index.total_over_shards("text_bytes") / 1e6
    size = f"{megabytes:,.1f} MB, {format_count(documents, 'document')}, {tokens:,} tokens"
    return f"{', '.join(names[:MAX_FILES])}{more}: {size}"


def facts_table(facts: dict[str, str]) -> str:
    return markdown_table([["", ""], *([name, value] for name, value in facts.items() if value)])


def transformers_usage(source: ExportSource) -> str:
    code = [
        f"from transformers import AutoTokenizer, {source.class_name}",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")',
        f'model = {source.class_name}.from_pretrained("path/to/this/folder")',
        'outputs = model(**tokenizer("A text.", return_tensors="pt"))',
    ]
    if columns := choice_columns(source):
        code[-1:] = [
            f'inputs = tokenizer({", ".join(map(json.dumps, columns))}, padding=True, return_tensors="pt")',
            "outputs = model(**{name: rows.unsqueeze(0) for name, rows in inputs.items()})  # [1, choices, length]",
        ]
    parts = ["With `transformers`:", python_block(code)]
    if source.purpose == "encoder":
        sentences = [
            "from sentence_transformers import SentenceTransformer",
            "",
            'vectors = SentenceTransformer("path/to/this/folder").encode(["A text.", "Another text."])',
        ]
        parts += ["With `sentence-transformers`:", python_block(sentences)]
    parts += ["For ONNX Runtime and transformers.js, export the same model with `electra export --to onnx`."]
    return "\n\n".join(parts)


def onnx_usage(source: ExportSource, has_int8: bool) -> str:
    file, columns = f"{FOLDER}/{FP32}", choice_columns(source)
    texts = [list(row) if len(row) > 1 else row[0] for row in zip(*columns, strict=True)] or ["A text."]
    rows = "[rows]" if columns else "rows"
    code = [
        "import onnxruntime",
        "from tokenizers import Tokenizer",
        "import numpy as np",
        "",
        'tokenizer = Tokenizer.from_file("path/to/this/folder/tokenizer.json")',
        f"tokenizer.enable_truncation({source.length})",
        "tokenizer.enable_padding()",
        f"encodings = tokenizer.encode_batch({json.dumps(texts)})",
        'inputs = {"input_ids": [each.ids for each in encodings]}',
        'inputs["attention_mask"] = [each.attention_mask for each in encodings]',
        *(['inputs["token_type_ids"] = [each.type_ids for each in encodings]'] if source.has_segments else []),
        f'session = onnxruntime.InferenceSession("path/to/this/folder/{file}")',
        f"outputs = session.run(None, {{name: np.array({rows}) for name, rows in inputs.items()}})",
    ]
    script = [
        'import { AutoModel, AutoTokenizer } from "@huggingface/transformers";',
        "",
        'const tokenizer = await AutoTokenizer.from_pretrained("path/to/this/folder");',
        'const model = await AutoModel.from_pretrained("path/to/this/folder", { dtype: "fp32" });',
        'const outputs = await model(await tokenizer("A text."));',
    ]
    if columns:
        pair = "".join(f"text_pair: {json.dumps(column)}, " for column in columns[1:])
        script[-1:] = [
            f"const inputs = await tokenizer({json.dumps(columns[0])}, {{ {pair}padding: true }});",
            "for (const name in inputs) inputs[name] = inputs[name].unsqueeze(0); // [1, choices, length]",
            "const outputs = await model(inputs);",
        ]
    parts = ["With ONNX Runtime:", python_block(code)]
    if has_int8:
        parts.append(
            f"`{FOLDER}/{INT8}` is the same model with int8 weights, smaller and on most CPUs faster. Its outputs "
            "differ a little, also with the other texts of a batch, which share the scales of activations."
        )
    return "\n\n".join([*parts, "With transformers.js:", "```js\n" + "\n".join(script) + "\n```"])


def choice_columns(source: ExportSource) -> list[list[str]]:
    """First and second texts of an example with two choices; empty unless the task is multiple choice."""
    if source.finetuned is None or source.purpose != "MultipleChoice":
        return []
    has_text = source.finetuned.task.text is not None or source.finetuned.task.text_b is not None
    return [*([["A text."] * 2] if has_text else []), ["A choice.", "Another choice."]]


def python_block(lines: list[str]) -> str:
    return "```python\n" + "\n".join(lines) + "\n```"
