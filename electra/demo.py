"""`electra demo`: what the packaged model knows, then the whole pipeline in minutes on a CPU, on text that every Python
installation contains.

Planted words → text → tokens → shards → pre-training, of the packaged model where there is one → the same baselines for
all → Hugging Face folder → a page that runs the model in the browser.
"""

import ast
import importlib.util
import math
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy

import electra
from electra.data.shards import Shards, open_shards
from electra.data.tokenizer import TextTokenizer
from electra.export.node_packages import has_node_packages
from electra.export.page import open_command
from electra.model.config import PACKAGED_MODEL
from electra.objectives.evaluation import evaluate
from electra.onnx.export import LIBRARIES
from electra.plotting import plot_demo
from electra.pretraining.bigrams import (
    SMOOTHING,
    BigramCounts,
    bigram_auc,
    bigram_mlm_loss,
    count_bigrams,
    evaluation_batches,
    evaluation_samples,
)
from electra.pretraining.initialize import unigram_frequencies
from electra.serve.config import DemoConfig
from electra.serve.inference import Model, load_model
from electra.serve.planted import (
    PlantedResult,
    PlantedSentence,
    count_found,
    find_planted_words,
    read_planted_sentences,
    word_scores,
)
from electra.training.checkpoint import has_packaged_model
from electra.training.logging import METRICS, read_metrics

BLANK = re.compile(r"\n\s*\n")  # between paragraphs
PICTURE = "demo.png"
SHOWN_SENTENCES = (0, 14, 20, 50)  # of the hundred with a planted word
REPLACEMENTS = {0.35: "dictionary", 0.75: "should"}  # words put into a held-out sentence, by their relative position
VOCAB_SIZE = 1000
INTERVALS = {"log_every": 2, "save_every": 100_000, "evaluation_rows": 64}
EVALUATIONS = 5
RANDOM_AUC = "unigram_rtd_auc"
PLANTED_BY_BIGRAMS = 36  # counted in TODO MB of Wikipedia and books (docs/log.md): the text of the demo has other words
PACKAGED: dict[str, Any] = {"init": PACKAGED_MODEL, "steps": 80, "length": 64, "batch_size": 16, "learning_rate": 5e-4}
# Without a packaged model: a CPU processes few tokens in minutes; a narrow model over a small vocabulary learns most.
NEW: dict[str, Any] = {
    "steps": 1000,
    "size": "tiny",
    "layers": 1,
    "width": 64,
    "heads": 4,
    "feedforward": 256,
    "embedding_width": 64,
}
NEW |= {"generator_width": 64, "length": 32, "batch_size": 64, "mask_fraction": 0.3, "learning_rate": 6e-3}


@dataclass(frozen=True)
class Comparison:
    """A measure of a model beside those of its baselines."""

    name: str
    digits: int  # after the decimal point
    baselines: dict[str, float]
    model: float
    higher_is_better: bool
    before: float | None = None  # of the packaged model, before it was trained further

    def is_better(self) -> bool:
        """Whether the model is better than all baselines."""
        if self.higher_is_better:
            return self.model > max(self.baselines.values())
        return self.model < min(self.baselines.values())

    def cells(self) -> list[str]:
        """The row of this measure in a table with COLUMNS."""
        values = [*map(self.baselines.get, BASELINES), self.before, self.model]
        return [self.name, *("–" if value is None else f"{value:.{self.digits}f}" for value in values)]


