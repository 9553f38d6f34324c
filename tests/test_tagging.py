"""Tagging from files to predictions and exports: learnt, in windows, with a CRF, and the same in transformers."""

import itertools
import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import error_message, run
from synthetic import write_tags
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

import electra
from electra.cli import main
from electra.data.tokenizer import load_tokenizer
from electra.errors import ConfigError, DataError
from electra.finetuning.config import PredictorConfig, TaskConfig
from electra.finetuning.features import IGNORED, compute_logits
from electra.finetuning.kinds import define_task, read_examples, with_targets
from electra.finetuning.models import CRF, CrfTagModel, TagModel, best_path_logits
from electra.finetuning.predict import Predictor
from electra.finetuning.storage import load_finetuned_model, load_pretrained
from electra.finetuning.tags import decode_tags, make_tag_features, tag_loss
from electra.model.config import ElectraConfig, EncoderConfig
from electra.model.electra import Electra
from electra.model.storage import save_model

FLAGS = "--kind tags --epochs 6 --learning-rate 1e-2 --batch-size 16 --length 32 --dropout 0 --device cpu"


@pytest.fixture(scope="session")
def tagged(encoder_folder, tmp_path_factory):
    """A fine-tuned tagger and its file; do not change them."""
    folder = tmp_path_factory.mktemp("tagged")
    write_tags(folder / "rows.conll", 80, seed=0, max_sentences=6)
    files = f"--train {folder}/rows.conll --dev {folder}/rows.conll --output {folder}/out"
    main(f"finetune --model {encoder_folder} {files} {FLAGS}".split())
    return folder


@pytest.mark.parametrize("style", ["classic", "modern"])
def test_tags_are_learnt_predicted_and_exported(encoder_folder, modern_folder, tmp_path, capsys, style):
    model = {"classic": encoder_folder, "modern": modern_folder}[style]
    rows, path = write_tags(tmp_path / "rows.conll", 80, seed=0), tmp_path / "rows.conll"
    files = f"--train {path} --dev {path} --output {tmp_path}/out"
    result = json.loads(run(f"finetune --model {model} {files} {FLAGS} --json", capsys))
    metrics = result["median"]["dev"]
    assert metrics["entity_f1"] > 0.9
    assert result["rows"] == {"train": 80, "dev": 80}
    assert result["labels"] == ["O", "B-WHERE", "I-WHERE", "B-WHO", "I-WHO"]
    assert result["baseline"]["entity_f1"] == 0
    assert result["assessment"]["baseline"].startswith("Better than always predicting the most frequent tag")
    assert result["classes"]["WHO"]["entities"] == 80
    evaluated = json.loads(run(f"evaluate --model {tmp_path}/out --input {path} --device cpu --json", capsys))
    assert evaluated["metrics"] == pytest.approx(metrics)
    assert np.sum(evaluated["confusion_matrix"]) == sum(len(row["words"]) for row in rows)
    run(f"predict --model {tmp_path}/out --input {path} --output {tmp_path}/out.jsonl --device cpu", capsys)
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert list(written[0]) == ["1", "2", "3", "prediction", "probabilities", "entities"]
    correct = [a == b for row in written for a, b in zip(row["3"], row["prediction"], strict=True)]
    assert np.mean(correct) == pytest.approx(metrics["accuracy"])

    run(f"export --model {tmp_path}/out --output {tmp_path}/hf", capsys)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs, report = AutoModelForTokenClassification.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert "warn" not in capsys.readouterr().err.lower()
    assert not any(report.values()), report
    assert type(theirs).__name__ == f"{'Electra' if style == 'classic' else 'ModernBert'}ForTokenClassification"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    [outputs] = Predictor(PredictorConfig(model=tmp_path / "out", input=path, device="cpu")).stream_outputs(path, False)
    for row, logits in zip(rows[:20], outputs.row_logits(), strict=False):
        inputs = tokenizer(row["words"], is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            expected = theirs.eval()(**inputs).logits[0].numpy()
        assert np.abs(expected - logits).max() < 1e-5

    find = pipeline("ner", model=theirs, tokenizer=tokenizer, aggregation_strategy="first")
    for row in written[:20]:
        entities = [(entity["type"], entity["text"]) for entity in row["entities"]]
        assert [(entity["entity_group"], entity["word"]) for entity in find(" ".join(row["1"]))] == entities


def test_likelihood_and_best_path_of_the_crf_equal_brute_force():
    torch.manual_seed(0)
    rows, length, num_tags = 6, 7, 3
    crf = CRF(num_tags)
    for parameter in crf.parameters():
        torch.nn.init.normal_(parameter)
    emissions, is_word = torch.randn(rows, length, num_tags), torch.rand(rows, length) < 0.6
    is_word[:, 2] = True
    tags = torch.where(is_word, torch.randint(0, num_tags, (rows, length)), IGNORED)
    with torch.no_grad():
        losses = tag_loss(crf.conditional_logits(emissions, tags, is_word), tags)
        best = best_path_logits(emissions, is_word, crf.start, crf.transitions, crf.end)
        for row in range(rows):
            words = is_word[row].nonzero().flatten()

            def score(path, row=row, words=words):
                between = sum(crf.transitions[pair] for pair in itertools.pairwise(path))
                return crf.start[path[0]] + emissions[row, words, list(path)].sum() + between + crf.end[path[-1]]

            paths = list(itertools.product(range(num_tags), repeat=len(words)))
            scores = torch.stack([score(path) for path in paths])
            expected = scores.logsumexp(0) - score(tags[row, words].tolist())
            torch.testing.assert_close(losses[row], expected, rtol=1e-5, atol=1e-5)
            assert best[row, words].argmax(1).tolist() == list(paths[scores.argmax()])
            torch.testing.assert_close(best[row, words].amax(1), scores.max().expand(len(words)))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"train": Path("my.conll"), "crf": True}, "tags"),
        ({"train": Path("my.conllu.gz")}, "tags"),
        ({"train": Path("dev-v2.0.json"), "head": "joint"}, "question-answering"),
        ({"train": Path("rows.jsonl")}, None),
    ],
)
def test_names_of_files_that_have_one_kind_only_tell_it(settings, kind):
    assert TaskConfig(**settings).known_kind() == kind


