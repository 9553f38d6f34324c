"""The page of a model, in a real browser: what it shows equals PyTorch, it needs no network, it works by keyboard."""

import functools
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from conftest import WORDS
from synthetic import write_choices, write_questions, write_tags
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers_models import add_noise

import electra
from electra.data.tokenizer import SPECIAL_TOKENS, TextTokenizer, build_wordpiece_tokenizer, load_tokenizer
from electra.errors import ConfigError, DataError
from electra.exporting import node_packages
from electra.exporting import page as page_module
from electra.exporting.config import ExportConfig
from electra.exporting.node_packages import NodePackage, fetch_node_packages, has_node_packages
from electra.exporting.page import read_examples, write_page
from electra.finetuning.config import TaskConfig
from electra.finetuning.features import encode_texts
from electra.finetuning.kinds import KINDS, define_task
from electra.finetuning.storage import load_pretrained, save_finetuned_model
from electra.model.vocabulary_map import compute_map
from electra.onnx.verify import OnnxFile
from electra.runfolder import CHECKSUMS

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = {
    "chromium (apt-get install chromium)": CHROMIUM is None,
    "playwright (pip install playwright)": importlib.util.find_spec("playwright") is None,
    "the page's JavaScript libraries (make page-packages)": not has_node_packages(),
}
needs_browser = pytest.mark.skipif(
    any(MISSING.values()), reason=f"missing: {', '.join(name for name, is_missing in MISSING.items() if is_missing)}"
)
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not has_node_packages(),
    reason="missing: node (tests/install_browser_and_node) or the page's JavaScript libraries (make page-packages)",
)
SPLIT = """
import { readFileSync } from "node:fs";
import { Words } from "./tokens.js";
const read = (name) => JSON.parse(readFileSync(name));
const words = new Words(read("tokenizer.json"), read("tokenizer_config.json"), read("special.json"));
const split = (kind) => read("texts.json").map((text) => words.split(text, kind));
console.log(JSON.stringify({ text: split("text"), plain: split("plain") }));
"""
CHARACTERS = "abc XYZ  .,-'$€²ßİıŞéŒﬁǅΣςσ😀👨\u200d👩東㐀𠀀한กअ—…“_^`~|<>+№™𝒜ー々〇"
CHARACTERS += "\u0301\u200b\xad\xa0\u3000\u2028\t\n\r\0\x07\x0b\x0c\x85\ufeff\ufffd"
TEXT = "the big cat ran over the mat ."


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(autouse=True, scope="module")
def compare_at_few_lengths():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("electra.onnx.verify.LENGTHS", (1, 16))
        yield


