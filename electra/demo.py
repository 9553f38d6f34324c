"""`electra demo`: the whole way in minutes, on prose that every Python installation carries.

Text → vocabulary → shards → a tiny pair → curves → a held-out sentence with suspicious tokens marked → Hugging Face.
"""

import ast
import re
import sys
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy

from electra.config import build
from electra.data.prepare import ShardConfig, shard
from electra.data.shards import open_shards
from electra.data.tokenizer import TokenizerConfig, train_tokenizer
from electra.export.command import ExportConfig, export
from electra.pretraining.command import pretrain
from electra.pretraining.config import PretrainConfig
from electra.serve.command import colored
from electra.serve.inference import Model, load
from electra.training.trainer import TrainResult

INTRUDERS = ("dictionary", "should")  # words that the sentence shown at the end did not have


# A CPU sees few tokens in minutes; a narrow model over a small vocabulary makes the most of them.
VOCABULARY = 1000
SIZE = {"layers": 1, "width": 64, "heads": 4, "feedforward": 256, "embedding_width": 64, "generator_width": 64}
ROWS = {"length": 32, "batch_size": 128, "mask_fraction": 0.3, "learning_rate": 6e-3}


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """From prose found on this computer to an exported encoder in minutes, on the CPU and without a network."""

    output: Path = Path("electra-demo")
    """The folder to write; a number is added where it exists."""
    quick: bool = False
    """Under 45 seconds: less text, less training. It shows the way, not the quality."""
    minutes: float | None = None
    """Minutes of training; 2.5 unless given, 0.15 with --quick."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class Demonstrated:
    """What was made, and what was measured."""

    output: str
    documents: int
    tokens: int
    seconds: float
    measures: dict[str, float]
    sentence: str
    verdicts: str

    def shown(self) -> list[str]:
        """The files of the run that are there to look at; curves need matplotlib."""
        return [name for name in ("curves.png", "samples.md") if (Path(self.output) / "run" / name).exists()]

    def __str__(self) -> str:
        size = f"{self.documents:,} documents, {self.tokens:,} tokens trained on"
        return "\n".join(
            [
                f"From text to a trained pair in {self.seconds:.0f} seconds: {size}.",
                "On held-out text the discriminator ranks a token replaced at random above an original one",
                f"{self.measures['unigram_rtd_auc']:.0%} of the time (50% is guessing).",
                "",
                f"A held-out sentence with words that do not belong ({', '.join(INTRUDERS)}):",
                f"  {self.sentence}",
                "What the discriminator says of each token (with its verdict: the three that look replaced most):",
                textwrap.indent(self.verdicts, "  "),
                "",
                f"Look at  {' and '.join(f'{self.output}/run/{name}' for name in self.shown())}",
                f'Try      electra detect --model {self.output}/run "your sentence"',
                f'         electra fill --model {self.output}/run "your [MASK]"',
                f'Use      transformers.AutoModel.from_pretrained("{self.output}/huggingface")',
                "Next     your own text: electra tokenizer, electra shard, electra pretrain (each has --help)",
            ]
        )


def demonstrate(config: DemoConfig) -> Demonstrated:
    """Gather text and take it all the way."""
    began = time.monotonic()
    folder = free_folder(config.output)
    folder.mkdir(parents=True)
    documents = write_corpus(folder / "corpus.txt", most=1_000_000 if config.quick else 4_000_000)
    say(f"1. gathered {documents:,} pieces of prose from this Python's own documentation")
    train_tokenizer(TokenizerConfig(corpus=str(folder / "corpus.txt"), output=folder / "vocab", vocab_size=VOCABULARY))
    say(f"2. learned a vocabulary of {VOCABULARY:,} pieces of words")
    shard(
        ShardConfig(
            corpus=str(folder / "corpus.txt"),
            tokenizer=folder / "vocab",
            output=folder / "shards",
            validation_fraction=0.03,
        )
    )
    say("3. turned the text into shards of tokens; 3 % of the documents are held out")
    minutes = config.minutes or (0.15 if config.quick else 2.5)
    say(f"4. training a tiny generator and discriminator for {minutes:g} minutes")
    outcome = train(folder, minutes)
    export(ExportConfig(model=folder / "run", output=folder / "huggingface"))
    say("5. exported the discriminator for Hugging Face")
    model = load(folder / "run", device="cpu")
    sentence = disturbed(held_out_sentence(folder / "shards", model))
    seconds = time.monotonic() - began
    detected = model.detect(sentence)
    third = sorted(detected.replaced)[-3]
    return Demonstrated(
        str(folder), documents, outcome.tokens, seconds, outcome.measures, sentence, colored(detected, third)
    )


def say(sentence: str) -> None:
    """A line of progress."""
    print(sentence, file=sys.stderr, flush=True)


def free_folder(wanted: Path) -> Path:
    """The folder, or with a number the first that does not exist."""
    names = [wanted, *(wanted.with_name(f"{wanted.name}-{number}") for number in range(2, 1000))]
    return next(name for name in names if not name.exists())


def train(folder: Path, minutes: float) -> TrainResult:
    """Pre-train a pair that fits a CPU."""
    settings = (
        SIZE
        | ROWS
        | {"minutes": minutes, "log_every": 5, "evaluate_every": 100_000, "save_every": 100_000, "evaluation_rows": 64}
    )
    outcome = pretrain(
        build(PretrainConfig, data=folder / "shards", output=folder / "run", size="tiny", device="cpu", **settings)
    )
    assert isinstance(outcome, TrainResult)
    return outcome


def write_corpus(path: Path, most: int) -> int:
    """Write prose paragraphs, a document each, until there are `most` characters; returns how many documents."""
    documents = characters = 0
    with path.open("w", encoding="utf-8") as file:
        for text in texts():
            paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if is_prose(part)]
            if paragraphs:
                file.write("\n".join(paragraphs) + "\n\n")
                documents, characters = documents + 1, characters + sum(map(len, paragraphs))
            if characters > most:
                break
    return documents


def texts() -> Iterator[str]:
    """The language's help topics, then the documentation strings of the standard library and of numpy."""
    yield from topics.values()
    for root in (Path(sysconfig.get_paths()["stdlib"]), Path(numpy.__file__).parent):
        for file in sorted(root.rglob("*.py")):
            if not {"test", "tests", "site-packages", "idlelib"} & set(file.relative_to(root).parts):
                yield from docstrings(file)


def docstrings(file: Path) -> Iterator[str]:
    """The documentation strings in a source file."""
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


def held_out_sentence(shards: Path, model: Model) -> str:
    """The first held-out sentence of a fair length."""
    separator = model.tokenizer.vocabulary.sep_id
    for tokens in open_shards(shards).tokens("validation"):
        for document in numpy.split(tokens, numpy.flatnonzero(tokens == separator)):
            for sentence in re.split(r"(?<=\.) ", model.tokenizer.library.decode(document.tolist())):
                if 10 <= len(sentence.split()) <= 20 and sentence.endswith("."):
                    return sentence
    return "the value of the expression is returned when the function is called."


def disturbed(sentence: str) -> str:
    """The sentence with two of its words exchanged for words that do not belong there."""
    words = sentence.split()
    for share, intruder in zip((0.35, 0.75), INTRUDERS, strict=True):
        words[int(share * len(words))] = intruder
    return " ".join(words)