def test_a_crf_is_learnt_and_transformers_has_no_class_for_it(encoder_folder, tmp_path, capsys):
    write_tags(tmp_path / "rows.conll", 60, seed=0, max_sentences=6)
    path = tmp_path / "rows.conll"
    files = f"--train {path} --dev {path} --output {tmp_path}/out --crf"
    result = json.loads(run(f"finetune --model {encoder_folder} {files} {FLAGS} --json", capsys))
    assert result["median"]["dev"]["entity_f1"] > 0.9
    evaluated = json.loads(run(f"evaluate --model {tmp_path}/out --input {path} --device cpu --json", capsys))
    assert evaluated["metrics"] == pytest.approx(result["median"]["dev"])
    model, _ = load_finetuned_model(tmp_path / "out/seed-1/model")
    assert isinstance(model, CrfTagModel)
    assert model.head.crf.transitions.abs().max() > 0.1
    [predicted] = electra.load(tmp_path / "out", device="cpu").predict([words := ["the", "big", "cat", "sat", "."]])
    assert list(predicted) == ["prediction", "entities"]  # scores of best paths are no probabilities
    assert len(predicted["prediction"]) == len(words)
    assert all(list(entity) == ["type", "start", "end", "text"] for entity in predicted["entities"])
    assert "a CRF, and transformers has no class for it; use --to onnx" in error_message(
        f"export --model {tmp_path}/out --output {tmp_path}/hf", capsys
    )
    assert not (tmp_path / "hf").exists()


def features_of(path, tokenizer, length, **settings):
    task = define_task(TaskConfig(train=path, dev=path, kind="tags", **settings))
    examples = with_targets(task, read_examples(task, "train"))
    return task, examples, make_tag_features(examples, tokenizer, length)


@pytest.mark.parametrize("model_class", [TagModel, CrfTagModel])
def test_other_rows_of_a_batch_do_not_change_the_logits_of_words(encoder_folder, tmp_path, model_class):
    write_tags(tmp_path / "rows.conll", 12, seed=1, max_sentences=3)
    pretrained = load_pretrained(encoder_folder)
    model = model_class(pretrained.encoder, 5).eval()
    *_, features = features_of(tmp_path / "rows.conll", pretrained.load_tokenizer(), 32)
    together, alone = (compute_logits(model, features, size, 32, pad_id=0)[features.words] for size in (48, 1))
    assert np.abs(together - alone).max() < 1e-5