@pytest.fixture(scope="module")
def site(finished_run, tmp_path_factory) -> Path:
    """The page of a run, in fp32."""
    folder = tmp_path_factory.mktemp("page") / "site"
    result = write_page(ExportConfig(model=finished_run, to="page", output=folder))
    assert result.megabytes > 14
    return folder


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Open a site; at the end of the test, no error was logged and nothing outside of the site was asked for."""
    servers, contexts, problems = [], [], []

    def open_site(folder: Path, **settings):
        handler = functools.partial(QuietHandler, directory=folder)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever).start()
        servers.append(server)
        address = f"http://127.0.0.1:{server.server_port}/"
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", lambda request: problems.append(f"failed: {request.url}"))
        page.on("request", lambda request: request.url.startswith(address) or problems.append(request.url))
        page.goto(address)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_site
    for context in contexts:
        context.close()
    for server in servers:
        server.shutdown()
        server.server_close()
    assert problems == []


def shown_probabilities(page) -> list[float]:
    """The probability of every token, in order."""
    shown = page.eval_on_selector_all("#reading .word", "words => words.map(word => word.dataset.probabilities)")
    return [float(value) for each in shown for value in each.split()]


def type_text(page, text: str) -> None:
    page.fill("#text", text)
    wait_for_text(page, text)


def wait_for_text(page, text: str) -> None:
    """Wait until the verdicts are those of a text."""
    words = re.findall(r"\[MASK\]|[^\s\W]+|[^\w\s]", text)
    page.wait_for_function(
        "words => [...document.querySelectorAll('#reading .pieces')].map(each => each.textContent).join('') === words",
        arg="".join(words),
    )


def check_verdicts(page, model, text: str) -> None:
    expected = model.detect(text).replaced[1:-1]
    assert shown_probabilities(page) == pytest.approx(expected, abs=1e-3)


@needs_browser
def test_verdicts_equal_pytorch_while_words_are_typed_and_replaced(site, finished_run, open_page):
    model = electra.load(finished_run, device="cpu")
    page = open_page(site)
    type_text(page, TEXT)
    check_verdicts(page, model, TEXT)
    before = shown_probabilities(page)
    page.click("#reading .word >> nth=2")
    page.wait_for_selector("#panel .bar")
    suggested = page.eval_on_selector_all("#panel .bar .name", "names => names.map(name => name.textContent)")
    [predicted] = model.fill("the big [MASK] ran over the mat .", count=20).masks
    words = [token for token in predicted.tokens if not token.startswith(("[", "##"))]
    assert suggested == words[:8]
    page.click("#panel .bar >> nth=0")
    changed = TEXT.replace("cat", suggested[0])
    wait_for_text(page, changed)
    assert page.input_value("#text") == changed
    check_verdicts(page, model, changed)
    assert page.get_attribute("#reading .word >> nth=2", "data-changed") == ""
    page.click("#undo")
    wait_for_text(page, TEXT)
    assert shown_probabilities(page) == pytest.approx(before, abs=1e-6)


@needs_browser
def test_the_generator_replaces_some_words(site, open_page):
    page = open_page(site)
    type_text(page, "[MASK] [MASK] [MASK]")  # every token of the vocabulary differs from it
    page.click("#corrupt")
    page.wait_for_selector("#reading [data-changed]")
    text = page.input_value("#text")
    assert sum(word in WORDS for word in text.split()) == 1
    assert "1 of 1" in page.inner_text("#summary") or "0 of 1" in page.inner_text("#summary")


@needs_browser
def test_a_word_is_chosen_and_replaced_by_keyboard(site, open_page):
    page = open_page(site)
    type_text(page, TEXT)
    page.focus("#text")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("#panel .bar")
    assert page.inner_text("#panel .chosen") == "cat"
    page.focus("#replacement")
    page.keyboard.type("dog")
    page.keyboard.press("Enter")
    wait_for_text(page, TEXT.replace("cat", "dog"))
    assert page.input_value("#text") == TEXT.replace("cat", "dog")


@needs_browser
def test_texts_are_tokenized_as_in_python(site, finished_run, open_page):
    """Accents, capitals, an emoji, Chinese characters above U+FFFF, special tokens and several spaces."""
    model = electra.load(finished_run, device="cpu")
    page = open_page(site)
    text = "Thé  BIG\tcat's 😀😀 𠀀𠀁漢 [MASK]mat…"
    page.fill("#text", text)
    page.wait_for_function("() => document.querySelectorAll('#reading .word').length === 12")
    check_verdicts(page, model, text)
    long = "cat " * 100
    page.fill("#text", long)
    page.wait_for_function("() => document.querySelector('#summary').textContent.includes('Only the first 16 tokens')")
    check_verdicts(page, model, long)


def bert_tokenizer() -> TextTokenizer:
    letters = [*"abcdehnort'[].", "σ", "ς"]
    tokens = [*SPECIAL_TOKENS.values(), *letters, *(f"##{each}" for each in letters), "the", "chef", "mask", "sep"]
    return build_wordpiece_tokenizer([*tokens, "東", "𠀀"], lowercase=True)


def byte_level_tokenizer() -> TextTokenizer:
    library = Tokenizer(models.BPE(unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL_TOKENS.values()), initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(["the chef ate the meal"] * 9, trainer)
    return TextTokenizer(library)


@needs_node
@pytest.mark.parametrize("create", [bert_tokenizer, byte_level_tokenizer])
def test_words_have_the_ids_of_python_and_their_places(tmp_path, create):
    """Of the kind text as in detection, and of the kind plain as in fine-tuning, in which [SEP] is no special token."""
    texts = ["don't [SEP] ate", "a[MASK]", "the chef ate ", "the chef\n", " the  chef", "the\ufeffchef", "the\x0bchef"]
    texts += ["the\x0cchef", "a\u2028b\xa0c\u3000d", "ΟΔΟΣ ΣΑΣ.", "東𠀀a", "[the] [sep]", ""]
    random = Random(0)
    texts += ["".join(random.choices(CHARACTERS, k=12)) for _ in range(500)]
    create().save(tmp_path)
    for name in ("tokens.js", "vendor/tokenizers.min.mjs"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(page_module.STATIC / name, tmp_path / name)
    files = {"package.json": {"type": "module"}, "special.json": SPECIAL_TOKENS, "texts.json": texts}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "split.js").write_text(SPLIT)
    ended = subprocess.run(["node", "split.js"], capture_output=True, check=True, cwd=tmp_path)
    split = json.loads(ended.stdout)
    library = load_tokenizer(tmp_path).library
    expected = {
        "text": [library.encode(text, add_special_tokens=False).ids for text in texts],
        "plain": [ids.tolist() for ids in encode_texts(texts, load_tokenizer(tmp_path))],
    }
    for kind, ids in expected.items():
        assert {text: each["ids"] for text, each in zip(texts, split[kind], strict=True)} == dict(
            zip(texts, ids, strict=True)
        )
        assert all(word["start"] is not None for each in split[kind] for word in each["words"])


@needs_browser
@pytest.mark.parametrize("button", ["#corrupt", "#sample"])
def test_what_is_typed_while_the_generator_samples_is_kept(site, open_page, button):
    page = open_page(site)
    type_text(page, TEXT)
    page.click("#reading .word >> nth=2")
    page.wait_for_selector("#panel .bar")
    typed = "the small dog ."
    page.evaluate(
        """([button, typed]) => {
            document.querySelector(button).click();
            document.querySelector("#text").value = typed;
            document.querySelector("#text").dispatchEvent(new Event("input"));
        }""",
        [button, typed],
    )
    page.wait_for_timeout(500)  # longer than a sample and than the pause after which a text is read
    assert page.input_value("#text") == typed
    wait_for_text(page, typed)


@needs_browser
def test_the_map_leads_to_the_nearest_neighbors(site, finished_run, open_page):
    page = open_page(site)
    page.wait_for_selector("canvas[data-ready]")
    page.fill("#search", "cat")
    page.press("#search", "Enter")
    listed = page.eval_on_selector_all("#token .name", "names => names.map(name => name.textContent)")
    model = electra.load(finished_run, device="cpu")
    table = model.main_part().encoder.embeddings.token_table().detach()
    directions = torch.nn.functional.normalize(table - table.mean(0), dim=1)
    order = (directions @ directions[model.tokenizer.library.token_to_id("cat")]).argsort(descending=True)[1:11]
    names = [model.tokenizer.library.id_to_token(index) for index in order.tolist()]
    assert listed == [name for name in names if not name.startswith("[")]
    page.click("#token .bar >> nth=1")
    assert page.inner_text("#token .chosen") == listed[1]


@needs_browser
def test_the_page_fits_a_phone(site, open_page):
    page = open_page(site, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True, color_scheme="dark")
    page.tap("#reading .word >> nth=1")
    page.wait_for_selector("#panel .bar")
    page.wait_for_selector("canvas[data-ready]")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@needs_browser
def test_the_page_forbids_requests_to_others(site, browser):
    context = browser.new_context()
    page = context.new_page()
    page.route("**/*", lambda route: route.fulfill(body=(site / "index.html").read_text(), content_type="text/html"))
    page.goto("http://page.test/")
    with pytest.raises(Exception, match="Failed to fetch"):
        page.evaluate("fetch('https://other.test/')")
    context.close()


@pytest.fixture(scope="module")
def tuned_site(finetuned, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "tuned"
    examples = folder.with_suffix(".txt")
    examples.write_text(f"{TEXT}\nthe small bird sat on the mat .\n")
    electra.export(model=finetuned.output, to="page", examples=examples, output=folder)
    return folder


@needs_browser
def test_scores_of_a_classifier_equal_pytorch(tuned_site, finetuned, open_page):
    page = open_page(tuned_site)
    assert page.eval_on_selector_all(".card", "cards => cards.length") == 2
    page.click(".card >> nth=1")
    text = "the small bird sat on the mat ."
    page.wait_for_function("() => document.querySelector('#class-summary').textContent.includes('bird')")
    assert page.input_value("#text-0") == text
    [predicted] = electra.load(finetuned.output, device="cpu").predict([text])
    labels = json.loads((tuned_site / "model/model.json").read_text())["labels"]
    expected = [predicted[f"p({label})"] for label in labels]
    values = json.loads(page.get_attribute("#scores", "data-values"))
    assert values == pytest.approx(expected, abs=1e-3)


@pytest.fixture(scope="module")
def make_tuned_page(encoder_folder, tmp_path_factory):
    """Write an untrained model of a kind of task and its page; returns both folders."""

    def make(kind: str, write, piece: str | None = None, **settings) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(kind)
        encoder = shutil.copytree(encoder_folder, folder / "encoder")
        (encoder / CHECKSUMS).unlink(missing_ok=True)
        for file in [encoder / name for name in ("tokenizer.json", "vocab.txt") if piece and (encoder / name).exists()]:
            file.write_text(file.read_text().replace("flew", piece))
        rows = folder / f"rows.{'conll' if kind == 'tags' else 'jsonl'}"
        write(rows, 20, seed=0)
        task = define_task(TaskConfig(train=rows, kind=kind, **settings))
        pretrained = load_pretrained(encoder)
        torch.manual_seed(0)
        model = add_noise(KINDS[kind].model(task)(pretrained.encoder, task.num_labels))
        (folder / "model").mkdir()
        save_finetuned_model(model, replace(task, null_threshold=100.0), 32, folder / "model", pretrained.folder)
        write_page(ExportConfig(model=folder / "model", to="page", output=folder / "site"))
        return folder / "model", folder / "site"

    return make


@needs_browser
@pytest.mark.slow
def test_tags_equal_pytorch(make_tuned_page, open_page):
    model, site = make_tuned_page("tags", write_tags)
    page = open_page(site)
    page.fill("#text-0", TEXT)
    page.wait_for_function("() => document.querySelectorAll('#marked .word').length === 8")
    shown = page.eval_on_selector_all("#marked .word", "words => words.map(word => word.dataset.label)")
    [predicted] = electra.load(model, device="cpu").predict([{"words": TEXT.split()}])
    assert len(set(shown)) > 1
    assert shown == predicted["prediction"]


@needs_browser
@pytest.mark.slow
def test_answers_equal_pytorch(make_tuned_page, open_page):
    """Also where a question is cut off, and where the best answer starts or ends inside a word (cat ##s)."""
    model, site = make_tuned_page("question-answering", write_questions, piece="##s")
    predictor, page = electra.load(model, device="cpu"), open_page(site)
    context = "the big cat sat on the mat . the small dog ran in the house ."
    questions = {
        "the red bird": context,
        "the small red house " * 5: context[:28],
        "the tree": "cats dogs birds trees mats houses",
        "in the house": "birds mats cats houses",
    }
    for question, text in questions.items():
        page.fill("#text-0", question)
        page.fill("#text-1", text)
        [predicted] = predictor.predict([{"question": question, "context": text}])
        expected = f"Answer: {predicted['prediction']} ("
        page.wait_for_function(
            "start => document.querySelector('#class-summary').textContent.startsWith(start)",
            arg=expected,
            timeout=9000,
        )
        assert page.inner_text("#scores .name >> nth=0") == predicted["prediction"]
        assert page.inner_text("mark") == predicted["prediction"]
        values = json.loads(page.get_attribute("#scores", "data-values"))
        assert values[0] == pytest.approx(predicted["probability"], abs=1e-3)


@needs_browser
@pytest.mark.slow
def test_choices_equal_pytorch(make_tuned_page, open_page):
    """Also where the context is truncated."""
    model, site = make_tuned_page("choice", write_choices, text="context", text_b="question")
    predictor, page = electra.load(model, device="cpu"), open_page(site)
    choices = ["the big cat sat .", "the small dog ran .", "the bird"]
    for context in ("the red bird sat on the mat .", "the small dog ran over the tree . " * 6):
        page.fill("#text-0", context)
        page.fill("#text-1", "in the house")
        page.fill("#text-2", "\n".join(["", *choices]))
        row = {"context": context, "question": "in the house", "choices": choices}
        [predicted] = predictor.predict([row])
        is_long = len(context) > 100
        page.wait_for_function(
            "isLong => document.querySelector('#class-summary').textContent.includes('Only the first') === isLong "
            "&& document.querySelectorAll('#scores .bar').length === 3",
            arg=is_long,
            timeout=9000,
        )
        values = json.loads(page.get_attribute("#scores", "data-values"))
        assert values == pytest.approx(predicted["probabilities"], abs=1e-3)
        assert max(values) - min(values) > 0.01
        assert page.inner_text("#scores .marked .name") == choices[predicted["prediction"]]


@pytest.mark.parametrize("int8", [False, True])
def test_a_model_of_any_size_is_in_fp32_unless_int8_is_given(tmp_path, monkeypatch, int8):
    def write_verified_files(model, folder, wants_int8, advance):
        names = ["fp32.onnx", "int8.onnx"][: 1 + wants_int8]
        for name in names:
            (folder / name).write_text(name)
        return [OnnxFile(name, 400.0, 0.0, 1.0, 1.0) for name in names]

    monkeypatch.setattr(page_module, "write_verified_files", write_verified_files)
    source = SimpleNamespace(exportable_model=lambda: None)
    config = ExportConfig(model=tmp_path, to="page", output=tmp_path / "site", **({"int8": True} if int8 else {}))
    page_module.write_model(source, tmp_path / "model.onnx", config.int8, lambda: None)
    assert (tmp_path / "model.onnx").read_text() == ("int8.onnx" if int8 else "fp32.onnx")


def test_the_map_keeps_clusters_together():
    torch.manual_seed(0)
    centers = 5 * torch.randn(3, 16)
    cluster = torch.arange(300) % 3
    mapped = compute_map(centers[cluster] + torch.randn(300, 16))
    assert (cluster[mapped.neighbors] == cluster[:, None]).all()
    positions = torch.from_numpy(mapped.positions).float()
    distances = torch.cdist(positions, positions).fill_diagonal_(torch.inf)
    assert (cluster[distances.argmin(1)] == cluster).float().mean() > 0.99
    assert positions.max() <= 65535
    assert len(mapped.to_bytes()) == 300 * (2 * 2 + 10 * 4 + 10)


def test_examples_are_lines_of_texts_between_tabs(tmp_path):
    (tmp_path / "lines.txt").write_text("a text\n\na question\tand its context\nwhich\tone\tanother\ta third\n")
    choices = ["which", "one", "another", "a third"]
    assert read_examples(tmp_path / "lines.txt") == [["a text"], ["a question", "and its context"], choices]
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match="has no text"):
        read_examples(tmp_path / "empty.txt")


