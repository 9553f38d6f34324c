"""The commands, for the command line and as functions of the package.

A command is a config dataclass, whose fields are its flags, and a function that takes it. Its result prints well as
`str` and, with `--json`, as the JSON of its fields.
"""

import importlib
import inspect
import keyword
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from electra.config import OPENMP, all_defaults, build_config, settings_by_name, wait_settings


@dataclass(frozen=True)
class Command:
    """One command; its modules are imported when they are needed."""

    config: str  # "module:class"; the module should not import torch, so that a wrong flag is reported fast
    function: str  # "module:function"
    help: str
    runs_on_ranks: bool = False  # torchrun may start several processes of it
    writes_metrics: bool = False  # of a training; as a function it takes a callback for them

    def load_config_class(self) -> type:
        return import_object(self.config)

    def load_function(self) -> Callable[[Any], Any]:
        return import_object(self.function)


def import_object(reference: str) -> Any:
    """The object that "module:name" refers to; its module may import torch, which reads OpenMP's variables."""
    if not wait_settings():
        os.environ.update(OPENMP)
    module, name = reference.split(":")
    return getattr(importlib.import_module(f"electra.{module}"), name)


COMMANDS = {
    "demo": Command(
        "serving.config:DemoConfig",
        "demonstration:run_demo",
        "try the packaged model, then train it on text found here",
    ),
    "tokenizer": Command(
        "data.train_tokenizer:TokenizerConfig", "data.train_tokenizer:train_tokenizer", "train a WordPiece vocabulary"
    ),
    "shard": Command("data.prepare:ShardConfig", "data.prepare:shard", "tokenize text into shards"),
    "inspect": Command("data.inspect:InspectConfig", "data.inspect:inspect", "show statistics and rows of shards"),
    "pretrain": Command(
        "pretraining.config:PretrainConfig",
        "pretraining.command:pretrain",
        "pre-train a generator and a discriminator",
        runs_on_ranks=True,
        writes_metrics=True,
    ),
    "corrupt": Command(
        "pretraining.config:CorruptConfig",
        "pretraining.corrupt:write_corrupted_rows",
        "corrupt held-out rows once, to compare runs on",
    ),
    "finetune": Command(
        "finetuning.config:FinetuneConfig",
        "finetuning.command:finetune",
        "fine-tune an encoder on a task",
        writes_metrics=True,
    ),
    "glue": Command(
        "finetuning.config:GlueConfig", "finetuning.glue:glue", "fine-tune on all GLUE tasks", writes_metrics=True
    ),
    "probe": Command(
        "finetuning.config:ProbeConfig",
        "finetuning.probe:probe",
        "compare pre-trained models by cross-validation on GLUE's training rows",
    ),
    "evaluate": Command(
        "finetuning.config:EvaluateConfig", "finetuning.predict:evaluate", "evaluate a fine-tuned model on a file"
    ),
    "predict": Command(
        "finetuning.config:PredictConfig",
        "finetuning.predict:predict",
        "predict labels for a file with a fine-tuned model",
    ),
    "detect": Command("serving.config:DetectConfig", "serving.inference:detect", "mark the replaced tokens of a text"),
    "fill": Command("serving.config:FillConfig", "serving.inference:fill", "predict the [MASK] tokens of a text"),
    "embed": Command("serving.config:EmbedConfig", "serving.embed:embed", "compute embeddings of texts or of a file"),
    "serve": Command("serving.config:ServeConfig", "serving.server:serve", "answer HTTP requests with a model"),
    "doctor": Command(
        "diagnosis:DoctorConfig", "diagnosis:diagnose", "show the hardware in use and what features need"
    ),
    "completion": Command("cli:CompletionConfig", "cli:write_completion", "complete commands and flags in a shell"),
    "flops": Command(
        "reporting.config:FlopsConfig", "reporting.flops:count_flops", "count parameters and FLOPs of a model"
    ),
    "report": Command("reporting.config:ReportConfig", "reporting.tables:report", "compare runs in tables and plots"),
    "study": Command("studies.config:StudyConfig", "studies.command:study", "repeat one of the paper's studies"),
    "analyze": Command(
        "studies.config:AnalyzeConfig", "studies.analyze:analyze", "show what a discriminator has learnt"
    ),
    "export": Command(
        "exporting.config:ExportConfig",
        "exporting.command:export",
        "export a model to Hugging Face, to ONNX or as a page",
    ),
    "import": Command(
        "exporting.config:ImportConfig", "exporting.command:import_model", "import a model from Hugging Face"
    ),
}


def function_name(command: str) -> str:
    """The name of a command as a function of the package."""
    return "import_model" if command == "import" else command  # a keyword of Python


def argument_name(setting: str) -> str:
    """The name of a setting as an argument: `from_` where a flag is a keyword of Python."""
    return f"{setting}_" if keyword.iskeyword(setting) else setting


@cache
def make_command_function(name: str) -> Callable[..., Any]:
    """A command as a function of flat keyword arguments, named like its flags."""
    command = COMMANDS[name]
    config_class = command.load_config_class()
    names = {argument_name(setting): setting for setting in settings_by_name(config_class)}

    def function(**arguments: Any) -> Any:
        settings = {names.get(argument, argument): value for argument, value in arguments.items()}
        callback = settings.pop("callback", None) if command.writes_metrics else None
        if callback is not None and "workers" in settings_by_name(config_class):
            settings["workers"] = 1  # jobs in other processes cannot call it
        config: Any = build_config(config_class, **settings)
        run = command.load_function()
        if callback is None:
            return run(config)
        from electra.training.logging import call_with_metrics

        with call_with_metrics(callback):
            return run(config)

    function.__name__ = function.__qualname__ = function_name(name)
    function.__doc__ = f"{inspect.getdoc(config_class)}\n\nSettings:\n\n" + "\n".join(
        f"- `{argument_name(setting.name)}`: {setting.help}" for setting in settings_by_name(config_class).values()
    )
    # what help() and notebooks show; functions have this attribute only for `inspect`
    function.__signature__ = make_signature(config_class, command.writes_metrics)  # type: ignore[attr-defined]
    return function


def make_signature(config_class: type, has_callback: bool) -> inspect.Signature:
    """The signature that help() and notebooks show."""
    kind, defaults = inspect.Parameter.KEYWORD_ONLY, all_defaults(config_class, {})
    parameters = [
        inspect.Parameter(argument_name(name), kind, default=defaults.get(name, inspect.Parameter.empty))
        for name in settings_by_name(config_class)
    ]
    parameters += [inspect.Parameter("callback", kind, default=None)] if has_callback else []
    return inspect.Signature(parameters)
