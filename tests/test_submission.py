"""Submission: the zip GLUE's site takes, file by file."""

import zipfile

import numpy as np
import pytest

from electra.errors import ConfigError
from electra.finetuning.submission import ENTRIES, missing_files, write_submission
from electra.finetuning.tasks import GLUE_TASKS


def read(path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_entailment_is_spelled_out_and_other_classes_are_numbers(tmp_path):
    write_submission(tmp_path / "a.zip", {"rte": [1, 0], "mnli_mismatched": np.array([2, 0, 1]), "cola": [1]})
    assert read(tmp_path / "a.zip") == {
        "RTE.tsv": "index\tprediction\n0\tnot_entailment\n1\tentailment\n",
        "MNLI-mm.tsv": "index\tprediction\n0\tcontradiction\n1\tentailment\n2\tneutral\n",
        "CoLA.tsv": "index\tprediction\n0\t1\n",
    }


def test_scores_stay_between_0_and_5_with_3_decimals(tmp_path):
    write_submission(tmp_path / "a.zip", {"stsb": np.array([-0.2, 2.34567, 5.5], np.float32)})
    assert read(tmp_path / "a.zip") == {"STS-B.tsv": "index\tprediction\n0\t0.000\n1\t2.346\n2\t5.000\n"}


def test_all_files_are_those_the_site_asks_for(tmp_path):
    predictions = {name: [0] for name in ENTRIES}
    write_submission(tmp_path / "a.zip", predictions)
    names = "CoLA SST-2 MRPC STS-B QQP MNLI-m MNLI-mm QNLI RTE WNLI AX"
    assert list(read(tmp_path / "a.zip")) == [f"{name}.tsv" for name in names.split()]
    assert missing_files(predictions) == []
    assert missing_files({name: [0] for name in GLUE_TASKS}) == ["MNLI-mm.tsv"]


def test_the_time_of_writing_is_not_in_the_bytes(tmp_path):
    write_submission(tmp_path / "a.zip", {"sst2": [0, 1]})
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert [file.date_time for file in archive.infolist()] == [(1980, 1, 1, 0, 0, 0)]


def test_an_unknown_task_is_named_and_nothing_is_written(tmp_path):
    with pytest.raises(
        ConfigError, match=r"GLUE has no file for squad; it has them for cola, sst2, .* mnli_mismatched"
    ):
        write_submission(tmp_path / "a.zip", {"squad": [0]})
    assert not (tmp_path / "a.zip").exists()