@pytest.mark.parametrize("model_class", [TagModel, CrfTagModel])
def test_the_head_of_tags_has_no_dropout(encoder_folder, model_class):
    head = model_class(load_pretrained(encoder_folder, dropout=0.5).encoder, 3).train().head
    states = torch.ones(2, 24)
    assert torch.equal(head(states), head(states))


def test_no_word_of_a_long_sentence_is_lost(tagged, tmp_path, capsys):
    [row] = write_tags(tmp_path / "rows.conll", 1, seed=3)
    words = row["words"] * 40  # more than ten times as long as the model
    (tmp_path / "long.jsonl").write_text(json.dumps({"words": words}) + "\n" + json.dumps({"tokens": ["cat"]}) + "\n")
    files = f"--input {tmp_path}/long.jsonl --output {tmp_path}/out.jsonl"
    assert "truncated" not in run(f"predict --model {tagged}/out {files} --device cpu", capsys)
    long, short = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert [len(long[name]) for name in ("prediction", "probabilities")] == [len(words)] * 2
    assert np.mean([a == b for a, b in zip(long["prediction"], row["tags"] * 40, strict=True)]) > 0.9
    assert len(short["prediction"]) == 1


def test_all_words_of_windows_have_one_target_each(shards, tmp_path):
    [row] = write_tags(tmp_path / "rows.conll", 1, seed=3)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"words": row["words"] * 20, "tags": row["tags"] * 20}) + "\n")
    task, _, features = features_of(path, load_tokenizer(shards / "tokenizer"), 32)
    assert features.num_examples == 1
    assert len(features) > 5
    assert features.lengths.max() <= 32
    targets = features.labels[features.labels != IGNORED].tolist()
    assert [task.labels[target] for target in targets] == row["tags"] * 20
    ids = load_tokenizer(shards / "tokenizer").library.get_vocab()
    assert features.input_ids[features.words].tolist() == [ids[word] for word in row["words"] * 20]


PUNCTUATED = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "u", ".", "s", "##x", "-", "ran", "b"]


@pytest.fixture(scope="session")
def punctuated(tmp_path_factory):
    """A model folder whose tokenizer splits words at punctuation and into pieces."""
    folder = tmp_path_factory.mktemp("punctuated")
    (folder / "vocab.txt").write_text("\n".join(PUNCTUATED) + "\n")
    torch.manual_seed(0)
    size = EncoderConfig(
        layers=2, width=24, heads=3, feedforward=40, embedding_width=16, positions=32, vocab_size=13, init_std=0.2
    )
    save_model(Electra(ElectraConfig(generator=None, discriminator=size, sharing="none")), folder / "model", folder)
    return folder / "model"


def test_the_first_token_of_a_word_has_its_tag_and_words_of_transformers_continue_it(punctuated, tmp_path):
    path = tmp_path / "rows.conll"
    path.write_text("the O\nu.s. B-LOC\nsxx B-LOC\n\u200b I-LOC\nb-b O\n\nran O\n")
    tokenizer = load_tokenizer(punctuated)
    _, _, features = features_of(path, tokenizer, 32)
    tokens = [PUNCTUATED[token] for token in features.input_ids]
    assert tokens[:14] == ["[CLS]", "the", *"u.s.", "s", "##x", "##x", "[UNK]", *"b-b", "[SEP]"]
    x = IGNORED
    assert features.labels[0, :14].tolist() == [x, 0, 1, 2, 2, 2, 1, x, x, 2, 0, 0, 0, x]
    assert [tokens[word] for word in features.words] == ["the", "u", "s", "[UNK]", "b", "ran"]
    _, _, of_crf = features_of(path, tokenizer, 32, crf=True)
    assert of_crf.labels[0, :14].tolist() == [x, 0, 1, x, x, x, 1, x, x, 2, 0, x, x, x]


