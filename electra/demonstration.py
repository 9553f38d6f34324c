"""`electra demo`: what the packaged model knows, then the whole pipeline in minutes on a CPU, on text that every Python
installation contains.

Replaced words → text → tokens → shards → pre-training, of the packaged model where there is one → the same baselines
for all → Hugging Face folder → a page that runs the model in the browser.
"""

import ast
import importlib.util
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy

import electra
from electra.baselines import (
    RANDOM_AUC,
    BaselineComparison,
    CorruptedSentence,
    compare_held_out,
    compare_replaced_words,
    count_bigrams,
    describe_comparisons,
    evaluate_held_out,
    evaluation_batches,
    find_replaced_words,
    read_corrupted_sentences,
    word_scores,
)
from electra.config import PACKAGED_MODEL
from electra.data.shards import Shards, open_shards
from electra.errors import ConfigError
from electra.exporting.node_packages import has_node_packages
from electra.exporting.page import open_command
from electra.onnx.export import LIBRARIES
from electra.plotting import plot_demo
from electra.serving.config import DemoConfig
from electra.serving.inference import Model, load_text_model
from electra.training.checkpoint import has_packaged_model
from electra.training.logging import METRICS_FILE, read_metrics

PICTURE = "demo.png"
BLANK = re.compile(r"\n\s*\n")  # between paragraphs
SHOWN_SENTENCES = (0, 14, 20, 50)  # of the hundred with a replaced word
REPLACEMENTS = {0.35: "dictionary", 0.75: "should"}  # words put into a held-out sentence, by their relative position
VOCAB_SIZE = 1000
ROWS = 64  # to evaluate on
EVALUATIONS = 4
PACKAGED: dict[str, Any] = {"init": PACKAGED_MODEL, "steps": 40, "length": 64, "batch_size": 16, "learning_rate": 5e-4}
PACKAGED |= {"packing": "examples"}  # the form of the rows that it was trained on
# Without a packaged model: a CPU processes few tokens in minutes; a narrow model over a small vocabulary learns most.
NEW: dict[str, Any] = {"steps": 1000, "length": 32, "batch_size": 64, "mask_fraction": 0.3, "learning_rate": 6e-3}
NEW |= {"size": "tiny", "layers": 1, "width": 64, "heads": 4, "feedforward": 256, "embedding_width": 64}
NEW |= {"generator_width": 64, "packing": "packed"}


@dataclass(frozen=True)
class DemoResult:
    output: str
    uses_packaged_model: bool
    documents: int
    steps: int
    tokens: int
    seconds: float
    comparisons: list[BaselineComparison]
    sentence: str
    marked_sentence: str
    marked_examples: list[str]
    pictures: list[str]
    page: str | None  # None: libraries for it are missing

    def __str__(self) -> str:
        run = Path(self.output) / "run"
        text = f"{self.documents:,} documents of this Python installation"
        lines = [
            *([EXAMPLES_NOTE, *(f"  {marked}" for marked in self.marked_examples), ""] if self.marked_examples else []),
            f"{FURTHER if self.uses_packaged_model else 'A tiny model was trained from scratch'} on {text}: "
            f"{self.steps:,} steps, {self.tokens:,} tokens.",
            "On a hundred sentences with a replaced word, and on held-out rows of that text, beside baselines:",
            "",
            *describe_comparisons(self.comparisons, self.uses_packaged_model),
            *([] if self.uses_packaged_model else [SCRATCH_NOTE]),
            "",
            f"A held-out sentence with two replaced words ({', '.join(REPLACEMENTS.values())}), and the three tokens "
            "most likely replaced:",
            f"  {self.sentence}",
            f"  {self.marked_sentence}",
            "",
            f"See      {' and '.join(self.pictures)}",
            f"         {NO_PAGE if self.page is None else open_command(self.page)}",
            f'Try      electra detect --model {run} "your sentence"',
            f'         electra fill --model {run} "your [MASK]"',
            f'Use      transformers.AutoModel.from_pretrained("{self.output}/huggingface")',
            "Next     your own text: electra tokenizer, electra shard, electra pretrain (each has --help)",
            f"{self.seconds:.0f} seconds in all.",
        ]
        return "\n".join(lines)


