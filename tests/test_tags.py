"""Tag schemes, entities and their scores, CoNLL files, windows of long sentences."""

import io
import random

import numpy as np
import pytest
import torch
from seqeval.metrics import accuracy_score, classification_report, f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities

from electra.errors import ConfigError, DataError
from electra.finetuning.conll import ConllWriter, conll_rows, find_entities, recognize_scheme, write_tags
from electra.finetuning.features import Features, Outputs
from electra.finetuning.tags import (
    compute_tag_metrics,
    decode_tags,
    encode_tags,
    predict_tags,
    read_rows,
    score_tag_classes,
    split_words_into_windows,
    tag_loss,
    tag_mistakes,
    tag_targets,
    tag_warnings,
    task_fields_from_tags,
    unknown_tags,
)
from electra.finetuning.tasks import Examples, Task, stack_labels

PREFIXES = {"IOB1": "BI", "IOB2": "BI", "BIOES": "BIES"}
TYPES = ("LOC", "PER", "X-Y")


def random_sentences(prefixes, count, generator):
    tags = ["O", *(f"{prefix}-{type}" for prefix in prefixes for type in TYPES)]
    return [[generator.choice(tags) for _ in range(generator.randint(1, 9))] for _ in range(count)]


def task_of(sentences, **settings):
    fields = task_fields_from_tags(sentences) | settings
    return Task(name="t", kind="tags", text="words", label="tags", splits={}, **fields)


@pytest.mark.filterwarnings("ignore::UserWarning")  # seqeval warns of types that are not predicted
@pytest.mark.parametrize("scheme", PREFIXES)
def test_entity_scores_equal_those_of_seqeval_on_random_tags(scheme):
    generator = random.Random(0)
    for _ in range(50):
        labels = random_sentences(PREFIXES[scheme], 8, generator)
        random_tags = (
            [generator.choice(random_sentences(PREFIXES[scheme], 1, generator)[0]) for _ in s] for s in labels
        )
        predicted = [
            [generator.choice(pair) for pair in zip(tags, others, strict=True)]
            for tags, others in zip(labels, random_tags, strict=True)
        ]
        task = task_of([[f"B-{type}" for type in TYPES]])
        ours, truth = (stack_labels([encode_tags(tags, task) for tags in each]) for each in (predicted, labels))
        metrics = compute_tag_metrics(ours, truth, task)
        assert metrics["entity_f1"] == pytest.approx(f1_score(labels, predicted))
        assert metrics["precision"] == pytest.approx(precision_score(labels, predicted))
        assert metrics["recall"] == pytest.approx(recall_score(labels, predicted))
        report = classification_report(labels, predicted, output_dict=True)
        for type, scores in score_tag_classes(ours, truth, task).items():
            expected = report.get(type, {"precision": 0, "recall": 0, "f1-score": 0, "support": 0})
            assert list(scores.values()) == pytest.approx(list(expected.values()), abs=1e-12)


def test_words_with_another_tag_are_mistakes_with_its_probability():
    task = task_of([["NN", "VB"]])
    logits = np.log(np.array([[0.9, 0.1], [0.75, 0.25], [0.2, 0.8]], np.float32))
    features = Features(*[torch.empty(0)] * 7, words=torch.arange(3))
    outputs = Outputs(logits, features, Examples(texts=["dogs", "run", "run"], counts=np.array([2, 1])))
    predicted, labels = predict_tags(outputs, task), stack_labels([[0, 1], [1]])
    assert predicted.tolist() == [[0, 0], [1]]
    [mistake] = tag_mistakes(task, outputs, predicted, labels)
    assert mistake == (pytest.approx(0.75), "NN", "VB", "dogs **run**")


def test_accuracy_is_that_of_words():
    labels, predicted = [["NN", "VB"], ["DT", "NN", "NN"]], [["NN", "NN"], ["DT", "NN", "VB"]]
    task = task_of(labels)
    ours, truth = (stack_labels([encode_tags(tags, task) for tags in each]) for each in (predicted, labels))
    metrics = compute_tag_metrics(ours, truth, task)
    assert metrics["accuracy"] == accuracy_score(labels, predicted) == 3 / 5
    assert score_tag_classes(ours, truth, task)["NN"] == {
        "precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3, "words": 3,
    }  # fmt: skip


