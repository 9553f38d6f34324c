"""Tasks: GLUE's files as they are handed out, users' own in every kind, and bad ones named with their line."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import datasets
import numpy as np
import pytest

from electra.errors import ConfigError, DataError
from electra.finetuning.metrics import METRICS
from electra.finetuning.tasks import TASKS, Examples, Task, glue_task, own_task, read_examples, stream_examples

NLI_HEADER = "index\tpromptID\tsentence1\tsentence2\tlabel1\tgold_label\n"
FILES = {
    # a few rows in the form of each official file
    "CoLA/train.tsv": 'gj04\t1\t\tThey drank the pub dry.\ngj04\t0\t*\tThey drank the pub "dry.\n',
    "CoLA/test.tsv": "index\tsentence\n0\tBill ran.\n",
    "SST-2/dev.tsv": "sentence\tlabel\na gem \t1\n",
    "MRPC/dev.tsv": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t7\t8\tHe said .\tHe told .\r\n",
    "STS-B/train.tsv": "index\tsentence1\tsentence2\tscore\n0\tA plane.\tA jet.\t4.750\n1\tA man.\tA dog.\t0.2\n",
    "QQP/train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tWhy\n3\t4\t5\tWhy?\tWhy so?\t1\n",
    "MNLI/dev_matched.tsv": NLI_HEADER + "0\t3n\tIt rained.\tIt was wet.\tneutral\tentailment\n",
    "MNLI/dev_mismatched.tsv": NLI_HEADER + "0\t3n\tIt rained.\tIt was dry.\tneutral\tcontradiction\n",
    "QNLI/train.tsv": "index\tquestion\tsentence\tlabel\n0\tWho?\tShe.\tnot_entailment\n",
    "RTE/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tentailment\n",
    "WNLI/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n",
    "diagnostic/diagnostic.tsv": "index\tsentence1\tsentence2\n0\tThe cat sat.\tIt did not.\n",
}


@pytest.fixture
def glue(tmp_path) -> str:
    """A folder like GLUE's."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode())
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "split", "texts", "pairs", "labels"),
    [
        ("cola", "train", ["They drank the pub dry.", 'They drank the pub "dry.'], None, [1, 0]),
        ("cola", "test", ["Bill ran."], None, None),
        ("sst2", "dev", ["a gem "], None, [1]),
        ("mrpc", "dev", ["He said ."], ["He told ."], [1]),
        ("stsb", "train", ["A plane.", "A man."], ["A jet.", "A dog."], [4.75, 0.2]),
        ("qqp", "train", ["Why?"], ["Why so?"], [1]),  # without the broken line
        ("mnli", "dev", ["It rained."], ["It was wet."], [0]),
        ("mnli", "dev_mismatched", ["It rained."], ["It was dry."], [2]),
        ("qnli", "train", ["Who?"], ["She."], [1]),
        ("rte", "train", ["A."], ["B."], [0]),
        ("wnli", "train", ["A."], ["B."], [1]),
        ("diagnostic", "test", ["The cat sat."], ["It did not."], None),
    ],
)
def test_every_task_of_glue_is_read_in_its_official_form(glue, name, split, texts, pairs, labels):
    examples = read_examples(glue_task(name, glue), split)
    assert (examples.texts, examples.pairs) == (texts, pairs)
    assert examples.labels is None if labels is None else examples.labels.tolist() == pytest.approx(labels)


def test_a_broken_line_of_a_test_file_is_not_left_out(glue, tmp_path):
    (tmp_path / "QQP" / "test.tsv").write_text("id\tquestion1\tquestion2\n0\tWhy\n1\tWhy?\tWhy so?\n")
    with pytest.raises(DataError, match=r"QQP/test.tsv, line 2: 2 fields, but there are 3 columns"):
        read_examples(glue_task("qqp", glue), "test")


def test_a_broken_line_is_left_out_where_a_model_is_measured_and_named_where_it_answers(glue, tmp_path):
    task = glue_task("qqp", glue)
    [examples] = stream_examples(task, tmp_path / "QQP" / "train.tsv", 10)
    assert (examples.texts, examples.labels.tolist()) == (["Why?"], [1])
    with pytest.raises(DataError, match=r"QQP/train.tsv, line 2: 4 fields, but there are 6 columns"):
        list(stream_examples(task, tmp_path / "QQP" / "train.tsv", 10, labelled=False))


def test_the_table_says_what_the_paper_does():
    headlines = {name: task.metrics[0] for name, task in TASKS.items()}
    assert [name for name, metric in headlines.items() if metric == "matthews"] == ["cola", "diagnostic"]
    assert headlines["stsb"] == "spearman"
    assert {name: task.epochs for name, task in TASKS.items() if task.epochs != 3} == {"stsb": 10, "rte": 10}
    assert [name for name, task in TASKS.items() if task.doubles] == ["mrpc", "stsb"]
    assert [task.outputs for task in TASKS.values()] == [2, 2, 2, 1, 2, 3, 2, 2, 2, 3]