def describe_comparisons(comparisons: list[Comparison], has_before: bool) -> list[str]:
    """A table of all measures, and below it in words what they show."""
    rows = [COLUMNS, *(each.cells() for each in comparisons)]
    rows = rows if has_before else [row[:-2] + row[-1:] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    worse = [each.name for each in comparisons if not each.is_better()]
    verdict = f"Not better than all baselines: {'; '.join(worse)}." if worse else BETTER
    return [*lines, "", verdict]


@dataclass(frozen=True)
class DemoResult:
    output: str
    uses_packaged_model: bool
    documents: int
    steps: int
    tokens: int
    seconds: float
    comparisons: list[Comparison]
    sentence: str
    marked_sentence: str
    marked_planted: list[str]
    pictures: list[str]
    page: str | None  # None: libraries for it are missing

    def __str__(self) -> str:
        run = Path(self.output) / "run"
        text = f"{self.documents:,} documents of this Python installation"
        lines = [
            *([PLANTED_NOTE, *(f"  {marked}" for marked in self.marked_planted), ""] if self.marked_planted else []),
            f"{FURTHER if self.uses_packaged_model else 'A tiny model was trained from scratch'} on {text}: "
            f"{self.steps:,} steps, {self.tokens:,} tokens.",
            "On held-out rows of that text, beside baselines:",
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


BASELINES = ("guessing", "token frequencies", "bigram counts")
COLUMNS = ["", *BASELINES, "before", "model"]
PLANTED_NOTE = "Sentences with a planted word, and the word that the packaged model takes for it, with its probability:"
FURTHER = "The packaged model, which had never seen this text, was then trained further"
BETTER = (
    "Better than all baselines in each of them: the model uses more of a sentence than frequencies and neighbouring\n"
    "words, which is what counting knows."
)
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
    corpus, shards, run = folder / "corpus.txt", folder / "shards", folder / "run"
    packaged = load_model(PACKAGED_MODEL, "cpu") if has_packaged_model() else None
    found, marked_planted = None, []
    if packaged is not None:
        found = find_planted_words(packaged)
        report(
            f"the packaged model finds {found.found} of {found.sentences} planted words; guessing {found.guessing:.0f}"
        )
        marked_planted = [mark_planted_word(packaged, sentence.text) for sentence in shown_sentences()]
    documents = write_documentation_corpus(corpus, max_characters=200_000 if config.quick else 600_000)
    report(f"collected {documents:,} documents from the documentation of this Python installation")
    tokenizer = PACKAGED_MODEL
    if packaged is None:
        tokenizer = folder / "vocab"
        electra.train_tokenizer(corpus=str(corpus), output=tokenizer, vocab_size=VOCAB_SIZE)
        report(f"trained a vocabulary of {VOCAB_SIZE:,} word pieces")
    electra.shard(corpus=str(corpus), tokenizer=tokenizer, output=shards, validation_fraction=0.05)
    opened = open_shards(shards)
    counts = count_bigrams(opened)
    report(f"wrote {counts.token_counts.sum():,} tokens into shards, and counted their bigrams")
    settings: dict[str, Any] = (NEW if packaged is None else PACKAGED) | INTERVALS
    steps = config.steps or settings["steps"] // (5 if config.quick else 1)
    settings |= {"steps": steps, "evaluate_every": -(-steps // EVALUATIONS)}
    before = {} if packaged is None else evaluate_packaged(packaged, opened)
    report(
        f"pre-training {'a tiny' if packaged is None else 'the packaged'} generator and discriminator: {steps} steps"
    )
    result = electra.pretrain(data=shards, output=run, device="cpu", **settings)
    if result.signal:
        report("pre-training was stopped by a signal, so the demo ends here")
        sys.exit(result.exit_code)
    electra.export_model(model=run, output=folder / "huggingface")
    report("exported the discriminator to Hugging Face format")
    model = load_model(run, "cpu")
    comparisons = [
        compare_planted_words(model, found, counts),
        *compare_held_out(model, opened, counts, settings["length"], result.metrics, before),
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
        marked_planted=marked_planted,
        pictures=[str(picture) for picture in pictures if picture.exists()],
        page=page,
    )


def write_demo_page(run: Path, folder: Path, texts: list[str]) -> str | None:
    """Write the page of a run, with these examples; None without its libraries: the demo uses no network."""
    if not has_node_packages() or any(importlib.util.find_spec(name) is None for name in LIBRARIES):
        return None
    examples, page = folder / "examples.txt", folder / "page"
    examples.write_text("\n".join(texts) + "\n", encoding="utf-8")
    electra.export_model(model=run, to="page", examples=examples, output=page)
    return str(page)


def evaluate_packaged(packaged: Model, shards: Shards) -> dict[str, float]:
    """The metrics of the packaged model on the held-out rows that the run is evaluated on."""
    batches = evaluation_batches(shards, PACKAGED["length"], INTERVALS["evaluation_rows"])
    return evaluate(
        packaged.electra, batches, unigram_frequencies(shards, packaged.device), shards.tokenizer.vocabulary
    )


def compare_held_out(
    model: Model, shards: Shards, counts: BigramCounts, length: int, metrics: dict[str, float], before: dict[str, float]
) -> list[Comparison]:
    """Held-out metrics of the trained model beside guessing, token frequencies and bigram counts."""
    rows, vocabulary = INTERVALS["evaluation_rows"], shards.tokenizer.vocabulary
    samples, random_tokens = (
        evaluation_samples(shards, length, rows, generator) for generator in (model.electra.generator, None)
    )
    rtd = {"guessing": 0.5, "bigram counts": bigram_auc(counts, samples)[0]}
    random_rtd = {"guessing": 0.5, "bigram counts": bigram_auc(counts, random_tokens)[0]}
    mlm = {"guessing": math.log(vocabulary.size), "token frequencies": metrics["unigram_mlm_loss"]}
    mlm["bigram counts"] = bigram_mlm_loss(counts, samples, vocabulary.mask_id)
    # AUCs of the samples of different generators do not compare, so that the first has no value before training
    return [
        Comparison("RTD AUC, generator's samples", 3, rtd, metrics["rtd_auc"], True),
        Comparison("RTD AUC, random tokens", 3, random_rtd, metrics[RANDOM_AUC], True, before.get(RANDOM_AUC)),
        Comparison("MLM loss (lower is better)", 2, mlm, metrics["mlm_loss"], False, before.get("mlm_loss")),
    ]


def compare_planted_words(model: Model, found_before: PlantedResult | None, counts: BigramCounts) -> Comparison:
    """The planted words that the trained model and the packaged one find, beside guessing and bigram counts."""
    found = find_planted_words(model)
    if found_before is None:
        by_bigrams, before = find_planted_words_by_bigrams(model.tokenizer, counts), None
    else:
        by_bigrams, before = PLANTED_BY_BIGRAMS, found_before.found
    baselines = {"guessing": found.guessing, "bigram counts": by_bigrams}
    return Comparison("planted words found, of 100", 0, baselines, found.found, True, before)


def find_planted_words_by_bigrams(tokenizer: TextTokenizer, counts: BigramCounts) -> int:
    """The most planted words that bigram counts find with any smoothing."""

    def find(smoothing: float) -> int:
        def score_words(text: str) -> list[float]:
            ids = numpy.array([tokenizer.library.encode(text).ids])
            return word_scores(tokenizer, text, counts.replaced_scores(ids, smoothing)[0].tolist())

        return count_found(score_words).found

    return max(map(find, SMOOTHING))


def shown_sentences() -> list[PlantedSentence]:
    sentences = read_planted_sentences()
    return [sentences[index] for index in SHOWN_SENTENCES]


def mark_planted_word(model: Model, text: str) -> str:
    """A text with the word marked that is most likely planted."""
    words, scores = text.split(), word_scores(model.tokenizer, text, model.detect(text).replaced)
    highest = scores.index(max(scores))
    return " ".join(f"[{word} {max(scores):.2f}]" if index == highest else word for index, word in enumerate(words))


def draw_picture(path: Path, model: Model, run: Path, comparisons: list[Comparison], texts: list[str]) -> None:
    """Draw held-out AUC and loss by step beside their baselines, and texts with the probability of each token."""
    lines = [line for line in read_metrics(run / METRICS) if line["kind"] == "validation"]
    curves = {}
    for each, metric in zip(comparisons[-2:], (RANDOM_AUC, "mlm_loss"), strict=True):
        start = [] if each.before is None else [(0, each.before)]
        curves[each.name] = each.baselines, [*start, *((line["step"], line[metric]) for line in lines)]
    marked = [(detection.tokens[1:-1], detection.replaced[1:-1]) for detection in map(model.detect, texts)]
    plot_demo(path, curves, marked)


def unused_folder(folder: Path) -> Path:
    """The folder, or the first with a number appended that does not exist."""
    names = [folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, 1000))]
    return next(name for name in names if not name.exists())


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
