"""Embeddings: hidden states equal those of transformers, and files of every format give those of their texts."""

import csv
import gzip
import json
import os
import random

import numpy as np
import pyarrow.parquet
import pytest
import torch
from conftest import error_message
from transformers import AutoModel, AutoTokenizer

import electra
from electra.cli import main
from electra.errors import ConfigError
from electra.serving.embedder import Embedder

WORDS = ("the", "big", "small", "red", "cat", "dog", "bird", "sat", "on", "mat", "house", "tree", ".")


def make_texts(count: int) -> list[str]:
    generator = random.Random(0)
    return [" ".join(generator.choices(WORDS, k=generator.randint(0, 20))) for _ in range(count)]


TEXTS = make_texts(50)


def embed_file(folder, path, output, flags=""):
    main(f"embed --model {folder} --input {path} --output {output} --device cpu {flags}".split())


@pytest.fixture(params=["encoder_folder", "modern_folder"])
def folder(request):
    return request.getfixturevalue(request.param)


def test_hidden_states_of_all_layers_equal_those_of_transformers(folder, tmp_path):
    electra.export(model=folder, output=tmp_path / "hf", part="encoder")
    theirs = AutoModel.from_pretrained(tmp_path / "hf").eval()
    rows = AutoTokenizer.from_pretrained(tmp_path / "hf")(TEXTS[:4], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = theirs(**rows, output_hidden_states=True).hidden_states
        states = (
            electra.load(folder, device="cpu")
            .main_part()
            .encoder.hidden_states(rows["input_ids"], rows["attention_mask"].bool())
        )
    is_token = rows["attention_mask"].bool()
    for ours, other in zip(states, expected, strict=True):
        torch.testing.assert_close(ours[is_token], other[is_token], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "pool"), [("mean", lambda x: x.mean(0)), ("max", lambda x: x.amax(0)), ("cls", lambda x: x[0])]
)
def test_chosen_layers_are_pooled_over_all_tokens_but_padding_and_concatenated(folder, pooling, pool):
    model = electra.load(folder, device="cpu")
    vectors = model.embed(TEXTS, pooling=pooling, layers=(0, -1), batch_size=7)
    for text, vector in zip(TEXTS, vectors, strict=True):
        ids = torch.tensor([model.tokenizer.library.encode(text).ids])
        with torch.no_grad():
            states = model.main_part().encoder.hidden_states(ids)
        torch.testing.assert_close(vector, torch.cat([pool(states[0][0]), pool(states[-1][0])]), atol=1e-5, rtol=1e-5)


def test_masks_are_still_recognised_after_embedding(finished_run):
    model = electra.load(finished_run, device="cpu")
    model.embed("the [MASK] sat")
    assert len(model.fill("the [MASK] sat").masks) == 1


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.csv", "a.tsv", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("output", ["out.npy", "out.parquet"])
def test_row_i_of_the_output_is_the_embedding_of_text_i(encoder_folder, tmp_path, capsys, name, output):
    path = tmp_path / name
    rows = [{"id": str(number), "review": text} for number, text in enumerate(TEXTS)]
    if name.endswith((".csv", ".tsv")):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "review"], delimiter="," if name == "a.csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif name == "a.jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        content = "".join(f"{text}\n" for text in TEXTS).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    embed_file(encoder_folder, path, tmp_path / output, "--column review --layers -1 -2 --pooling max")
    assert "50 embeddings of 48 dimensions" in capsys.readouterr().out
    expected = electra.load(encoder_folder, device="cpu").embed(TEXTS, layers=(-1, -2), pooling="max")
    if output == "out.npy":
        vectors = np.load(tmp_path / output)
    else:
        table = pyarrow.parquet.read_table(tmp_path / output).to_pydict()
        assert table["review"] == TEXTS
        vectors = np.array(table["embedding"])
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert {file.name for file in tmp_path.iterdir()} == {name, output}


