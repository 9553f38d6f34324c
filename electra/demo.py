"""`electra demo`: the whole pipeline in minutes on a CPU, on text that every Python installation contains.

Text → vocabulary → shards → pre-training → a marked held-out sentence → Hugging Face folder.
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

import electra
from electra.data.shards import open_shards
from electra.data.tokenizer import TextTokenizer

VOCAB_SIZE = 1000
REPLACEMENTS = {0.35: "dictionary", 0.75: "should"}  # words put into the sentence, by their relative position
# A CPU processes few tokens in minutes: a narrow model over a small vocabulary learns the most from them.
MODEL = {"size": "tiny", "layers": 1, "width": 64, "heads": 4, "feedforward": 256, "embedding_width": 64}
BATCHES = {"length": 32, "batch_size": 128, "mask_fraction": 0.3, "learning_rate": 6e-3}
INTERVALS = {"log_every": 5, "evaluate_every": 100_000, "save_every": 100_000, "evaluation_rows": 64}


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train a tiny model on text found on this computer and export it: minutes on a CPU, without a network."""

    output: Path = Path("electra-demo")
    """The folder to write; a number is appended if it exists."""
    quick: bool = False
    """Finish in under 45 seconds, with less text and less training."""
    minutes: float | None = None
    """Minutes of pre-training; by default 2.5, with --quick 0.15."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class DemoResult:
    output: str
    documents: int
    tokens: int
    seconds: float
    metrics: dict[str, float]
    sentence: str
    marked_sentence: str

    def __str__(self) -> str:
        run = Path(self.output) / "run"
        pages = " and ".join(str(run / name) for name in ("curves.png", "samples.md") if (run / name).exists())
        return "\n".join(
            [
                f"From text to a trained model in {self.seconds:.0f} seconds: {self.documents:,} documents, "
                f"trained on {self.tokens:,} tokens.",
                "On held-out text the discriminator ranks a randomly replaced token above an original one",
                f"{self.metrics['unigram_rtd_auc']:.0%} of the time (50% is chance).",
                "",
                f"A held-out sentence with two replaced words ({', '.join(REPLACEMENTS.values())}):",
                f"  {self.sentence}",
                "The three tokens most likely replaced, with the discriminator's probability:",
                textwrap.indent(self.marked_sentence, "  "),
                "",
                f"See      {pages}",
                f'Try      electra detect --model {run} "your sentence"',
                f'         electra fill --model {run} "your [MASK]"',
                f'Use      transformers.AutoModel.from_pretrained("{self.output}/huggingface")',
                "Next     your own text: electra tokenizer, electra shard, electra pretrain (each has --help)",
            ]
        )


def run_demo(config: DemoConfig) -> DemoResult:
    """Run all steps from text to an exported model."""
    start = time.monotonic()
    folder = unused_folder(config.output)
    folder.mkdir(parents=True)
    corpus, shards, run = folder / "corpus.txt", folder / "shards", folder / "run"
    documents = write_documentation_corpus(corpus, max_characters=1_000_000 if config.quick else 4_000_000)
    print_progress(f"1. collected {documents:,} documents from the documentation of this Python installation")
    electra.train_tokenizer(corpus=str(corpus), output=folder / "vocab", vocab_size=VOCAB_SIZE)
    print_progress(f"2. trained a vocabulary of {VOCAB_SIZE:,} word pieces")
    electra.shard(corpus=str(corpus), tokenizer=folder / "vocab", output=shards, validation_fraction=0.03)
    print_progress("3. tokenized the text into shards; 3% of the documents are held out")
    minutes = config.minutes or (0.15 if config.quick else 2.5)
    print_progress(f"4. pre-training a tiny generator and discriminator for {minutes:g} minutes")
    settings = MODEL | BATCHES | INTERVALS
    result = electra.pretrain(data=shards, output=run, minutes=minutes, device="cpu", generator_width=64, **settings)
    electra.export_model(model=run, output=folder / "huggingface")
    print_progress("5. exported the discriminator to Hugging Face format")
    model = electra.load(run, device="cpu")
    sentence = replace_two_words(held_out_sentence(shards, model.tokenizer))
    seconds = time.monotonic() - start
    detection = model.detect(sentence)
    marked = detection.marked_text(threshold=sorted(detection.replaced)[-3])
    return DemoResult(str(folder), documents, result.tokens, seconds, result.metrics, sentence, marked)


def print_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def unused_folder(folder: Path) -> Path:
    """The folder, or the first with a number appended that does not exist."""
    names = [folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, 1000))]
    return next(name for name in names if not name.exists())


def write_documentation_corpus(path: Path, max_characters: int) -> int:
    """Write documents of prose paragraphs until there are `max_characters`; return the number of documents."""
    documents = characters = 0
    with path.open("w", encoding="utf-8") as file:
        for text in documentation_texts():
            paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if is_prose(part)]
            if paragraphs:
                file.write("\n".join(paragraphs) + "\n\n")
                documents += 1
                characters += sum(map(len, paragraphs))
            if characters > max_characters:
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


def held_out_sentence(shards: Path, tokenizer: TextTokenizer) -> str:
    """The first held-out sentence of 10 to 20 words."""
    for tokens in open_shards(shards).tokens_by_shard("validation"):
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