EXAMPLES_NOTE = (
    "Sentences with a replaced word, and the word that the packaged model takes for it, with its probability:"
)
FURTHER = "The packaged model, which had never seen this text, was then trained further"
NO_PAGE = (
    "a page that runs the model in the browser needs the extra onnx and npm: electra export --to page says what is "
    "missing"
)
SCRATCH_NOTE = (
    "This installation has no packaged model, so that this one started from random weights. In a few minutes on a CPU\n"
    "such a model learns token frequencies and some pairs of words; on a GPU, or in hours, it learns the rest."
)


def run_demo(config: DemoConfig) -> DemoResult:
    """Run all steps from text to an exported model."""
    start = time.monotonic()

    def report(message: str) -> None:
        print(f"[{time.monotonic() - start:3.0f} s] {message}", file=sys.stderr, flush=True)

    folder = unused_folder(config.output)
    folder.mkdir(parents=True)
    shards, run = folder / "shards", folder / "run"
    packaged = load_text_model(PACKAGED_MODEL, "cpu") if has_packaged_model() else None
    found, marked_examples = None, []
    if packaged is not None:
        found = find_replaced_words(packaged)
        report(
            f"the packaged model finds {found.found} of {found.sentences} replaced words; guessing {found.guessing:.0f}"
        )
        marked_examples = [mark_replaced_word(packaged, sentence.text) for sentence in shown_sentences()]
    documents = write_shards(folder, shards, 200_000 if config.quick else 600_000, packaged is not None, report)
    opened = open_shards(shards)
    counts = count_bigrams(opened)
    report(f"wrote {counts.token_counts.sum():,} tokens into shards, and counted their bigrams")
    settings = pretraining_settings(config, packaged is not None)
    steps = settings["steps"]
    batches = list(evaluation_batches(opened, settings["length"], ROWS, settings["packing"]))
    before = {} if packaged is None else evaluate_held_out(packaged, opened, batches)
    report(
        f"pre-training {'a tiny' if packaged is None else 'the packaged'} generator and discriminator: {steps} steps"
    )
    result = electra.pretrain(data=shards, output=run, device="cpu", **settings)
    if result.signal:
        report("pre-training was stopped by a signal, so the demo ends here")
        sys.exit(result.exit_code)
    electra.export(model=run, output=folder / "huggingface")
    report("exported the discriminator to Hugging Face format")
    model = load_text_model(run, "cpu")
    comparisons = [
        compare_replaced_words(model, found, counts),
        *compare_held_out(model, opened, counts, batches, result.metrics, before),
    ]
    sentence = replace_two_words(held_out_sentence(opened))
    detection = model.detect(sentence)
    texts = [*(each.text for each in shown_sentences()), sentence]
    draw_picture(folder / PICTURE, model, run, comparisons, texts)
    page = write_demo_page(run, folder, texts[::-1])
    if page is not None:
        report("wrote a page that runs the model in the browser")
    pictures = [folder / PICTURE, run / "curves.png", run / "samples.md"]
    return DemoResult(
        output=str(folder),
        uses_packaged_model=packaged is not None,
        documents=documents,
        steps=result.step,
        tokens=result.tokens,
        seconds=time.monotonic() - start,
        comparisons=comparisons,
        sentence=sentence,
        marked_sentence=detection.marked_text(threshold=sorted(detection.replaced)[-3]),
        marked_examples=marked_examples,
        pictures=[str(picture) for picture in pictures if picture.exists()],
        page=page,
    )


def write_shards(
    folder: Path, shards: Path, max_characters: int, is_packaged: bool, report: Callable[[str], None]
) -> int:
    """Write a corpus and its shards, with the packaged model's tokenizer if there is one; returns the number of
    documents."""
    corpus, tokenizer = folder / "corpus.txt", PACKAGED_MODEL
    documents = write_documentation_corpus(corpus, max_characters)
    report(f"collected {documents:,} documents from the documentation of this Python installation")
    if not is_packaged:
        tokenizer = folder / "vocab"
        electra.tokenizer(corpus=str(corpus), output=tokenizer, vocab_size=VOCAB_SIZE)
        report(f"trained a vocabulary of {VOCAB_SIZE:,} word pieces")
    electra.shard(corpus=str(corpus), tokenizer=tokenizer, output=shards, validation_fraction=0.05)
    return documents