def test_the_full_diagnostic_file_has_other_columns_and_labels(tmp_path):
    (tmp_path / "diagnostic").mkdir()
    (tmp_path / "diagnostic" / "diagnostic.tsv").write_text("Logic\tPremise\tHypothesis\tLabel\nAll\tA.\tB.\tneutral\n")
    examples = read_examples(glue_task("diagnostic", str(tmp_path)), "test")
    assert (examples.texts, examples.pairs, examples.labels.tolist()) == (["A."], ["B."], [1])


HUB_ROWS = {
    "train.jsonl": {"premise": "It rained.", "hypothesis": "It was wet.", "label": 0},
    "mm.jsonl": {"premise": "A.", "hypothesis": "B.", "label": 2},
    "ax.jsonl": {"premise": "A.", "hypothesis": "B.", "label": -1},
    "stsb.jsonl": {"sentence1": "A.", "sentence2": "B.", "label": 3.5},
}
HUB_CARD = """---
configs:
- {config_name: mnli, data_files: [{split: train, path: train.jsonl}, {split: validation_mismatched, path: mm.jsonl}]}
- {config_name: ax, data_files: [{split: test, path: ax.jsonl}]}
- {config_name: stsb, data_files: [{split: validation, path: stsb.jsonl}]}
---
"""


def test_glue_comes_from_the_hub_too(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, row in HUB_ROWS.items():
        (tmp_path / name).write_text(json.dumps(row))
    (tmp_path / "README.md").write_text(HUB_CARD)
    mnli = glue_task("mnli", f"hub:{tmp_path}")
    assert read_examples(mnli, "train").labels.tolist() == [0]
    assert read_examples(mnli, "dev_mismatched").labels.tolist() == [2]
    assert read_examples(glue_task("diagnostic", f"hub:{tmp_path}"), "test").labels is None
    assert read_examples(glue_task("stsb", f"hub:{tmp_path}"), "dev").labels.tolist() == [3.5]
    with pytest.raises(DataError, match=r"cannot read hub:.*:mnli:test_matched"):
        read_examples(mnli, "test")


def test_own_rows_come_from_the_hub_with_labels_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"t": "one", "label": 3}\n{"t": "two", "label": 1}\n')
    task = own_task(train=Path(f"hub:{tmp_path}/data:default:train"), text="t", label="label")
    assert task.labels == ("1", "3")
    assert len(read_examples(task, "train")) == len(read_examples(task, "dev")) == 1
    with pytest.raises(ConfigError, match=r"hub:imdb does not say which rows; name them as hub:NAME:CONFIG:SPLIT"):
        own_task(train=Path("hub:imdb"), text="t", label="label")


def test_what_glue_lacks_is_named(glue):
    with pytest.raises(ConfigError, match="there is no task 'mrcp'; choose from cola, sst2, mrpc"):
        glue_task("mrcp", glue)
    with pytest.raises(ConfigError, match=r"none of nowhere/CoLA/train.tsv, .*; the data of GLUE is .* or hub:glue"):
        glue_task("cola", "nowhere")
    with pytest.raises(DataError, match=r"there is no .*CoLA/dev.tsv, which should hold the dev rows"):
        read_examples(glue_task("cola", glue), "dev")
    with pytest.raises(ConfigError, match="task cola has no split 'dev_mismatched'; it has train, dev, test"):
        read_examples(glue_task("cola", glue), "dev_mismatched")


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_the_same_after_json(name):
    assert Task.from_dict(json.loads(json.dumps(asdict(TASKS[name])))) == TASKS[name]


def test_stored_tasks_are_checked():
    stored = asdict(TASKS["cola"])
    with pytest.raises(ConfigError, match="there is no kind of task 'tagging'; choose from classification"):
        Task.from_dict(stored | {"kind": "tagging"})
    with pytest.raises(ConfigError, match="there is no metric bleu; choose from accuracy"):
        Task.from_dict(stored | {"metrics": ["bleu"]})
    with pytest.raises(ConfigError, match="'colour' is missing or unknown"):
        Task.from_dict(stored | {"colour": 1})


def test_scores_come_back_in_their_unit():
    stsb = TASKS["stsb"]
    assert stsb.scaled(np.array([0.0, 2.5, 5.0])).tolist() == [0, 0.5, 1]
    assert stsb.unscaled(np.array([0.5])).tolist() == [2.5]


def test_doubled_examples_have_both_orders():
    doubled = Examples(texts=["a", "c"], pairs=["b", "d"], labels=np.array([0, 1])).doubled()
    assert (doubled.texts, doubled.pairs) == (["a", "c", "b", "d"], ["b", "d", "a", "c"])
    assert doubled.labels.tolist() == [0, 1, 0, 1]