def test_without_npm_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"onnxruntime-web@.* npm, which fetches them, is missing"):
        fetch_node_packages(tmp_path / "vendor")


def test_a_changed_archive_is_refused(tmp_path, monkeypatch):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho changed > package.tgz\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(node_packages, "PACKAGES", [NodePackage("some-package", "1.0.0", "AAAA", ("dist/file.mjs",))])
    with pytest.raises(DataError, match=r"changed archive of some-package@1\.0\.0"):
        fetch_node_packages(tmp_path / "vendor")
    assert not (tmp_path / "vendor").exists()


def test_libraries_that_another_process_has_fetched_meanwhile_are_kept(tmp_path, monkeypatch):
    """Both processes find an incomplete folder; the slower one does not replace the complete one."""
    vendor, archives = tmp_path / "vendor", []
    vendor.mkdir()
    (vendor / "old.mjs").write_text("of another version")
    monkeypatch.setattr(node_packages.shutil, "which", lambda name: "npm")
    monkeypatch.setattr(node_packages, "pack", lambda npm, package, folder: (folder / "package.tgz").touch())

    def extract(package, archive, folder):
        archives.append(archive)
        for name in node_packages.FILES:
            (folder / name).write_text(f"{len(archives)}")

    monkeypatch.setattr(node_packages, "extract", extract)
    fetch_node_packages(vendor)
    assert {file.name for file in vendor.iterdir()} == set(node_packages.FILES)
    first = {file.name: file.read_text() for file in vendor.iterdir()}
    fetch_node_packages(vendor)
    assert {file.name: file.read_text() for file in vendor.iterdir()} == first
    assert [path.name for path in tmp_path.iterdir()] == ["vendor"]