def test_pipelines_do_not_split_words_at_punctuation(punctuated, tmp_path, capsys):
    generator = random.Random(0)
    tags = {"the": "O", "u.s.": "B-LOC", "sxx": "B-PER", "b-bx": "I-PER", "ran": "O", "-": "O"}
    rows = [[generator.choice(list(tags)) for _ in range(6)] for _ in range(100)]
    path = tmp_path / "rows.conll"
    path.write_text("\n".join("".join(f"{word} {tags[word]}\n" for word in words) for words in rows))
    files = f"--train {path} --dev {path} --output {tmp_path}/out"
    run(f"finetune --model {punctuated} {files} {FLAGS.replace('6', '10', 1)}", capsys)
    run(f"export --model {tmp_path}/out --output {tmp_path}/hf", capsys)
    find = pipeline("ner", model=str(tmp_path / "hf"), aggregation_strategy="first")
    ours = electra.load(tmp_path / "out", device="cpu")
    for words, prediction in zip(rows[:30], ours.predict(rows[:30]), strict=True):
        text = " ".join(words)
        entities = [(entity["type"], entity["text"]) for entity in prediction["entities"]]
        found = [(entity["entity_group"], text[entity["start"] : entity["end"]]) for entity in find(text)]
        assert found == entities


def test_predictions_as_columns_keep_those_of_the_input(tagged, tmp_path, capsys):
    rows = write_tags(tmp_path / "new.conll", 5, seed=4)
    run(f"predict --model {tagged}/out --input {tmp_path}/new.conll --output {tmp_path}/out.conll --device cpu", capsys)
    sentences = [sentence.split("\n") for sentence in (tmp_path / "out.conll").read_text().strip().split("\n\n")]
    expected = (tmp_path / "new.conll").read_text().strip().split("\n\n")
    assert [[line.rsplit(" ", 1)[0] for line in lines] for lines in sentences] == [
        each.split("\n") for each in expected
    ]
    assert [[line.split()[3] for line in lines] for lines in sentences] == [row["tags"] for row in rows]
    (tmp_path / "words.txt").write_text("the\ncat\n\nthe\n")
    run(
        f"predict --model {tagged}/out --input {tmp_path}/words.txt --output {tmp_path}/words.conll --device cpu",
        capsys,
    )
    assert [line.count(" ") for line in (tmp_path / "words.conll").read_text().splitlines()] == [1, 1, 0, 1, 0]


def test_a_tagger_predicts_texts_lists_and_rows_in_python(tagged):
    words = ["the", "red", "cat", "sat", "on", "the", "mat", "."]
    loaded = electra.load(tagged / "out", device="cpu")
    predictions = loaded.predict([" ".join(words), words]) + loaded.predict([{"words": words}])
    assert predictions[0] == predictions[1] == predictions[2]
    who, where = predictions[0]["entities"]
    assert (who["type"], who["start"], who["end"], who["text"]) == ("WHO", 1, 3, "red cat")
    assert where["text"] == "mat"
    assert loaded.predict("cat")[0]["prediction"] == loaded.predict([["cat"]])[0]["prediction"]


def test_a_model_trained_on_columns_evaluates_tables_and_the_other_way_round(tagged, encoder_folder, tmp_path, capsys):
    rows = write_tags(tmp_path / "rows.conll", 20, seed=0)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [
        json.loads(run(f"evaluate --model {tagged}/out --input {file} --device cpu --json", capsys))["metrics"]
        for file in (tmp_path / "rows.conll", path)
    ]
    assert metrics[0] == metrics[1]
    task = define_task(TaskConfig(train=path, dev=tmp_path / "rows.conll", kind="tags"))
    two_columns = "\n".join("".join(map("{} {}\n".format, row["words"], row["tags"])) for row in rows)
    (tmp_path / "rows.conll").write_text(two_columns)
    train, dev = (read_examples(task, split) for split in ("train", "dev"))
    assert (train.texts, train.labels.tolist()) == (dev.texts, dev.labels.tolist())