@pytest.fixture
def own(tmp_path):
    """Build a task from the labels of its training rows, or from the text of a file."""

    def build(labels: list | str, name: str = "train.jsonl", **settings) -> Task:
        rows = [json.dumps({"t": f"text {number}", "y": label}) for number, label in enumerate(labels)]
        content = labels if isinstance(labels, str) else "\n".join(rows)
        (tmp_path / name).write_bytes(content.encode())
        return own_task(train=tmp_path / name, **({"text": "t", "label": "y"} | settings))

    return build


@pytest.mark.parametrize(
    ("cells", "kind", "labels", "metrics"),
    [
        (["no", "yes", " no"], "classification", ("no", "yes"), ("accuracy", "f1", "matthews")),
        (["10", "9", "1"], "classification", ("1", "9", "10"), ("accuracy", "macro_f1")),
        ([1.0, 0, 2], "classification", ("0", "1", "2"), ("accuracy", "macro_f1")),
        ([True, False], "classification", ("False", "True"), ("accuracy", "f1", "matthews")),
        (["1.5", "2", "3"], "regression", (), ("pearson", "spearman")),
        (list(range(21)), "regression", (), ("pearson", "spearman")),
        (list(range(20)), "classification", tuple(map(str, range(20))), ("accuracy", "macro_f1")),
        ([["b", "a"], [], ["a"]], "multi-label", ("a", "b"), ("micro_f1", "exact_match")),
        (["a|b", "a"], "classification", ("a", "a|b"), ("accuracy", "f1", "matthews")),
    ],
)
def test_the_label_column_tells_the_kind(own, cells, kind, labels, metrics):
    task = own(cells)
    assert (task.kind, task.labels, task.metrics) == (kind, labels, metrics)
    assert all(name in METRICS for name in task.metrics)


def test_a_kind_that_is_given_wins(own):
    assert own(["1", "2", "4"], kind="regression").kind == "regression"
    several = own(["a|b", "", "c"], kind="multi-label")
    assert several.labels == ("a", "b", "c")
    with pytest.raises(ConfigError, match="there is no kind of task 'ranking'; choose from classification, multi-"):
        own(["a", "b"], kind="ranking")


def test_several_labels_become_marks_and_come_back(own, tmp_path):
    task = own([["b", "a"], [], ["c"]], dev=tmp_path / "train.jsonl")
    labels = read_examples(task, "train").labels
    assert labels.dtype == np.float32
    assert labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert task.words(labels) == [["a", "b"], [], ["c"]]


def test_classes_come_back_as_words(own, tmp_path):
    task = own(["yes", "no", "yes"], dev=tmp_path / "train.jsonl")
    labels = read_examples(task, "dev").labels
    assert labels.tolist() == [1, 0, 1]
    assert task.words(labels) == ["yes", "no", "yes"]


def test_scores_of_users_are_learnt_at_unit_size(own, tmp_path):
    task = own([1000.5, 2000.5, 3000.5], dev=tmp_path / "train.jsonl")
    labels = read_examples(task, "train").labels
    assert labels.tolist() == [1000.5, 2000.5, 3000.5]
    assert task.scaled(labels).mean() == pytest.approx(0)
    assert task.scaled(labels).std() == pytest.approx(1)
    assert task.words(task.unscaled(task.scaled(labels))) == pytest.approx([1000.5, 2000.5, 3000.5])


def test_held_out_rows_depend_on_the_seed_alone_and_no_row_is_lost(own):
    labels = ["a", "b"] * 20
    task, other = own(labels, dev_fraction=0.25, seed=3), own(labels, dev_fraction=0.25, seed=4)
    train, dev = (read_examples(task, split).texts for split in ("train", "dev"))
    assert len(dev) == 10
    assert sorted(train + dev) == sorted(f"text {number}" for number in range(40))
    assert read_examples(task, "dev").texts == dev != read_examples(other, "dev").texts
    assert len(read_examples(own(labels), "dev")) == 4  # a tenth
    assert len(read_examples(own(["a", "b"], dev_fraction=0.9), "train")) == 1  # never none


