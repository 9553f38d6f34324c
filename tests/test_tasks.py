"""Tasks: the official GLUE files, users' files of every kind, and errors that name file and line."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path

import datasets
import numpy as np
import pytest

from electra.errors import ConfigError, DataError
from electra.finetuning.config import TaskConfig
from electra.finetuning.kinds import KINDS, define_task, read_examples, stream_examples
from electra.finetuning.tasks import GLUE_TASKS, Examples, Task, get_glue_task, with_data_source
from electra.runfolder import convert_stored

NLI_HEADER = "index\tpromptID\tsentence1\tsentence2\tlabel1\tgold_label\n"
FILES = {
    # a few rows in the format of each official file
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
    ("name", "split", "texts", "texts_b", "labels"),
    [
        ("cola", "train", ["They drank the pub dry.", 'They drank the pub "dry.'], None, [1, 0]),
        ("cola", "test", ["Bill ran."], None, None),
        ("sst2", "dev", ["a gem "], None, [1]),
        ("mrpc", "dev", ["He said ."], ["He told ."], [1]),
        ("stsb", "train", ["A plane.", "A man."], ["A jet.", "A dog."], [4.75, 0.2]),
        ("qqp", "train", ["Why?"], ["Why so?"], [1]),  # without the malformed line
        ("mnli", "dev", ["It rained."], ["It was wet."], [0]),
        ("mnli", "dev_mismatched", ["It rained."], ["It was dry."], [2]),
        ("qnli", "train", ["Who?"], ["She."], [1]),
        ("rte", "train", ["A."], ["B."], [0]),
        ("wnli", "train", ["A."], ["B."], [1]),
        ("diagnostic", "test", ["The cat sat."], ["It did not."], None),
    ],
)
def test_official_glue_files(glue, name, split, texts, texts_b, labels):
    examples = read_examples(with_data_source(GLUE_TASKS[name], glue), split)
    assert (examples.texts, examples.texts_b) == (texts, texts_b)
    assert examples.labels is None if labels is None else examples.labels.tolist() == pytest.approx(labels)


def test_malformed_lines_of_test_files_are_errors(glue, tmp_path):
    (tmp_path / "QQP" / "test.tsv").write_text("id\tquestion1\tquestion2\n0\tWhy\n1\tWhy?\tWhy so?\n")
    with pytest.raises(DataError, match=r"QQP/test.tsv, line 2: 2 fields, but there are 3 columns"):
        read_examples(get_glue_task("qqp", glue), "test")


def test_malformed_lines_are_skipped_in_evaluation_and_errors_in_prediction(glue, tmp_path):
    task = get_glue_task("qqp", glue)
    [examples] = stream_examples(task, tmp_path / "QQP" / "train.tsv", 10)
    assert (examples.texts, examples.labels.tolist()) == (["Why?"], [1])
    with pytest.raises(DataError, match=r"QQP/train.tsv, line 2: 4 fields, but there are 6 columns"):
        list(stream_examples(task, tmp_path / "QQP" / "train.tsv", 10, with_labels=False))


def test_metrics_epochs_and_doubled_pairs_are_those_of_the_paper():
    main_metrics = {name: task.metrics[0] for name, task in GLUE_TASKS.items()}
    assert [name for name, metric in main_metrics.items() if metric == "matthews"] == ["cola", "diagnostic"]
    assert main_metrics["stsb"] == "spearman"
    assert {name: task.epochs for name, task in GLUE_TASKS.items() if task.epochs != 3} == {"stsb": 10, "rte": 10}
    assert [name for name, task in GLUE_TASKS.items() if task.double_unordered] == ["mrpc", "stsb"]
    assert [task.num_labels for task in GLUE_TASKS.values()] == [2, 2, 2, 1, 2, 3, 2, 2, 2, 3]


def test_the_full_diagnostic_file_has_other_columns_and_labels(tmp_path):
    (tmp_path / "diagnostic").mkdir()
    (tmp_path / "diagnostic" / "diagnostic.tsv").write_text("Logic\tPremise\tHypothesis\tLabel\nAll\tA.\tB.\tneutral\n")
    examples = read_examples(with_data_source(GLUE_TASKS["diagnostic"], str(tmp_path)), "test")
    assert (examples.texts, examples.texts_b, examples.labels.tolist()) == (["A."], ["B."], [1])


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


def test_glue_from_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, row in HUB_ROWS.items():
        (tmp_path / name).write_text(json.dumps(row))
    (tmp_path / "README.md").write_text(HUB_CARD)
    mnli = get_glue_task("mnli", f"hub:{tmp_path}")
    assert read_examples(mnli, "train").labels.tolist() == [0]
    assert read_examples(mnli, "dev_mismatched").labels.tolist() == [2]
    assert read_examples(with_data_source(GLUE_TASKS["diagnostic"], f"hub:{tmp_path}"), "test").labels is None
    assert read_examples(get_glue_task("stsb", f"hub:{tmp_path}"), "dev").labels.tolist() == [3.5]
    with pytest.raises(DataError, match=r"cannot read hub:.*:mnli:test_matched"):
        read_examples(mnli, "test")


def test_custom_tasks_from_the_hub_keep_their_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text('{"t": "one", "label": 3}\n{"t": "two", "label": 1}\n')
    task = define_task(TaskConfig(train=Path(f"hub:{tmp_path}/data:default:train"), text="t", label="label"))
    assert task.labels == ("1", "3")
    assert len(read_examples(task, "train")) == len(read_examples(task, "dev")) == 1
    with pytest.raises(ConfigError, match=r"hub:imdb does not name a split"):
        define_task(TaskConfig(train=Path("hub:imdb"), text="t", label="label"))


def test_a_pipe_which_can_be_read_once_is_refused(tmp_path):
    os.mkfifo(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match="is a folder or a pipe; the train rows are read several times"):
        define_task(TaskConfig(train=tmp_path / "train.jsonl"))


def test_missing_tasks_files_and_splits_are_named(glue):
    with pytest.raises(ConfigError, match="unknown task 'mrcp'; choose from cola, sst2, mrpc"):
        get_glue_task("mrcp", glue)
    with pytest.raises(ConfigError, match=r"found none of nowhere/CoLA/train.tsv, .* or hub:glue"):
        get_glue_task("cola", "nowhere")
    with pytest.raises(DataError, match=r"CoLA/dev.tsv, the file of the dev rows, does not exist"):
        read_examples(get_glue_task("cola", glue), "dev")
    with pytest.raises(ConfigError, match="task cola has no split 'dev_mismatched'; it has train, dev, test"):
        read_examples(get_glue_task("cola", glue), "dev_mismatched")


@pytest.mark.parametrize("name", GLUE_TASKS)
def test_tasks_round_trip_through_json(name):
    stored = json.loads(json.dumps(asdict(GLUE_TASKS[name])))
    assert convert_stored(stored, Task, Path("config.json")) == GLUE_TASKS[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "tagging"}, "'tagging'"),
        ({"metrics": ["bleu"]}, "unknown metric bleu; choose from accuracy"),
        ({"colour": 1}, "unknown field - at `colour`"),
    ],
)
def test_stored_tasks_are_checked(change, message):
    with pytest.raises(DataError, match=message):
        convert_stored(asdict(GLUE_TASKS["cola"]) | change, Task, Path("config.json"))


def test_scores_are_normalised_by_their_scale():
    stsb = GLUE_TASKS["stsb"]
    assert stsb.normalize_scores(np.array([0.0, 2.5, 5.0])).tolist() == [0, 0.5, 1]
    assert stsb.denormalize_scores(np.array([0.5])).tolist() == [2.5]


def test_swapped_pairs_follow_the_original_ones():
    doubled = Examples(texts=["a", "c"], texts_b=["b", "d"], labels=np.array([0, 1])).with_swapped_pairs()
    assert (doubled.texts, doubled.texts_b) == (["a", "c", "b", "d"], ["b", "d", "a", "c"])
    assert doubled.labels.tolist() == [0, 1, 0, 1]


@pytest.fixture
def make_task(tmp_path):
    """Build a custom task from the labels of its training rows, or from the text of a file."""

    def build(labels: list | str, name: str = "train.jsonl", **settings) -> Task:
        rows = [json.dumps({"t": f"text {number}", "y": label}) for number, label in enumerate(labels)]
        content = labels if isinstance(labels, str) else "\n".join(rows)
        (tmp_path / name).write_bytes(content.encode())
        return define_task(TaskConfig(train=tmp_path / name, **({"text": "t", "label": "y"} | settings)))

    return build


MONTHS = tuple(f"{year}_{month:02}" for year in (2020, 2021) for month in range(1, 13))  # no numbers


@pytest.mark.parametrize(
    ("cells", "kind", "labels", "metrics"),
    [
        (["no", "yes", " no"], "classification", ("no", "yes"), ("accuracy", "f1", "matthews")),
        (["10", "9", "1"], "classification", ("1", "9", "10"), ("accuracy", "macro_f1")),
        ([1.0, 0, 2], "classification", ("0", "1", "2"), ("accuracy", "macro_f1")),
        ([True, False], "classification", ("False", "True"), ("accuracy", "f1", "matthews")),
        (MONTHS * 2, "classification", MONTHS, ("accuracy", "macro_f1")),
        (["1.5", "2", "3"], "regression", (), ("pearson", "spearman", "mae", "rmse")),
        (list(range(21)), "regression", (), ("pearson", "spearman", "mae", "rmse")),
        (list(range(20)), "classification", tuple(map(str, range(20))), ("accuracy", "macro_f1")),
        ([["b", "a"], [], ["a"]], "multi-label", ("a", "b"), ("micro_f1", "exact_match")),
        (["a|b", "a"], "classification", ("a", "a|b"), ("accuracy", "f1", "matthews")),
    ],
)
def test_the_kind_is_inferred_from_the_label_column(make_task, cells, kind, labels, metrics):
    task = make_task(cells)
    assert (task.kind, task.labels, task.metrics) == (kind, labels, metrics)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a|b", "a", "a", "a|b"], "contain |: 'a|b'; --kind multi-label"),
        (["a", "a", "NaN", "NaN"], "'NaN' is a class"),
        (["a", "a", "b"], "classes of a single row, which cannot be both learnt and evaluated: 'b'"),
        ([["a", "b"], ["a"], []], "evaluated: 'b'"),
        ([["a", "b"], ["a", "b"], ["a"]], "every row has 'a'"),
        ([["a|b"], ["c"], ["a|b"], ["c"]], "classes contain |, which separates classes in tables: 'a|b'"),
        (list(range(1, 40)), "every score is another integer, as in a column of ids"),
        (["a", "b", "a", "b"], ""),
        ([float(number) for number in range(30)] * 2, ""),
    ],
)
def test_labels_that_are_probably_not_intended_are_mentioned_once(make_task, capsys, labels, message):
    make_task(labels)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(message)
    assert message in "".join(lines)


def test_an_explicit_kind_takes_precedence(make_task):
    assert make_task(["1", "2", "4"], kind="regression").kind == "regression"
    several = make_task(["a|b", "", "c"], kind="multi-label")
    assert several.labels == ("a", "b", "c")


def test_multi_label_rows_are_encoded_multi_hot_and_decoded(make_task, tmp_path):
    task = make_task([["b", "a", None, math.nan], [], ["c"]], dev=tmp_path / "train.jsonl")
    labels = read_examples(task, "train").labels
    assert labels.dtype == np.float32
    assert labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert KINDS[task.kind].decode(labels, task) == [["a", "b"], [], ["c"]]


def test_classes_are_encoded_as_ids_and_decoded(make_task, tmp_path):
    task = make_task(["yes", "no", "yes"], dev=tmp_path / "train.jsonl")
    labels = read_examples(task, "dev").labels
    assert labels.tolist() == [1, 0, 1]
    assert KINDS[task.kind].decode(labels, task) == ["yes", "no", "yes"]


def test_scores_of_custom_tasks_are_standardised(make_task, tmp_path):
    task = make_task([1000.5, 2000.5, 3000.5], dev=tmp_path / "train.jsonl")
    labels = read_examples(task, "train").labels
    assert labels.tolist() == [1000.5, 2000.5, 3000.5]
    assert task.normalize_scores(labels).mean() == pytest.approx(0)
    assert task.normalize_scores(labels).std() == pytest.approx(1)
    assert KINDS[task.kind].decode(task.denormalize_scores(task.normalize_scores(labels)), task) == pytest.approx(
        [1000.5, 2000.5, 3000.5]
    )


def test_held_out_rows_are_always_the_same_and_every_row_is_used(make_task):
    labels = ["a", "b"] * 20
    task = make_task(labels, dev_fraction=0.25)
    train, dev = (read_examples(task, split).texts for split in ("train", "dev"))
    assert len(dev) == 10
    assert sorted(train + dev) == sorted(f"text {number}" for number in range(40))
    assert read_examples(task, "dev").texts == dev
    assert len(read_examples(make_task(labels), "dev")) == 4  # a tenth
    assert len(read_examples(make_task(["a", "b"], dev_fraction=0.9), "train")) == 1  # never none


def test_with_a_dev_file_all_training_rows_are_used(make_task, tmp_path):
    (tmp_path / "dev.csv").write_text("t,y\nnew,b\n")
    task = make_task(["a", "b"], dev=tmp_path / "dev.csv")
    assert len(read_examples(task, "train")) == 2
    assert read_examples(task, "dev").texts == ["new"]
    with pytest.raises(ConfigError, match="--dev and --dev-fraction cannot be combined"):
        make_task(["a", "b"], dev=tmp_path / "dev.csv", dev_fraction=0.1)
    with pytest.raises(ConfigError, match=r"dev_fraction is 1.5; it must be above 0 and below 1"):
        make_task(["a", "b"], dev_fraction=1.5)


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("t,y\na,1\n", {}, "every label is '1'"),
        (
            "t,y\n" + "".join(f'a,"0,{n}"\n' for n in range(30)),
            {},
            "30 different labels in 30 rows, e.g. '0,0' and '0,1'",
        ),
        ("t,y\na,1\n\nb,\n", {}, "line 4: the label is empty"),
        ("t,z\na,1\n", {}, "line 2: no column 'y'; the columns are 't', 'z'"),
        ("t,y\na,0.5\nb,nan\n", {}, "line 3: the score is 'nan'"),
        ("t,y\na,1\nb,x\n", {"kind": "regression"}, "line 3: the score is 'x'"),
        ("t,y\na,1e99\n", {"kind": "regression"}, "line 2: the score is '1e99'"),
        ("t,y\na,2\nb,2\n", {"kind": "regression"}, "every score is 2"),
        ("t,y\na,\n", {"kind": "multi-label"}, "no row has a label"),
        (f"t,y\na,{'x' * 1_001}\n", {}, "line 2: the label has 1,001 characters; at most 1,000"),
        (f"t,y\na,{'|'.join(map(str, range(10_001)))}\n", {"kind": "multi-label"}, "10,001 different labels"),
        ("t,y\n" + "a,0.5\nb,1\n" * 10 + "c,n/a\n", {}, "line 22: the score is 'n/a'"),
    ],
)
def test_errors_in_training_labels_name_file_and_line(make_task, content, settings, message):
    with pytest.raises(DataError, match=rf"train.csv[,:] {message}"):
        make_task(content, "train.csv", **settings)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"context": "a", "choices": ["b", "c"], "label": 1}, "choice"),
        ({"context": "a", "question": "b", "answers": {"text": ["a"], "answer_start": [0]}}, "question-answering"),
        ({"tokens": ["a", "b"], "tags": ["O", "B-X"]}, "tags"),
    ],
)
def test_rows_of_choices_answers_and_tags_are_not_taken_for_texts(tmp_path, row, kind):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(row)] * 3))
    with pytest.raises(ConfigError, match=f"add --kind {kind}, or"):
        define_task(TaskConfig(train=path, text="context", label="answers"))


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"label": "text"}, "--text and --label are text"),
        ({"text": "label"}, "--text and --label are label"),
        ({"text_b": "text"}, "--text and --text-b are text"),
        ({"kind": "question-answering", "label": "context"}, "--text and --label are context"),
        ({"kind": "choice", "text": "choices"}, "--text and --choices are choices"),
        ({"kind": "choice", "choices": ("a", "b", "a")}, "--choices are a"),
        ({"kind": "tags", "text": "tags"}, "--text and --label are tags"),
    ],
)
def test_a_column_by_default_is_no_other_column(tmp_path, settings, flags):
    """A model that reads its labels would have an accuracy of 100."""
    with pytest.raises(ConfigError, match=f"^{flags}; they must be different columns"):
        define_task(TaskConfig(train=tmp_path / "rows.jsonl", **settings))


@pytest.mark.parametrize(
    ("labels", "kind", "message"),
    [
        ([0.0, 1.0, math.nan], None, "line 3: the label is empty"),
        ([0.5, True], "regression", "line 2: the score is True"),
        ([["a"], ["b"]], "classification", "line 1: the label is a list; .* multi-label"),
        ([["a"], None], "multi-label", "line 2: the label is missing; .* an empty list"),
        ([["a"], [0, 1, 1]], "multi-label", "line 2: the label lists '1' twice; .* names"),
        ([["a"], [True, False]], "multi-label", "line 2: the label lists True; .* names"),
        ([["a"], [0.5, 1.0]], "multi-label", "line 2: the label lists 0.5; .* names"),
        ([["a"], ["b", "b"]], "multi-label", "line 2: the label lists 'b' twice; leave one out"),
        ([[0, 1], [1, 0]], "multi-label", "every row has all classes: '0', '1'; .* names"),
    ],
)
def test_labels_of_the_wrong_type_are_errors(make_task, labels, kind, message):
    with pytest.raises(DataError, match=message):
        make_task(labels, kind=kind)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"t": "x", "y": "c"}', "line 1: unknown label 'c'; the labels of the training rows are a, b"),
        ('{"t": "x", "y": "a"}\n{"u": "x", "y": "a"}', "line 2: no column 't'; the columns are 'u', 'y'"),
        ('{"t": "x"}', "line 1: no column 'y'; the columns are 't'"),
        ('{"t": 5, "y": "a"}', "line 1: column 't' holds a int; a text must be a string"),
    ],
)
def test_errors_in_rows_name_file_and_line(make_task, tmp_path, content, message):
    (tmp_path / "dev.jsonl").write_text(content)
    with pytest.raises(DataError, match=f"dev.jsonl, {message}"):
        read_examples(make_task(["a", "b"], dev=tmp_path / "dev.jsonl"), "dev")


def test_a_single_row_cannot_be_split(make_task):
    with pytest.raises(DataError, match=r"train.jsonl has one row"):
        read_examples(make_task([["a"]]), "dev")


def test_texts_may_be_empty(make_task, tmp_path):
    task = make_task("t\tu\ty\na\tb\t0\n\tb\t1\na\t\t1\n", "train.tsv", text_b="u", dev=tmp_path / "train.tsv")
    examples = read_examples(task, "train")
    assert (examples.texts, examples.texts_b) == (["a", "", "a"], ["b", "b", ""])


def test_lone_surrogates_are_replaced_and_null_is_empty(make_task, tmp_path):
    task = make_task('{"t": "\\ud83d!", "y": 0}\n{"t": null, "y": 1}', dev=tmp_path / "train.jsonl")
    assert read_examples(task, "train").texts == ["?!", ""]


def test_examples_are_streamed_in_chunks_with_their_rows(make_task, tmp_path):
    task = make_task(["a", "b"])
    (tmp_path / "new.csv").write_text("id,t\n1,one\n2,two\n3,three\n")
    first, last = stream_examples(task, tmp_path / "new.csv", 2)
    assert (first.texts, last.texts, first.labels) == (["one", "two"], ["three"], None)
    assert last.rows[0].values == {"id": "3", "t": "three"}


def test_labels_of_a_stream_are_optional(make_task, tmp_path):
    task = make_task(["a", "b"])
    (tmp_path / "new.csv").write_text("t,y\none,b\ntwo,\n")
    assert next(stream_examples(task, tmp_path / "new.csv", 1)).labels.tolist() == [1]
    with pytest.raises(DataError, match=r"new.csv, line 3: the label is empty"):
        list(stream_examples(task, tmp_path / "new.csv", 1))
    assert [chunk.labels for chunk in stream_examples(task, tmp_path / "new.csv", 1, with_labels=False)] == [None, None]