@pytest.mark.parametrize(("name", "column", "metric"), [("ner", 3, "entity_f1"), ("pos", 1, "accuracy")])
def test_tasks_are_columns_of_conll_corpora(tmp_path, name, column, metric):
    lines = ["EU NNP I-NP I-ORG", "rejects VBZ I-VP O", "", "-DOCSTART- -X- O O", "", "Peter NNP I-NP I-PER", ""]
    (tmp_path / "conll2003").mkdir()
    for file in ("eng.train", "eng.testa", "eng.testb"):
        (tmp_path / "conll2003" / file).write_text("\n".join(lines))
    task = define_task(TaskConfig(task=name, data=str(tmp_path)))
    assert (task.metrics[0], list(task.splits)) == (metric, ["train", "dev", "test"])
    words = [line.split() for line in lines if line and not line.startswith("-DOCSTART-")]
    for split in task.splits:
        examples = read_examples(task, split)
        assert examples.texts == [word[0] for word in words]
        decoded = decode_tags(examples.labels, task)
        assert [tag for tags in decoded for tag in tags] == [word[column] for word in words]


def test_columns_are_found_in_the_training_file(tmp_path):
    write_tags(tmp_path / "rows.conll", 3, seed=0)
    task = define_task(TaskConfig(train=tmp_path / "rows.conll"))
    assert (task.kind, task.text, task.label) == ("tags", "1", "3")
    assert list(task.aliases) == ["words", "tokens", "FORM", "tags", "UPOS"]  # in order of preference
    task = define_task(TaskConfig(train=tmp_path / "rows.conll", text="3", label="1"))
    assert (task.text, task.label, task.scheme) == ("3", "1", None)
    with pytest.raises(ConfigError, match="--text and --label are 1; they must be different columns"):
        define_task(TaskConfig(train=tmp_path / "rows.conll", label="1"))
    with pytest.raises(DataError, match="no column '4'; the columns are '1', '2', '3'"):
        define_task(TaskConfig(train=tmp_path / "rows.conll", label="4"))
    (tmp_path / "words.conll").write_text("the\ncat\n")
    with pytest.raises(DataError, match="no column 'tags'; the columns are '1'"):
        define_task(TaskConfig(train=tmp_path / "words.conll"))


