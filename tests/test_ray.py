"""Shards and GLUE tables from a Ray cluster equal those of one process, also if a node is lost."""

import importlib.util
import socket
import sys

import pytest
from ray_nodes import run_and_kill_node
from synthetic import write_glue
from test_prepare import command, config, content, run_failing, text, write_random_words

from electra.config import build_config
from electra.data.prepare import shard
from electra.data.workers import call_on_node
from electra.errors import ConfigError
from electra.finetuning.config import GlueConfig
from electra.finetuning.glue import glue

assert text  # a fixture

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray")


def test_without_ray_an_error_names_the_package(text, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # an ImportError
    error = run_failing(capsys, *config(text).command_line().split()[1:], "--ray", "local")
    assert "--ray needs another library: pip install ray" in error
    assert not (text.parent / "shards").exists()


@needs_ray
def test_an_address_without_a_cluster_is_a_one_line_error(text, capsys):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        error = run_failing(capsys, *config(text).command_line().split()[1:], "--ray", address)
    assert f"--ray is {address}, where no Ray cluster can be reached (" in error
    assert not (text.parent / "shards").exists()


def test_ray_and_workers_exclude_each_other(text, capsys):
    assert "give --workers or --ray" in run_failing(capsys, *command(config(text)), "--ray", "local")


def test_a_node_with_another_version_is_refused():
    with pytest.raises(ConfigError, match=r"electra is 0.0.0 here and .* on a node"):
        call_on_node("0.0.0", len, [])


@needs_ray
@pytest.mark.slow
def test_shards_of_a_cluster_that_loses_a_node_have_the_bytes_of_a_plain_run(tmp_path):
    text = write_random_words(tmp_path, files=40, words=20_000)
    flags = config(text).command_line().split()[1:]
    result = run_and_kill_node(flags, tmp_path / "shards", "*.safetensors", count=4)
    assert (result["code"], result["was_running"]) == (0, True), result["errors"]
    shard(config(text, "plain"))
    assert content(tmp_path / "shards") == content(tmp_path / "plain")


@needs_ray
@pytest.mark.slow
def test_a_glue_table_of_a_cluster_that_loses_a_node_equals_that_of_one_process(encoder_folder, tmp_path):
    small = {"model": encoder_folder, "data": write_glue(tmp_path / "glue"), "device": "cpu", "seeds": 3, "epochs": 20}
    small |= {"batch_size": 8, "learning_rate": 3e-3, "length": 32}
    flags = [word for name, value in small.items() for word in ("--" + name.replace("_", "-"), str(value))]
    flags += ["--tasks", "cola", "rte", "--output", str(tmp_path / "ray")]
    result = run_and_kill_node(["glue", *flags], tmp_path / "ray", "*/seed-*/metrics.jsonl", count=2)
    assert (result["code"], result["was_running"]) == (0, True), result["errors"]
    plain = small | {"data": str(small["data"]), "tasks": ("cola", "rte"), "output": tmp_path / "plain"}
    glue(build_config(GlueConfig, **plain))
    assert (tmp_path / "ray/table.md").read_text() == (tmp_path / "plain/table.md").read_text()