def write_documentation_corpus(path: Path, max_characters: int) -> int:
    """Write documents of prose paragraphs until there are `max_characters`; return the number of documents.

    Paragraphs that begin alike are written once, so that few sentences are both in training and held-out text."""
    documents = 0
    beginnings: set[str] = set()
    with path.open("w", encoding="utf-8") as file:
        for text in documentation_texts():
            paragraphs = {
                part[:40]: part for part in map(" ".join, map(str.split, filter(is_prose, BLANK.split(text))))
            }
            new = [part for beginning, part in paragraphs.items() if beginning not in beginnings]
            beginnings |= paragraphs.keys()
            if new:
                file.write("\n".join(new) + "\n\n")
                documents += 1
            if file.tell() > max_characters:
                break
    return documents


def documentation_texts() -> Iterator[str]:
    """Python's help topics, then the docstrings of the standard library and of numpy."""
    yield from topics.values()
    for root in (Path(sysconfig.get_paths()["stdlib"]), Path(numpy.__file__).parent):
        for file in sorted(root.rglob("*.py")):
            if not {"test", "tests", "site-packages", "idlelib"} & set(file.relative_to(root).parts):
                yield from read_docstrings(file)


def read_docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates and old syntax
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is sentences rather than code or a table."""
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return len(paragraph.split()) >= 8 and ">>>" not in paragraph and letters > 0.85 * len(paragraph)


def pretraining_settings(config: DemoConfig, is_packaged: bool) -> dict[str, Any]:
    """Settings of electra pretrain for the packaged model or a new one."""
    settings = PACKAGED if is_packaged else NEW
    steps = config.steps or settings["steps"] // (5 if config.quick else 1)
    intervals = {"log_every": 2, "save_every": 100_000, "evaluate_every": -(-steps // EVALUATIONS)}
    return settings | intervals | {"steps": steps, "evaluation_rows": ROWS}


def write_demo_page(run: Path, folder: Path, texts: list[str]) -> str | None:
    """Write the page of a run, with these examples; None without its libraries: the demo uses no network."""
    if not has_node_packages() or any(importlib.util.find_spec(name) is None for name in LIBRARIES):
        return None
    examples, page = folder / "examples.txt", folder / "page"
    examples.write_text("\n".join(texts) + "\n", encoding="utf-8")
    electra.export(model=run, to="page", examples=examples, output=page)
    return str(page)


def shown_sentences() -> list[CorruptedSentence]:
    sentences = read_corrupted_sentences()
    return [sentences[index] for index in SHOWN_SENTENCES]


def mark_replaced_word(model: Model, text: str) -> str:
    """A text with the word marked that is most likely replaced."""
    words, scores = text.split(), word_scores(model.tokenizer, text, model.detect(text).replaced)
    highest = scores.index(max(scores))
    return " ".join(f"[{word} {max(scores):.2f}]" if index == highest else word for index, word in enumerate(words))


def draw_picture(path: Path, model: Model, run: Path, comparisons: list[BaselineComparison], texts: list[str]) -> None:
    """Draw held-out AUC and loss by step beside their baselines, and texts with the probability of each token."""
    lines = [line for line in read_metrics(run / METRICS_FILE) if line["kind"] == "validation"]
    curves = {}
    for each, metric in zip(comparisons[-2:], (RANDOM_AUC, "mlm_loss"), strict=True):
        start = [] if each.before is None else [(0, each.before)]
        curves[each.name] = each.baselines, [*start, *((line["step"], line[metric]) for line in lines)]
    marked = [(detection.tokens[1:-1], detection.replaced[1:-1]) for detection in map(model.detect, texts)]
    plot_demo(path, curves, marked)


def unused_folder(folder: Path) -> Path:
    """The folder, or the first with a number appended that does not exist."""
    folder = folder.resolve()
    if not folder.name:
        raise ConfigError(f"is {folder}; give a folder of its own", field="output")
    names = [folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, 1000))]
    return next(name for name in names if not name.exists())


def held_out_sentence(shards: Shards) -> str:
    """The first held-out sentence of 10 to 20 words."""
    tokenizer = shards.tokenizer
    for tokens in shards.tokens_by_shard("validation"):
        for document in numpy.split(tokens, numpy.flatnonzero(tokens == tokenizer.vocabulary.sep_id)):
            for sentence in re.split(r"(?<=\.) ", tokenizer.library.decode(document.tolist())):
                if 10 <= len(sentence.split()) <= 20 and sentence.endswith("."):
                    return sentence
    return "the value of the expression is returned when the function is called."


def replace_two_words(sentence: str) -> str:
    """The sentence with two of its words replaced by words that do not fit."""
    words = sentence.split()
    for position, replacement in REPLACEMENTS.items():
        words[int(position * len(words))] = replacement
    return " ".join(words)