def test_conll_2000_has_no_dev_file(tmp_path):
    for file, count in (("train.txt", 20), ("test.txt", 5)):
        (tmp_path / file).write_text("Rockwell NNP B-NP\nsaid VBD B-VP\n\n" * count)
    task = define_task(TaskConfig(task="chunking", data=str(tmp_path)))
    assert [len(read_examples(task, split)) for split in ("train", "dev", "test")] == [18, 2, 5]
    assert (task.epochs, task.length) == (5, 256)
    with pytest.raises(DataError, match="no column '4'; the columns are '1', '2', '3'"):
        define_task(TaskConfig(task="ner", data=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"no eng.train or train.txt in .*; --data must be a folder with eng.train,"):
        define_task(TaskConfig(task="ner", data=str(tmp_path / "missing")))


def test_dev_tags_of_no_training_row_are_reported_once_before_training_and_listed_as_mistakes(
    encoder_folder, tmp_path, capsys
):
    (tmp_path / "train.txt").write_text("the DT\ncat NN\n\n" * 20)
    (tmp_path / "dev.txt").write_text("the DT\nthe DT\noh UH\n\n" * 2)
    tuning = FLAGS.removeprefix("--kind tags --epochs 6 ")
    command = f"finetune --model {encoder_folder} --task pos --data {tmp_path} --seeds 2 --workers 1 --epochs 1 "
    main(f"{command} {tuning} --output {tmp_path}/out --json".split())
    output, errors = capsys.readouterr()
    assert json.loads(output)["median"]["dev"]["accuracy"] <= 2 / 3
    assert errors.count("dev.txt: 2 of 6 labels are in no training row ('UH')") == 1
    assert "| (in no training row) | the the **oh** |" in (tmp_path / "out/seed-1/errors.md").read_text()
    (tmp_path / "dev.txt").write_text("the B-NP\nthe B-NP\noh DT\n\n" * 2)
    with pytest.raises(SystemExit, match="2"):
        main(f"{command} --output {tmp_path}/out-2".split())
    error = capsys.readouterr().err
    assert "dev.txt: 4 of 6 labels are in no training row ('B-NP'); is --label the right column?" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out-2").exists()


@pytest.mark.parametrize(
    ("task", "tags", "message"),
    [
        ("ner", ("O", "PER", "LOC"), "has tags such as 'LOC', 'PER'; tags of entities or chunks must be O, B-TYPE"),
        ("ner", ("B-PER", "X-FOO", "I"), "line 1: the tag of word 2 is 'X-FOO'; tags of entities must be O, B-TYPE"),
        ("chunking", ("NP", "VP", "O"), "has tags such as 'NP', 'VP'; tags of entities or chunks must be"),
        ("pos", ("B-PER", "I-PER", "O"), "has tags of entities, such as 'B-PER'; it must have parts of speech"),
    ],
)
def test_tasks_of_the_table_refuse_tags_of_another_kind(encoder_folder, tmp_path, capsys, task, tags, message):
    (tmp_path / "train.txt").write_text("".join(f"cat {tag} {tag} {tag}\n" for tag in tags) + "\n")
    with pytest.raises(SystemExit, match="2"):
        main(f"finetune --model {encoder_folder} --task {task} --data {tmp_path} --output {tmp_path}/out".split())
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


GOOD = {"words": ["the", "cat"], "tags": ["O", "B-WHO"]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"words": [], "tags": []}, "line 2: the sentence has no words"),
        ({"words": "", "tags": []}, "line 2: the sentence has no words"),
        ({"words": ["the", " "], "tags": ["O", "O"]}, "line 2: word 2 is empty"),
        ({"words": ["the", 7], "tags": ["O", "O"]}, "line 2: word 2 holds a int; a text must be a string"),
        ({"words": 7, "tags": ["O"]}, "line 2: column 'words' holds a int; it must be a list of words"),
        ({"words": ["the", "cat"], "tags": ["O"]}, "line 2: there are 2 words and 1 tags; each word needs one tag"),
        ({"words": ["the"], "tags": "O"}, "line 2: the tags are a str; they must be a list"),
        ({"words": ["the"], "tags": [None]}, "line 2: the tag of word 1 is empty"),
        ({"words": ["the"], "tags": ["WHO"]}, "line 2: the tag of word 1 is 'WHO'; tags of entities must be O, B-"),
        ({"words": ["the"]}, "line 2: no column 'tags'; the columns are 'words'"),
        ({"tags": ["O"]}, "line 2: no column 'words'; the columns are 'tags'"),
    ],
)
def test_rows_that_are_no_tagged_sentences_are_one_sentence_before_anything_is_written(
    encoder_folder, tmp_path, capsys, row, message
):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (GOOD, row, GOOD)))
    files = f"--train {tmp_path}/rows.jsonl --output {tmp_path}/out"
    with pytest.raises(SystemExit, match="2"):
        main(f"finetune --model {encoder_folder} {files} --kind tags".split())
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train rows.csv --crf", "--crf needs --kind tags"),
        ("--task mrpc --data glue --crf", "--crf needs --kind tags or a tagging --task (ner, chunking, pos)"),
        ("--task squad --data squad --crf", "--crf needs --kind tags"),
        ("--task ner --data conll --head joint", "--head and --strict need --kind question-answering or --task squad"),
        ("--train rows.conll --kind tags --text-b b", "--text-b cannot be combined with --kind tags"),
    ],
)
def test_flags_of_other_kinds_are_refused(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        main(f"finetune --model {tmp_path} --output {tmp_path}/out {flags}".split())
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_tag_that_the_training_file_lacks_is_reported_and_counts_as_an_error(tagged, tmp_path, capsys):
    (tmp_path / "new.conll").write_text("the X O\n\nthe X O\ncat X B-CAT\n")
    main(f"evaluate --model {tagged}/out --input {tmp_path}/new.conll --device cpu --json".split())
    output, errors = capsys.readouterr()
    assert "new.conll: 1 of 3 labels are in no training row ('B-CAT'); predictions for them count as errors" in errors
    assert json.loads(output)["metrics"]["recall"] == 0
    assert sum(map(sum, json.loads(output)["confusion_matrix"])) == 2
    assert "its name must end in .conll, .jsonl" in error_message(
        f"predict --model {tagged}/out --input {tmp_path}/new.conll --output {tmp_path}/out.csv", capsys
    )
    run(f"export --model {tagged}/out --output {tmp_path}/hf", capsys)
    with pytest.raises(DataError, match="ElectraForTokenClassification"):
        Predictor(PredictorConfig(model=tmp_path / "hf", input=tmp_path / "new.conll"))
