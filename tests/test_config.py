"""Nested configurations are read, built and changed by the flat names of their settings."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
from cyclopts import Parameter

from electra.config import PACKAGED_MODEL, build_config, convert_values, flat_defaults, flat_values, replace_settings
from electra.data.prepare import ShardConfig
from electra.errors import ConfigError
from electra.finetuning.config import ProbeConfig
from electra.pretraining.config import PretrainConfig
from electra.training.checkpoint import find_model_folder


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Annotated[str, Parameter(name="--optimizer")] = "adam"
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ConfigError("learning_rate must be above 0")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    data: Path
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: int = 0

    @classmethod
    def dependent_defaults(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return {"learning_rate": 0.5} if settings.get("optimizer") == "muon" else {}


def test_settings_of_nested_configs_have_flat_names():
    config = RunConfig(data=Path("x"), optimizer=OptimizerConfig(learning_rate=0.1))
    assert flat_values(config) == {"data": Path("x"), "optimizer": "adam", "learning_rate": 0.1, "seed": 0}
    assert flat_defaults(RunConfig) == {"optimizer": "adam", "learning_rate": 1e-3, "seed": 0}


def test_build_places_each_setting_in_its_nested_config():
    built = build_config(RunConfig, data=Path("x"), optimizer="adamw", seed=3)
    assert built == RunConfig(data=Path("x"), optimizer=OptimizerConfig(name="adamw"), seed=3)


def test_defaults_may_depend_on_given_settings_which_win_over_them():
    assert build_config(RunConfig, data=Path("x"), optimizer="muon").optimizer.learning_rate == 0.5
    assert build_config(RunConfig, data=Path("x"), optimizer="muon", learning_rate=0.1).optimizer.learning_rate == 0.1


def test_replaced_settings_are_checked_and_the_others_kept():
    config = build_config(RunConfig, data=Path("x"), optimizer="muon")
    assert replace_settings(config, seed=1) == build_config(RunConfig, data=Path("x"), optimizer="muon", seed=1)
    with pytest.raises(ConfigError, match="learning_rate must be above 0"):
        replace_settings(config, learning_rate=-1.0)


def test_unknown_and_missing_settings_are_named():
    with pytest.raises(ConfigError, match=r"unknown setting 'learning_rat'; did you mean learning_rate\?"):
        build_config(RunConfig, data=Path("x"), learning_rat=0.1)
    with pytest.raises(ConfigError, match="no value is given for data"):
        build_config(RunConfig)


@dataclass(frozen=True, kw_only=True)
class SlowConfig:
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    """Not a setting."""


def test_the_default_of_a_nested_config_gives_the_defaults_of_its_settings():
    assert flat_defaults(SlowConfig) == {"optimizer": "adam", "learning_rate": 1e-5}
    assert build_config(SlowConfig, optimizer="muon").optimizer == OptimizerConfig(name="muon", learning_rate=1e-5)


def test_values_are_converted_to_the_types_of_their_settings():
    built = build_config(RunConfig, data="x", learning_rate="1e-4", seed=2.0)
    assert (built.data, built.optimizer.learning_rate, built.seed) == (Path("x"), 1e-4, 2)
    for values, message in (
        ({"learning_rate": "fast"}, "learning_rate is 'fast'; it must be a number"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; it must be a finite number"),
        ({"seed": 2.5}, "seed is 2.5; it must be an integer"),
        ({"seed": True}, "seed is True; it must be an integer"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_config(RunConfig, data="x", **values)


def test_packaged_is_the_packaged_model_and_ambiguous_beside_another_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert convert_values(ShardConfig, {"tokenizer": "packaged"}) == {"tokenizer": PACKAGED_MODEL}
    assert convert_values(PretrainConfig, {"init": Path("packaged"), "output": "packaged"}) == {
        "init": PACKAGED_MODEL,
        "output": Path("packaged"),
    }
    models = convert_values(ProbeConfig, {"model": ("packaged", "runs/x")})["model"]
    assert models == (PACKAGED_MODEL, Path("runs/x"))
    assert find_model_folder(Path("packaged")) == PACKAGED_MODEL
    (tmp_path / "packaged").mkdir()
    with pytest.raises(ConfigError, match=r"'packaged' is ambiguous: the model in the package or .*; rename"):
        convert_values(ShardConfig, {"tokenizer": "packaged"})
    absolute = {"tokenizer": tmp_path / "packaged"}
    assert convert_values(ShardConfig, absolute) == absolute