@pytest.mark.parametrize("scheme", PREFIXES)
def test_entities_are_those_that_seqeval_finds(scheme):
    for tags in random_sentences(PREFIXES[scheme], 300, random.Random(1)):
        assert [(entity.type, entity.start, entity.end - 1) for entity in find_entities(tags)] == get_entities(tags)


@pytest.mark.parametrize("scheme", PREFIXES)
def test_conversion_to_another_scheme_keeps_the_entities(scheme):
    for tags in random_sentences("BIES", 300, random.Random(2)):
        converted = write_tags(find_entities(tags), len(tags), scheme)
        assert find_entities(converted) == find_entities(tags)
        assert write_tags(find_entities(converted), len(tags), scheme) == converted


def test_one_sentence_in_three_schemes():
    iob1 = ["I-PER", "I-PER", "O", "I-LOC", "B-LOC", "I-ORG"]
    iob2 = ["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "B-ORG"]
    bioes = ["B-PER", "E-PER", "O", "S-LOC", "S-LOC", "S-ORG"]
    bilou = ["B-PER", "L-PER", "O", "U-LOC", "U-LOC", "U-ORG"]
    for tags in (iob1, iob2, bioes, bilou):
        entities = find_entities(tags)
        assert [write_tags(entities, 6, scheme) for scheme in ("IOB1", "IOB2", "BIOES")] == [iob1, iob2, bioes]
    schemes = [recognize_scheme([tags]) for tags in (iob1, iob2, bioes, bilou)]
    assert schemes == ["IOB1", "IOB2", "BIOES", "BIOES"]


def test_predictions_are_written_in_the_scheme_of_the_training_file():
    iob1 = ["I-PER", "I-PER", "B-PER", "O"]
    task = task_of([iob1])
    assert task.labels == ("O", "B-PER", "I-PER")
    assert encode_tags(iob1, task) == [1, 2, 1, 0]
    assert decode_tags([[1, 2, 1, 0], [0, 2]], task) == [iob1, ["O", "I-PER"]]
    assert decode_tags([[1, 2, 1, 0], [0, 2]], task_of([["S-PER"]])) == [
        ["B-PER", "E-PER", "S-PER", "O"],
        ["O", "S-PER"],
    ]


def test_tags_without_prefixes_are_parts_of_speech():
    task = task_of([["DT", "NN"], ["NN", "O", "-LRB-"]])
    assert (task.scheme, task.labels) == (None, ("-LRB-", "DT", "NN", "O"))
    assert task.metrics[0] == "accuracy"
    assert decode_tags([encode_tags(["NN", "DT"], task)], task) == [["NN", "DT"]]


def test_tags_of_no_scheme_are_an_error():
    task = task_of([["B-PER", "I-PER", "O", "PER"]])
    with pytest.raises(DataError, match="the tag of word 4 is 'PER'; tags of entities must be O, B-TYPE and I-TYPE"):
        encode_tags(["B-PER", "I-PER", "O", "PER"], task)
    with pytest.raises(DataError, match="every tag is 'O'"):
        task_fields_from_tags([["O", "O"]])


@pytest.mark.parametrize("tags", [["B-PER", "X-FOO", "I"], ["Q-X", "W-Y", "O"], ["NN", "DT", "VB", "I-PER"]])
def test_mixed_and_unknown_prefixes_are_tags_of_no_scheme(tags):
    with pytest.raises(DataError, match="tags of entities must be O, B-TYPE and I-TYPE"):
        encode_tags(tags, task_of([tags]))


def test_tags_of_positions_and_brackets_are_not_taken_for_entities():
    tags = ["n-s---fn-", "d--------", "-LRB-", "NN-TL", "A-", "O"]
    assert task_of([tags]).scheme is None


def test_tags_that_no_training_row_has_count_as_errors():
    task = task_of([["B-PER", "I-PER", "O"]])
    predicted, labels = [["O", "O", "B-PER", "O", "B-PER"]], [["B-LOC", "I-LOC", "B-PER", "I-LOC", "O"]]
    ours, truth = (stack_labels([encode_tags(tags, task) for tags in each]) for each in (predicted, labels))
    metrics = compute_tag_metrics(ours, truth, task)
    assert metrics["entity_f1"] == f1_score(labels, predicted) == 0.4
    assert metrics["accuracy"] == 0.2
    assert score_tag_classes(ours, truth, task) == {
        "PER": {"precision": 0.5, "recall": 1.0, "f1": 2 / 3, "entities": 1.0}
    }
    plain = task_of([["DT", "NN"]])
    ours, truth = (stack_labels([encode_tags(tags, plain)]) for tags in (["DT", "NN"], ["DT", "UH"]))
    assert compute_tag_metrics(ours, truth, plain) == {"accuracy": 0.5, "macro_f1": pytest.approx(1 / 3)}
    assert score_tag_classes(ours, truth, plain)["NN"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "words": 0.0}
    assert unknown_tags(["DT", "UH"], plain) == ["UH"]
    assert unknown_tags(["I-LOC", "E-PER", "O"], task) == ["I-LOC"]


def test_unknown_tags_have_no_term_in_the_loss():
    task = task_of([["DT", "NN"]])
    ((known, continued, tags),) = tag_targets(stack_labels([encode_tags(["NN", "UH"], task)]), task)
    assert (known, continued, tags) == ([1, -1], [1, -1], [1, 2])
    logits, targets = torch.randn(1, 2, 2), torch.tensor([known])
    assert tag_loss(logits, targets) == tag_loss(logits[:, :1], targets[:, :1])


def test_violations_of_the_scheme_are_counted():
    sentences = [["B-PER", "I-PER", "O"]] * 5 + [["O", "I-PER"], ["I-LOC"]]
    assert list(tag_warnings(sentences, task_of(sentences))) == [
        "2 tags do not follow IOB2, e.g. I-PER after O; they are read as conlleval reads them"
    ]
    assert list(tag_warnings(sentences[:5], task_of(sentences))) == []
    assert "no tag has a prefix" in next(tag_warnings([["PER", "O"]], task_of([["PER", "O"]])))


CONLL = """# a comment of any length

-DOCSTART- -X- O

EU NNP B-ORG
rejects VBZ O

# sent_id = 1
# # B-X
Peter NNP B-PER


"""


@pytest.fixture
def read_conll(tmp_path):
    def read(content, name="rows.conll"):
        (tmp_path / name).write_text(content, newline="")
        return list(read_rows(tmp_path / name))

    return read


def test_sentences_of_conll_files_are_columns_without_comments_and_marks_of_documents(read_conll):
    first, second = read_conll(CONLL)
    assert (first.line, first.values) == (5, {"1": ["EU", "rejects"], "2": ["NNP", "VBZ"], "3": ["B-ORG", "O"]})
    assert (second.line, second.values["1"]) == (9, ["#", "Peter"])  # as many columns as a word


@pytest.mark.parametrize("name", ["eng.train", "rows.txt", "rows.conll", "rows.tsv"])
def test_columns_are_separated_by_tabs_or_spaces(read_conll, name):
    [row] = read_conll("New York\tB-LOC\r\n1\u00a0000\tO\r\n", name)
    assert row.values == {"1": ["New York", "1\u00a0000"], "2": ["B-LOC", "O"]}
    [row] = read_conll("York   B-LOC \n1\u00a0000 O", name)
    assert row.values == {"1": ["York", "1\u00a0000"], "2": ["B-LOC", "O"]}


def test_words_that_start_with_a_hash_are_no_comments(read_conll):
    [row] = read_conll("#electra O\n# O\nis O\n")
    assert row.values["1"] == ["#electra", "#", "is"]
    [row] = read_conll("# comment\n#\tO\nis\tO\n")  # columns are separated by tabs
    assert row.values["1"] == ["#", "is"]
    *_, row = read_conll("EU O\n\n#electra\tO\nis O\n")
    assert row.values["1"] == ["#electra", "is"]


def test_conllu_has_names_for_its_columns_and_ids_that_are_no_words(read_conll):
    lines = ["# text = vámonos", "# as many words as a word has columns , ten", "1-2\tvámonos" + "\t_" * 8]
    lines += [
        f"{number}\t{word}\t_\t{tag}" + "\t_" * 6 for number, word, tag in ((1, "vamos", "VERB"), (2, "nos", "PRON"))
    ]
    [row] = read_conll("\n".join([*lines, "2.1\tx" + "\t_" * 8, ""]), "rows.conllu")
    assert (row.values["FORM"], row.values["UPOS"]) == (["vamos", "nos"], ["VERB", "PRON"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("EU NNP O\nrejects O\n", "line 2: 2 columns, but the lines before have 3"),
        ("EU NNP O\n\nrejects VBZ O O\n", "line 3: 4 columns, but the lines before have 3"),
        ("EU NNP O\n# no comment within a sentence\n", "line 2: 6 columns, but the lines before have 3"),
        ("\n\n", "no sentences in"),
        ("-DOCSTART- -X- O\n\n", "no sentences in"),
        ("", "no sentences in"),
    ],
)
def test_files_that_are_no_columns_are_errors(read_conll, content, message):
    with pytest.raises(DataError, match=message):
        read_conll(content)


def test_tables_have_lists_of_words(read_conll):
    [row] = read_conll('{"words": ["EU"], "tags": ["O"]}\n', "rows.jsonl")
    assert row.values == {"words": ["EU"], "tags": ["O"]}
    with pytest.raises(ConfigError, match=r"sentences are in .jsonl, .parquet, or in CoNLL columns"):
        read_conll("words,tags\n", "rows.csv")


def test_a_sentence_that_fits_is_one_window():
    assert split_words_into_windows(np.array([1, 3, 2]), 6) == [(0, 3, 0, 3)]


@pytest.mark.parametrize("max_tokens", [4, 6, 30])
def test_each_word_of_a_long_sentence_is_predicted_in_one_window(max_tokens):
    lengths = np.random.default_rng(0).integers(1, 5, 200)
    windows = split_words_into_windows(lengths, max_tokens)
    owned = [word for window in windows for word in range(window.first_own, window.end_own)]
    assert owned == list(range(200))
    for window in windows:
        assert lengths[window.start : window.end].sum() <= max_tokens
        assert window.start <= window.first_own <= window.end_own <= window.end


def test_words_in_the_middle_of_a_sentence_have_context_on_both_sides():
    windows = split_words_into_windows(np.ones(1000, int), 100)
    assert all(window.first_own - window.start >= 12 for window in windows[1:])
    assert all(window.end - window.end_own >= 12 for window in windows[:-1])
    assert len(windows) == 13


WORDS_TASK = Task(
    name="x", kind="tags", text="words", label="tags", aliases={"1": "words", "3": "tags"}, metrics=(), splits={}
)


def written_columns(*rows: dict) -> str:
    file = io.StringIO()
    writer = ConllWriter(file, [], WORDS_TASK)
    for row in rows:
        writer.write_row(row)
    return file.getvalue()


@pytest.mark.parametrize("words", [["Smith", "lives"], "Smith lives"])
def test_conll_output_has_the_words_of_lists_and_of_texts(words):
    row = {"words": words, "id": "7", "prediction": ["B-PER", "O"]}
    assert written_columns(row) == "Smith B-PER\nlives O\n\n"


def test_conll_output_has_the_same_columns_in_all_rows():
    """A list of strings may happen to be as long as the sentence, and tags may be missing."""
    rows = [
        {"topics": ["a", "b"], "words": ["Smith", "lives"], "tags": ["B-PER", "O"], "prediction": ["O", "O"]},
        {"topics": ["a"], "words": ["Paris"], "tags": None, "prediction": ["O"]},
    ]
    assert written_columns(*rows) == "Smith B-PER O\nlives O O\n\nParis\t\tO\n\n"


def test_conll_output_is_read_with_the_columns_of_its_input():
    text = "Smith\xa0x\tNNP\tB-PER\nlives\t\tO\n\n#1\tCD\tO\nNew York\tNNP\tO\n\nshe PRP O\n"
    rows = list(conll_rows("x", iter(text.splitlines(keepends=True))))
    written = written_columns(*(row.values | {"prediction": row.values["3"]} for row in rows))
    again = conll_rows("x", iter(written.splitlines(keepends=True)))
    assert [row.values for row in again] == [row.values | {"4": row.values["3"]} for row in rows]
    assert written.endswith("\nshe PRP O O\n\n")


@pytest.mark.parametrize("words", [["a\tb"], ["a\nb"], [" a"], ["a", "b"], {"a": 1}, [""], ["-DOCSTART-"]])
def test_cells_that_conll_cannot_hold_are_errors(words):
    with pytest.raises(DataError, match=r"; write \.jsonl"):
        written_columns({"words": words, "prediction": ["O"]})
