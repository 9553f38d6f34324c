"""Question answering: SQuAD's metrics and files, windows of long contexts, both heads, equality with transformers."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import error_message, run
from hypothesis import given
from hypothesis import strategies as st
from synthetic import write_questions, write_squad
from transformers import AutoModelForQuestionAnswering, AutoTokenizer
from transformers_models import load_without_warnings

import electra
from electra.data.tokenizer import load_tokenizer
from electra.errors import ConfigError, DataError
from electra.finetuning.command import check_other_splits
from electra.finetuning.config import PredictorConfig, TaskConfig
from electra.finetuning.features import NO_LOGIT, RowBatch, compute_logits
from electra.finetuning.kinds import KINDS, define_task, read_examples
from electra.finetuning.metrics import answer_scores, normalize_answer
from electra.finetuning.models import JointSpanModel, SpanModel, choose_beam, search_spans
from electra.finetuning.predict import Predictor
from electra.finetuning.question_answering import (
    MAX_ANSWER,
    Candidate,
    best_spans,
    make_windows,
    merge_candidates,
    parse_answers,
    read_rows,
    tune_null_threshold,
    window_bounds,
)
from electra.finetuning.storage import load_pretrained, save_finetuned_model
from electra.finetuning.tasks import Examples, Task
from electra.resumable import ResumableFile

KIND = "question-answering"


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Cat", "cat"),
        ("a  cat,\tan owl; the\nend.", "cat owl end"),
        ("Theatre and another an", "theatre and another"),
        ("U.S.A.", "usa"),
        ("it's 1,000-year-old", "its 1000yearold"),
        ("l'été à la Zoé", "lété à la zoé"),
        ("“quoted” – dash…", "“quoted” – dash…"),  # punctuation beyond ASCII stays
        ("A\u00a0B\u3000the C", "b c"),  # spaces beyond ASCII separate words
        ("a", ""),
        ("!?", ""),
        ("ÉCOLE İ", "école i\u0307"),
        ("the-end", "theend"),  # punctuation goes first, so this is no article
    ],
)
def test_answers_are_compared_in_squads_normal_form(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("predicted", "answers", "f1", "exact"),
    [
        ("the Denver Broncos", ["Denver Broncos"], 1, 1),
        ("Broncos", ["Denver Broncos"], 2 / 3, 0),
        ("Denver Broncos!", ["Carolina Panthers", "the Denver Broncos"], 1, 1),  # the best of several answers
        ("in 1999", ["1999", "in the year 1999"], 4 / 5, 0),
        ("cat cat", ["cat"], 2 / 3, 0),  # each word counts as often as in both
        ("cat dog cat", ["cat cat dog"], 1, 0),  # F1 ignores the order
        ("lion", ["tiger"], 0, 0),
        ("Zoe", ["Zoé"], 0, 0),
        ("", [], 1, 1),  # no answer, and none is right
        ("cat", [], 0, 0),
        ("", ["cat"], 0, 0),
        ("the", [], 1, 1),  # nothing is left of it
        ("cat", ["the", "cat"], 1, 1),
        ("", ["a", "..."], 1, 1),  # answers of which nothing is left are none
        ("cat", ["a"], 0, 0),
    ],
)
def test_f1_and_exact_match_are_squads(predicted, answers, f1, exact):
    assert answer_scores(predicted, answers) == (pytest.approx(f1), exact)


@pytest.fixture(scope="module")
def tokenizer(shards):
    return load_tokenizer(shards / "tokenizer")


@given(st.integers(0, 300), st.integers(2, 60))
def test_windows_cover_the_context_and_overlap(num_tokens, room):
    bounds = list(window_bounds(num_tokens, room))
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_tokens
    for (first, end), (next_first, next_end) in itertools.pairwise(bounds):
        assert end - first == room
        assert end - next_first == room // 2  # they share half of their tokens, up to 128
        assert next_end > end


def test_windows_are_rows_of_an_example_and_targets_are_its_answer(tokenizer):
    context = "the big cat sat . " * 12 + "the red dog ran . " + "the small bird flew . " * 3
    start = context.index("red dog")
    examples = Examples(texts=["in the house"] * 2, texts_b=[context, "the cat ."], labels=np.empty(2, object))
    examples.labels[:] = [(("big bear", -1), ("red dog", start)), ()]
    features = make_windows(examples, tokenizer, 32)
    assert features.examples.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert len(features) == 7
    assert features.num_examples == 2
    ids, mask, segments = features.collate(RowBatch(torch.arange(7), torch.ones(7), 32), pad_id=0)
    assert ids[:, :5].tolist() == [tokenizer.library.encode("in the house").ids] * 7
    assert (segments.sum(1) == mask.sum(1) - 5).all()
    dog = tokenizer.library.token_to_id("dog")
    found = 0
    for row, (first, last) in enumerate(features.labels.tolist()):
        if first == 0:
            assert last == 0
            continue
        assert tokenizer.library.decode(ids[row, first : last + 1].tolist()) == "red dog"
        offsets = features.offsets[features.starts[row] : features.starts[row] + features.lengths[row]]
        assert context[offsets[first, 0] : offsets[last, 1]] == "red dog"
        found += 1
    whole = [row for row in range(7) if dog in ids[row] and tokenizer.library.token_to_id("red") in ids[row]]
    assert found == len(whole) > 0


def test_answers_are_cut_out_of_the_context_as_they_are_written(tmp_path):
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ca", "##fe", "straße", "in", "(", ")"]) + "\n"
    )
    context = "  In (Café)\tStraße  "
    examples = Examples(texts=["in"], texts_b=[context], labels=np.empty(1, object))
    examples.labels[0] = (("afé", context.index("afé")),)  # a part of a word is its whole word
    features = make_windows(examples, load_tokenizer(tmp_path / "vocab.txt"), 32)
    (first, last), offsets = features.labels[0].tolist(), features.offsets
    assert context[offsets[first, 0] : offsets[last, 1]] == "Café"
    words = [context[start:end] for start, end in offsets[features.lengths_a[0] : -1].tolist()]
    assert words == ["In", "(", "Café", "Café", ")", "Straße"]


def test_an_answer_starts_after_the_space_of_a_byte_level_token():
    answer = merge_candidates("the cat sat", [Candidate(3, 7, 0.0, 0.0)], null=0.0, is_relative=True)
    assert (answer.texts, answer.candidates[0].start) == (["cat"], 4)


@pytest.mark.parametrize("length", [1, 7, 40])
def test_the_best_spans_are_those_of_all_spans(length):
    logits = torch.randn(length + 5, 2, generator=torch.Generator().manual_seed(length)).numpy()
    logits[[1, 2, 3, -1]] = NO_LOGIT  # question and [SEP]
    null, spans = best_spans(logits, first=4)
    scores = torch.from_numpy(logits).log_softmax(0)
    assert null == pytest.approx(scores[0].sum().item())
    context = range(4, length + 4)
    expected = [
        (scores[start, 0] + scores[end, 1]).item()
        for start in context
        for end in context
        if 0 <= end - start < MAX_ANSWER
    ]
    found = sorted((start_score + end_score for _, _, start_score, end_score in spans), reverse=True)
    assert found == pytest.approx(sorted(expected, reverse=True)[:20], abs=1e-5)
    assert all(scores[start, 0] == pytest.approx(score) for start, _, score, _ in spans)


def test_beam_search_equals_scoring_all_spans_where_the_beam_is_wide_enough():
    torch.manual_seed(0)
    starts, ends = torch.randn(3, 15), torch.randn(3, 15, 15)  # ends[:, start]: scores of last tokens
    starts[:, [1, 14]] = NO_LOGIT  # not in the context
    ends[:, :, [1, 14]] = NO_LOGIT
    is_allowed = starts > NO_LOGIT
    beam = choose_beam(starts, is_allowed)
    assert beam[0].tolist() == [1, *range(2, 14), *[14] * 7]  # 12 tokens of the context, then others
    firsts, lasts, start_scores, end_scores = search_spans(
        starts, beam, torch.stack([ends[torch.arange(3), start] for start in beam.unbind(1)], -1)
    )
    scores = starts.log_softmax(1)[..., None] + ends.log_softmax(2)
    for row in range(3):
        context = range(2, 14)
        expected = sorted((scores[row, s, e].item() for s in context for e in context if e >= s), reverse=True)[:20]
        assert (start_scores + end_scores)[row].tolist() == pytest.approx(expected, abs=1e-5)
        for first, last, total in zip(firsts[row], lasts[row], (start_scores + end_scores)[row].tolist(), strict=True):
            assert scores[row, int(first), int(last)].item() == pytest.approx(total, abs=1e-5)


QA_TASK = Task(
    name="x", kind=KIND, text="context", text_b="question", label="answers", metrics=("f1", "exact_match"), splits={}
)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), st.integers(-3, 3)), min_size=1, max_size=8))
def test_the_null_threshold_gives_the_best_f1(rows):
    texts = {0.0: "dog", 0.5: "cat mat hat", 1.0: "cat"}
    predicted = np.array([(texts[f1], float(odds)) for f1, _, odds in rows], object)
    labels = np.empty(len(rows), object)
    labels[:] = [() if is_null else (("cat", 0),) for _, is_null, _ in rows]
    task = Task(**vars(QA_TASK) | {"has_unanswerable": True})

    def f1_at(threshold):
        return KINDS[KIND].compute_metrics(predicted, labels, Task(**vars(task) | {"null_threshold": threshold}))["f1"]

    tuned = tune_null_threshold(predicted, labels, task)
    assert f1_at(tuned.null_threshold) == max(f1_at(threshold) for threshold in range(-5, 5))
    assert min(abs(odds - tuned.null_threshold) for _, _, odds in rows) >= 0.5  # so that rounding changes no answer


@pytest.mark.parametrize(
    "cell",
    [
        [{"text": "cat", "answer_start": 4}],
        {"text": ["cat"], "answer_start": [4]},
        {"text": ["cat"]},
        ["cat"],
        " cat ",
        '[{"text": "cat", "answer_start": 4}]',
        '{"text": ["cat"], "answer_start": [4]}',
        [{"text": "cat", "answer_start": 4.0}, {"text": "", "answer_start": 0}],
    ],
)
def test_answers_come_in_several_forms(cell):
    assert parse_answers((cell, "the cat sat")) == (("cat", 4),)


@pytest.mark.parametrize("cell", [[], "", "[]", {"text": [], "answer_start": []}])
def test_a_question_may_have_no_answer(cell):
    assert parse_answers((cell, "the cat sat")) == ()


def test_missing_answers_are_not_taken_for_none():
    with pytest.raises(DataError, match=r"the answers are missing; .* an empty list"):
        parse_answers((None, "the cat sat"))


@pytest.mark.parametrize("start", [3, 5, -1, -7, 10**6])
def test_an_answer_must_be_at_its_start(start):
    assert parse_answers(([{"text": "cat", "answer_start": start}], "the cat sat")) == (("cat", -1),)


SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Cats",
            "paragraphs": [
                {
                    "context": "the cat sat .",
                    "qas": [
                        {"id": "a", "question": "who", "answers": [{"text": "the cat", "answer_start": 0}]},
                        {"id": "b", "question": "when", "answers": [], "is_impossible": True, "plausible_answers": []},
                        {"id": "c", "question": "what", "answers": [{"text": "dog", "answer_start": 4}]},
                    ],
                }
            ],
        }
    ],
}


def test_squads_json_is_read_with_contexts_answers_and_ids(tmp_path, capsys):
    for version in ("1.1", "2.0"):
        for split in ("train", "dev"):
            (tmp_path / f"{split}-v{version}.json").write_text(json.dumps(SQUAD))
    rows = [row.values for row in read_rows(tmp_path / "dev-v2.0.json")]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert rows[0] == {
        "id": "a",
        "context": "the cat sat .",
        "question": "who",
        "answers": [{"text": "the cat", "answer_start": 0}],
    }
    task = define_task(TaskConfig(task="squad2", data=str(tmp_path)))
    assert "1 of 3 questions have no answer that is in the context" in capsys.readouterr().err
    assert (task.has_unanswerable, task.metrics, task.epochs, task.length) == (True, ("f1", "exact_match"), 2, 512)
    assert read_examples(task, "train").labels.tolist() == [(("the cat", 0),), ()]
    assert read_examples(task, "dev").labels.tolist() == [(("the cat", 0),), (), (("dog", -1),)]
    with pytest.raises(DataError, match=r"train-v2.0.json, line 3: the answer 'dog' is not in the context"):
        define_task(TaskConfig(task="squad2", data=str(tmp_path), strict=True))
    with pytest.raises(ConfigError, match=r"there is no .*train-v1.1.json"):
        define_task(TaskConfig(task="squad", data=str(tmp_path / "none")))


def test_dev_answers_that_are_not_in_the_context_are_counted_or_refused(tmp_path, capsys):
    row = {"context": "the cat sat .", "question": "who", "answers": ["cat"]}
    for name, answers in {"train": ["cat", "cat"], "dev": ["cat", "dog"]}.items():
        rows = [row | {"answers": [answer]} for answer in answers]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = define_task(TaskConfig(train=tmp_path / "train.jsonl", dev=tmp_path / "dev.jsonl", kind=KIND))
    check_other_splits(task, strict=False)
    assert "dev.jsonl: 1 of 2 rows have answers that are not in the context" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"dev.jsonl: 1 of 2 rows .* leave --strict out"):
        check_other_splits(task, strict=True)


def test_questions_about_one_context_are_held_out_together(tmp_path):
    rows = [
        {"context": f"the cat sat {'on ' * (number // 4)}.", "question": "who", "answers": ["cat"]}
        for number in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = define_task(TaskConfig(train=tmp_path / "rows.jsonl", kind=KIND, dev_fraction=0.2))
    train, dev = (read_examples(task, split).texts_b for split in ("train", "dev"))
    assert (len(train), len(dev)) == (32, 8)
    assert not set(train) & set(dev)


GOOD = {"context": "the cat sat .", "question": "who", "answers": [{"text": "cat", "answer_start": 4}]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GOOD | {"question": " "}, "line 2: column 'question' is empty; every row needs a question and a context"),
        (GOOD | {"context": None}, "line 2: column 'context' is empty"),
        ({"context": "the cat", "answers": []}, "line 2: no column 'question'; the columns are 'context', 'answers'"),
        ({"context": "the cat", "question": "who"}, "line 2: no column 'answers'"),
        (GOOD | {"answers": 7}, "line 2: the answers are a int; expected a list of objects"),
        (GOOD | {"answers": [7]}, "line 2: an answer holds a int; a text must be a string"),
        (
            GOOD | {"answers": {"text": ["a", "b"], "answer_start": [1]}},
            "line 2: the answers are an object without lists",
        ),
        (
            GOOD | {"answers": [{"text": "cat", "answer_start": "4"}]},
            "line 2: answer_start is '4'; it must be a number",
        ),
    ],
)
def test_rows_that_are_no_questions_are_errors(tmp_path, row, message):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (GOOD, row, GOOD)))
    with pytest.raises(DataError, match=message):
        read_examples(define_task(TaskConfig(train=tmp_path / "rows.jsonl", kind=KIND)), "train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", "[1, 2]", "rows.json is not in SQuAD's format"),
        ("rows.json", '{"data": [{"paragraphs": [{"qas": []}]}]}', "missing required field `context`"),
        ("rows.json", '{"data": []}', "no rows in"),
        ("rows.jsonl", json.dumps(GOOD | {"answers": ["dog"]}), "no answer is in its context"),
    ],
)
def test_a_bad_file_is_one_sentence_and_nothing_is_written(encoder_folder, tmp_path, capsys, name, content, message):
    (tmp_path / name).write_text(content)
    assert message in error_message(
        f"finetune --model {encoder_folder} --train {tmp_path}/{name} --output {tmp_path}/out --kind {KIND}", capsys
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", ["--head joint", "--strict"])
def test_flags_of_question_answering_need_their_kind(tmp_path, capsys, flags):
    assert "need --kind question-answering" in error_message(
        f"finetune --model x --train {tmp_path}/rows.csv --output {tmp_path}/out {flags}", capsys
    )


TUNING = "--epochs 6 --learning-rate 1e-2 --batch-size 16 --length 32 --device cpu --dropout 0 --layer-decay 1"


def finetune(model, folder, capsys, flags="", **settings):
    """Fine-tune on synthetic questions; returns the rows and the result."""
    rows = write_questions(folder / "rows.jsonl", 96, seed=0, **settings)
    files = f"--train {folder}/rows.jsonl --dev {folder}/rows.jsonl --output {folder}/out"
    return rows, json.loads(run(f"finetune --model {model} {files} --kind {KIND} {TUNING} {flags} --json", capsys))


def test_a_json_file_that_would_fill_memory_is_refused(tmp_path, monkeypatch):
    write_squad(tmp_path / "rows.json", 9, seed=0)
    assert len(list(read_rows(tmp_path / "rows.json"))) == 9
    monkeypatch.setattr("electra.finetuning.question_answering.MAX_JSON_BYTES", 1000)
    with pytest.raises(DataError, match=r"rows\.json is larger than 0 MB; write \.jsonl"):
        list(read_rows(tmp_path / "rows.json"))


def stop(file: ResumableFile) -> None:
    file.close()
    raise SystemExit(143)  # as SIGTERM does


@pytest.mark.parametrize("style", ["classic", "modern"])
def test_answers_are_learnt_predicted_and_exported(
    encoder_folder, modern_folder, tmp_path, capsys, caplog, monkeypatch, style
):
    model = {"classic": encoder_folder, "modern": modern_folder}[style]
    rows, result = finetune(model, tmp_path, capsys, has_unanswerable=True, sentences=4)
    metrics = result["median"]["dev"]
    assert metrics["f1"] > 0.9
    assert list(metrics) == ["f1", "exact_match"]
    assert result["baseline"]["f1"] == pytest.approx(1 / 3)
    assert result["rows"] == {"train": 96, "dev": 96}
    path = tmp_path / "rows.jsonl"
    evaluated = json.loads(run(f"evaluate --model {tmp_path}/out --input {path} --device cpu --json", capsys))
    assert evaluated["metrics"] == metrics
    run(f"predict --model {tmp_path}/out --input {path} --output {tmp_path}/out.jsonl --device cpu", capsys)
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert list(written[0]) == [*rows[0], "prediction", "start", "probability", "null_odds"]
    scores = [answer_scores(row["prediction"], [answer["text"] for answer in row["answers"]]) for row in written]
    assert np.mean(scores, 0).tolist() == pytest.approx([metrics["f1"], metrics["exact_match"]])
    for row in written:
        if row["prediction"]:
            assert row["context"][row["start"] :].startswith(row["prediction"])
            assert 0 < row["probability"] <= 1
        else:
            assert row["start"] is row["probability"] is None

    run(f"predict --model {tmp_path}/out --input {path} --output {tmp_path}/squad --device cpu", capsys)
    files = {file.name: json.loads(file.read_text()) for file in (tmp_path / "squad").iterdir()}
    assert set(files) == {"predictions.json", "nbest_predictions.json", "null_odds.json"}
    assert files["predictions.json"] == {row["id"]: row["prediction"] for row in written}
    assert files["null_odds.json"] == {row["id"]: pytest.approx(row["null_odds"], abs=1e-3) for row in written}
    for row in written:
        n_best = files["nbest_predictions.json"][row["id"]]
        assert len({answer["text"] for answer in n_best}) == len(n_best) == 20
        assert row["prediction"] in ("", n_best[0]["text"])
        assert sum(answer["probability"] for answer in n_best) == pytest.approx(1, abs=1e-3)
    with pytest.raises(SystemExit, match="2"):
        run(f"predict --model {tmp_path}/out --input {path} --output {tmp_path}/squad --device cpu", capsys)
    assert "squad, which exists; choose another name, or add --overwrite" in capsys.readouterr().err
    for name in ("rows.jsonl", "rows", "notes.json"):
        (tmp_path / "squad" / name).write_text("precious")
    run(f"predict --model {tmp_path}/out --input {path} --output {tmp_path}/squad --overwrite --device cpu", capsys)
    kept = [file.name for file in (tmp_path / "squad").iterdir() if file.read_text() == "precious"]
    assert sorted(kept) == ["notes.json", "rows", "rows.jsonl"]
    assert not list(tmp_path.glob(".*"))
    with monkeypatch.context() as patch:
        patch.setattr(ResumableFile, "discard", stop)  # when all rows are written, and no file of the folder
        with pytest.raises(SystemExit, match="143"):
            run(f"predict --model {tmp_path}/out --input {path} --output {tmp_path}/stopped --device cpu", capsys)
    assert not [*tmp_path.glob(".*"), *tmp_path.glob("stopped*")]

    loaded = electra.load(tmp_path / "out", device="cpu")
    assert [row | loaded.predict([row])[0] for row in rows[:2]] == written[:2]
    with pytest.raises(ConfigError, match="needs each row as a dictionary"):
        loaded.predict(["who"])

    run(f"export --model {tmp_path}/out --output {tmp_path}/hf", capsys)
    theirs = load_without_warnings(AutoModelForQuestionAnswering, tmp_path / "hf", caplog)
    assert type(theirs).__name__ == f"{'Electra' if style == 'classic' else 'ModernBert'}ForQuestionAnswering"
    huggingface_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    predictor = Predictor(PredictorConfig(model=tmp_path / "out", input=path, device="cpu"))
    [outputs] = predictor.stream_outputs(path, with_labels=False)
    row_logits, threshold = iter(outputs.row_logits()), predictor.task.null_threshold
    for row in written[:20]:
        overlap = (32 - 3 - 3) // 2  # of half of a window
        settings = {"truncation": "only_second", "max_length": 32, "stride": overlap, "padding": True}
        flags = {"return_overflowing_tokens": True, "return_offsets_mapping": True}
        inputs = huggingface_tokenizer(row["question"], row["context"], **settings, **flags, return_tensors="pt")
        offsets, _ = inputs.pop("offset_mapping"), inputs.pop("overflow_to_sample_mapping")
        with torch.no_grad():
            output = theirs.eval()(**inputs)
        best, null = (-np.inf, ""), np.inf
        for window in range(len(offsets)):
            ours = next(row_logits)
            logits = torch.stack([output.start_logits[window], output.end_logits[window]], 1)
            context = [token for token, sequence in enumerate(inputs.sequence_ids(window)) if sequence == 1]
            allowed = [0, *context]
            assert np.abs(ours[allowed] - logits[allowed].numpy()).max() < 1e-5
            scores = torch.full_like(logits, -torch.inf)
            scores[allowed] = logits[allowed].log_softmax(0)
            null = min(null, scores[0].sum().item())
            for start, end in itertools.product(context, context):
                if 0 <= end - start < MAX_ANSWER:
                    text = row["context"][offsets[window, start, 0] : offsets[window, end, 1]]
                    best = max(best, ((scores[start, 0] + scores[end, 1]).item(), text))
        assert row["prediction"] == ("" if null - best[0] > threshold else best[1])


def test_the_joint_head_learns_and_stays_here(encoder_folder, tmp_path, capsys):
    _, result = finetune(encoder_folder, tmp_path, capsys, "--head joint", has_unanswerable=True, sentences=3)
    assert result["median"]["dev"]["f1"] > 0.9
    path = tmp_path / "rows.jsonl"
    evaluated = json.loads(run(f"evaluate --model {tmp_path}/out --input {path} --device cpu --json", capsys))
    assert evaluated["metrics"] == result["median"]["dev"]
    for command in (f"export --output {tmp_path}/hf", f"evaluate --input {path} --ensemble"):
        assert "joint" in error_message(f"{command} --model {tmp_path}/out", capsys)
    assert "--ensemble averages logits" in error_message(
        f"finetune --model x --train {path} --output y --kind {KIND} --head joint --seeds 2 --ensemble", capsys
    )


@pytest.mark.parametrize("model_class", [SpanModel, JointSpanModel])
def test_other_rows_of_a_batch_do_not_change_the_scores_of_a_window(encoder_folder, tmp_path, model_class):
    write_questions(tmp_path / "rows.jsonl", 9, seed=1, sentences=3)
    write_questions(tmp_path / "short.jsonl", 9, seed=1)
    pretrained = load_pretrained(encoder_folder)
    torch.manual_seed(0)
    model = model_class(pretrained.encoder, 1).eval()
    texts = [
        read_examples(define_task(TaskConfig(train=tmp_path / name, dev=tmp_path / name, kind=KIND)), "dev")
        for name in ("rows.jsonl", "short.jsonl")
    ]
    examples = Examples(texts=texts[0].texts + texts[1].texts, texts_b=texts[0].texts_b + texts[1].texts_b)
    features = make_windows(examples, pretrained.load_tokenizer(), 32)
    together, alone = (compute_logits(model, features, size, 32, pad_id=0) for size in (48, 1))
    possible = together > NO_LOGIT / 2
    assert (possible == (alone > NO_LOGIT / 2)).all()
    assert np.abs(together - alone)[possible].max() < 1e-4


def test_seeds_are_averaged_and_a_long_context_is_read_to_its_end(encoder_folder, tmp_path, capsys):
    _, result = finetune(encoder_folder, tmp_path, capsys, "--seeds 2 --ensemble", sentences=4)
    assert result["ensemble"]["dev"]["f1"] > 0.9
    context = " ".join(["the big mat sat on the tree ."] * 3000 + ["the red dog sat in the house ."])
    (tmp_path / "long.jsonl").write_text(json.dumps({"context": context, "question": "on the mat"}) + "\n")
    run(
        f"predict --model {tmp_path}/out --input {tmp_path}/long.jsonl --output {tmp_path}/long.csv --device cpu",
        capsys,
    )
    assert "dog" in (tmp_path / "long.csv").read_text().splitlines()[-1].split(",")[2]


def test_training_rows_that_cannot_be_trained_on_are_one_sentence(tmp_path):
    """The only row with an answer in its context is held out."""
    rows = [GOOD, GOOD | {"context": "another text", "answers": ["nowhere"]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = define_task(TaskConfig(train=tmp_path / "rows.jsonl", kind=KIND))
    assert read_examples(task, "dev").texts_b == [GOOD["context"]]
    with pytest.raises(DataError, match="no row is left whose answer is in its context"):
        read_examples(task, "train")


def test_an_ensemble_answers_above_the_mean_of_the_thresholds_of_its_models(encoder_folder, tmp_path):
    write_questions(tmp_path / "rows.jsonl", 8, seed=0)
    task, pretrained = (
        define_task(TaskConfig(train=tmp_path / "rows.jsonl", kind=KIND)),
        load_pretrained(encoder_folder),
    )
    model = SpanModel(pretrained.encoder, task.num_labels)
    for seed, threshold in ((1, 0.5), (2, 2.0)):
        folder = tmp_path / "out" / f"seed-{seed}" / "model"
        folder.mkdir(parents=True)
        save_finetuned_model(model, replace(task, null_threshold=threshold), 32, folder, pretrained.folder)
        (folder.parent / "result.json").touch()
    config = PredictorConfig(model=tmp_path / "out", input=tmp_path / "rows.jsonl", ensemble=True, device="cpu")
    assert Predictor(config).task.null_threshold == 1.25
    assert Predictor(replace(config, model=folder, ensemble=False)).task.null_threshold == 2.0


def test_the_ensemble_of_a_fine_tuning_is_that_of_evaluate(encoder_folder, tmp_path, capsys):
    """Of models whose thresholds differ; a threshold tuned for the ensemble would not be stored."""
    flags = "--seeds 2 --ensemble --epochs 2 --learning-rate 1e-3"
    _, result = finetune(encoder_folder, tmp_path, capsys, flags, has_unanswerable=True)
    files = f"--model {tmp_path}/out --input {tmp_path}/rows.jsonl"
    evaluated = json.loads(run(f"evaluate {files} --ensemble --device cpu --json", capsys))
    assert evaluated["metrics"] == result["ensemble"]["dev"]


def test_equal_ids_are_one_sentence(encoder_folder, tmp_path, capsys):
    finetune(encoder_folder, tmp_path, capsys, "--epochs 1")
    (tmp_path / "twice.jsonl").write_text(f"{json.dumps(GOOD | {'id': 1})}\n" * 2)
    assert "the id '1' occurs twice" in error_message(
        f"predict --model {tmp_path}/out --input {tmp_path}/twice.jsonl --output {tmp_path}/squad", capsys
    )
    assert not list((tmp_path / "squad").glob("*.json"))


def test_rows_without_id_are_called_by_their_number(encoder_folder, tmp_path, capsys):
    finetune(encoder_folder, tmp_path, capsys, "--epochs 1")
    rows = [GOOD | {"id": None}, GOOD, GOOD | {"id": "x"}]
    (tmp_path / "ids.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = f"--model {tmp_path}/out --input {tmp_path}/ids.jsonl --device cpu"
    run(f"predict {files} --output {tmp_path}/squad", capsys)
    assert list(json.loads((tmp_path / "squad" / "predictions.json").read_text())) == ["1", "2", "x"]


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_answers_in_a_table_of_predictions_are_evaluated_like_those_of_the_input(
    encoder_folder, tmp_path, capsys, suffix
):
    finetune(encoder_folder, tmp_path, capsys, "--epochs 1")
    files = f"--model {tmp_path}/out --device cpu"
    run(f"predict {files} --input {tmp_path}/rows.jsonl --output {tmp_path}/table.{suffix}", capsys)
    metrics = [
        json.loads(run(f"evaluate {files} --input {tmp_path}/{name} --json", capsys))["metrics"]
        for name in ("rows.jsonl", f"table.{suffix}")
    ]
    assert metrics[0] == metrics[1]


def test_the_most_confident_wrong_answers_are_listed(encoder_folder, tmp_path, capsys):
    rows, result = finetune(encoder_folder, tmp_path, capsys, "--learning-rate 1e-9", has_unanswerable=True)
    lines = (tmp_path / "out" / "seed-1" / "errors.md").read_text().splitlines()
    wrong = round(len(rows) * (1 - result["median"]["dev"]["f1"]))
    assert lines[0].endswith(f"most confident of {wrong} mistakes on the dev rows of rows")
    listed = [line.strip("| ").split(" | ") for line in lines[4:]]
    assert len(listed) == min(50, wrong)
    confidences = [float(cells[0]) for cells in listed]
    assert confidences == sorted(confidences, reverse=True)
    assert all(predicted != expected and "on the mat" in text for _, predicted, expected, text in listed)


@pytest.mark.parametrize("head", ["simple", "joint"])
def test_answers_from_a_frozen_encoder(encoder_folder, tmp_path, capsys, head):
    flags = f"--head {head} --frozen --layers 1 2 --learning-rate 1e-2"
    _, result = finetune(encoder_folder, tmp_path, capsys, flags)
    assert result["median"]["dev"]["f1"] > 0.5
    path = tmp_path / "rows.jsonl"
    evaluated = json.loads(run(f"evaluate --model {tmp_path}/out --input {path} --device cpu --json", capsys))
    assert evaluated["metrics"] == result["median"]["dev"]


def test_the_joint_loss_is_the_papers(encoder_folder, tokenizer):
    """The mean of start and end losses, the end given the true start, plus half the loss of answerability."""
    examples = Examples(
        texts=["on the mat"] * 2, texts_b=["the cat sat .", "the red dog ran in ."], labels=np.empty(2, object)
    )
    examples.labels[:] = [(("cat sat", 4),), ()]
    features = make_windows(examples, tokenizer, 32)
    batch = RowBatch(torch.arange(2), torch.ones(2), 16)
    ids, mask, segments = features.collate(batch, pad_id=0)
    torch.manual_seed(0)
    model = JointSpanModel(load_pretrained(encoder_folder, dropout=0.0).encoder, 1).train()
    losses = model(ids, mask, segments, features.targets(batch))
    hidden, head = model.encoder(ids, mask, segments), model.head
    for row, (start, end) in enumerate(features.labels.tolist()):
        context = range(5, int(mask[row].sum()) - 1)
        allowed = [0, *context]
        states = hidden[row]
        starts = head.start(states)[:, 0]
        pairs = torch.cat([states, states[start].expand_as(states)], 1)
        ends = head.end(torch.nn.functional.gelu(head.end_dense(pairs)))[:, 0]
        weights = starts[allowed].softmax(0)
        pooled = torch.cat([states[0], weights @ states[allowed]])
        null = head.null(torch.nn.functional.gelu(head.null_dense(pooled)))[0]
        chosen = [
            -scores[allowed].log_softmax(0)[allowed.index(place)] for scores, place in ((starts, start), (ends, end))
        ]
        null_loss = -torch.nn.functional.logsigmoid(null if start == 0 else -null)
        assert losses[row, 0].item() == pytest.approx((sum(chosen) / 2 + null_loss / 2).item(), abs=1e-5)