@pytest.mark.parametrize("output", ["out.npy", "out.parquet"])
def test_a_stopped_command_continues_after_its_last_chunk(encoder_folder, tmp_path, monkeypatch, output):
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    monkeypatch.setattr("electra.serving.embed.CHUNK_SIZE", 10)
    embed_file(encoder_folder, tmp_path / "a.txt", tmp_path / f"whole-{output}")
    monkeypatch.setattr("electra.resumable.SAVE_SECONDS", 0)
    embed, chunks, last = Embedder.embed, [], 4

    def embed_or_stop(embedder, texts):
        chunks.append(texts)
        if len(chunks) == last:
            raise KeyboardInterrupt
        return embed(embedder, texts)

    monkeypatch.setattr(Embedder, "embed", embed_or_stop)
    with pytest.raises(KeyboardInterrupt):
        embed_file(encoder_folder, tmp_path / "a.txt", tmp_path / output)
    assert not (tmp_path / output).exists()
    last = None
    embed_file(encoder_folder, tmp_path / "a.txt", tmp_path / output)
    assert chunks[4:] == [TEXTS[30:40], TEXTS[40:50]]
    assert (tmp_path / output).read_bytes() == (tmp_path / f"whole-{output}").read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"a.txt", output, f"whole-{output}"}


def test_the_encoder_of_a_fine_tuned_model_embeds(finetuned, tmp_path):
    embed_file(finetuned.output, finetuned.dev, tmp_path / "out.npy")
    assert np.load(tmp_path / "out.npy").shape == (60, 24)


@pytest.mark.parametrize(
    ("name", "content", "flags", "message"),
    [
        ("a.jsonl", '{"review": "a"}', "--output out.npy", "no column 'text'; the columns are 'review'; --column"),
        ("a.jsonl", '{"text": 1}', "--output out.npy", "line 1: column 'text' holds a int"),
        ("a.txt", "", "--output out.npy", "contains no text"),
        ("a.txt", "a", "--output out.csv", "must end in .npy, .parquet"),
        ("a.txt", "a", "--output nowhere/out.npy", "there is no folder nowhere"),
        ("a.txt", "a", "--output out.npy --layers 3", "--layers is 3; it must be numbers from 0 (the embeddings) to 2"),
        ("a.txt", "a", "--output out.npy --length 64", "32 positions"),
        ("a.pdf", "a", "--output out.npy", "files to embed end in .txt, .csv"),
        ("a.csv", "text\na", "", "is a table; --output"),
        ("a.csv", "embedding\na", "--column embedding --output out.parquet", "--column is embedding, the name of the"),
    ],
)  # fmt: skip
def test_what_cannot_be_embedded_is_one_sentence(
    encoder_folder, tmp_path, monkeypatch, capsys, name, content, flags, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(content)
    assert message in error_message(f"embed --model {encoder_folder} --input {name} --device cpu {flags}", capsys)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_an_unknown_pooling_is_an_error(encoder_folder):
    with pytest.raises(ConfigError, match="choose from cls, mean, max"):
        electra.load(encoder_folder, device="cpu").embed("a cat", pooling="sum")


def test_empty_lines_between_others_have_embeddings(encoder_folder, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("the cat\n\nthe dog\n\n")
    main(f"embed --model {encoder_folder} --input {tmp_path}/lines.txt --device cpu --json".split())
    vectors = [each["vector"] for each in json.loads(capsys.readouterr().out)["results"]]
    embed_file(encoder_folder, tmp_path / "lines.txt", tmp_path / "lines.npy")
    np.testing.assert_allclose(vectors, np.load(tmp_path / "lines.npy"), atol=1e-5)


def test_a_pipe_is_not_embedded_into_a_table_that_needs_its_texts_again(encoder_folder, tmp_path, capsys):
    os.mkfifo(tmp_path / "texts.txt")
    with pytest.raises(SystemExit):
        embed_file(encoder_folder, tmp_path / "texts.txt", tmp_path / "vectors.parquet")
    assert "a pipe, which is read twice" in capsys.readouterr().err