def test_a_file_of_dev_rows_leaves_the_training_rows_alone(own, tmp_path):
    (tmp_path / "dev.csv").write_text("t,y\nnew,b\n")
    task = own(["a", "b"], dev=tmp_path / "dev.csv")
    assert len(read_examples(task, "train")) == 2
    assert read_examples(task, "dev").texts == ["new"]
    with pytest.raises(ConfigError, match=r"dev rows in .* and a dev fraction of 0.1; give one"):
        own(["a", "b"], dev=tmp_path / "dev.csv", dev_fraction=0.1)
    with pytest.raises(ConfigError, match=r"the dev fraction is 1.5; it must be above 0 and below 1"):
        own(["a", "b"], dev_fraction=1.5)


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("t,y\na,1\n", {}, "every label is '1'; there must be two classes"),
        (
            "t,y\n" + "".join(f'a,"0,{n}"\n' for n in range(30)),
            {},
            "there are 30 different labels in 30 rows, '0,0' and '0,1'",
        ),
        ("t,y\na,1\n\nb,\n", {}, "line 4: the label is empty"),
        ("t,z\na,1\n", {}, "line 2: there is no column 'y'; the columns are 't', 'z'"),
        ("t,y\na,0.5\nb,nan\n", {}, "line 3: the score is 'nan'; it must be a number"),
        ("t,y\na,1\nb,x\n", {"kind": "regression"}, "line 3: the score is 'x'; it must be a number"),
        ("t,y\na,1e99\n", {"kind": "regression"}, "line 2: the score is '1e99'"),
        ("t,y\na,2\nb,2\n", {"kind": "regression"}, "every score is 2; there must be two different"),
        ("t,y\na,\n", {"kind": "multi-label"}, "no row has a label"),
        ("t,y\n" + "a,0.5\nb,1\n" * 10 + "c,n/a\n", {}, "line 22: the score is 'n/a'"),
    ],
)
def test_bad_training_labels_are_named_with_the_line(own, content, settings, message):
    with pytest.raises(DataError, match=rf"train.csv[,:] {message}"):
        own(content, "train.csv", **settings)


def test_a_number_that_is_none_is_no_class(own):
    with pytest.raises(DataError, match=r"line 3: the label is empty"):
        own([0.0, 1.0, math.nan])


def test_a_truth_is_no_score(own):
    with pytest.raises(DataError, match=r"line 2: the score is True; it must be a number"):
        own([0.5, True], kind="regression")


def test_a_list_is_no_class(own):
    with pytest.raises(DataError, match=r"line 1: the label is a list; .* multi-label"):
        own([["a"], ["b"]], kind="classification")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"t": "x", "y": "c"}',
            "line 1: the label 'c' is none of the task's, which come from its training rows: a, b",
        ),
        (
            '{"t": "x", "y": "a"}\n{"u": "x", "y": "a"}',
            "line 2: there is no column 't'; the columns are 'u', 'y'",
        ),
        ('{"t": "x"}', "line 1: there is no column 'y'; the columns are 't'"),
        ('{"t": 5, "y": "a"}', "line 1: column 't' holds a int; a text must be a string"),
    ],
)
def test_bad_rows_are_named_with_the_line(own, tmp_path, content, message):
    (tmp_path / "dev.jsonl").write_text(content)
    with pytest.raises(DataError, match=f"dev.jsonl, {message}"):
        read_examples(own(["a", "b"], dev=tmp_path / "dev.jsonl"), "dev")


def test_one_row_cannot_be_divided(own):
    with pytest.raises(DataError, match=r"train.jsonl has one row; held-out rows need two"):
        read_examples(own([["a"]]), "dev")


def test_empty_texts_are_texts(own, tmp_path):
    task = own("t\tu\ty\na\tb\t0\n\tb\t1\na\t\t1\n", "train.tsv", text_b="u", dev=tmp_path / "train.tsv")
    examples = read_examples(task, "train")
    assert (examples.texts, examples.pairs) == (["a", "", "a"], ["b", "b", ""])


def test_half_a_character_is_replaced(own, tmp_path):
    task = own('{"t": "\\ud83d!", "y": 0}\n{"t": null, "y": 1}', dev=tmp_path / "train.jsonl")
    assert read_examples(task, "train").texts == ["?!", ""]


def test_a_file_comes_in_pieces_with_its_rows(own, tmp_path):
    task = own(["a", "b"])
    (tmp_path / "new.csv").write_text("id,t\n1,one\n2,two\n3,three\n")
    first, last = stream_examples(task, tmp_path / "new.csv", 2)
    assert (first.texts, last.texts, first.labels) == (["one", "two"], ["three"], None)
    assert last.rows[0].values == {"id": "3", "t": "three"}


def test_labels_of_a_stream_are_read_where_they_are_and_wanted(own, tmp_path):
    task = own(["a", "b"])
    (tmp_path / "new.csv").write_text("t,y\none,b\ntwo,\n")
    assert next(stream_examples(task, tmp_path / "new.csv", 1)).labels.tolist() == [1]
    with pytest.raises(DataError, match=r"new.csv, line 3: the label is empty"):
        list(stream_examples(task, tmp_path / "new.csv", 1))
    assert [piece.labels for piece in stream_examples(task, tmp_path / "new.csv", 1, labelled=False)] == [None, None]
