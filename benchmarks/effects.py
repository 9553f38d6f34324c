"""Which settings of pre-training improve the probe: effects estimated from all finished runs of a study together.

    python benchmarks/effects.py --study benchmarks/study --minutes 3
    python benchmarks/effects.py --study benchmarks/study --product discriminator_lr_scale=2.0 batch_size=512
    python benchmarks/effects.py --study benchmarks/study --without discriminator_lr_scale=2.0 batch_size=512

Runs that differ in several settings, such as those of a Plackett-Burman design, estimate each effect from all runs. The
scores are explained by least squares, with a column for each setting and value that differ from the defaults in some
run; those that only occur together share one. With a normal prior of mean 0 and a standard deviation of --prior points
for each effect, fewer runs than settings suffice: what they cannot tell apart is divided among the settings.

An effect is the mean over the levels of the other settings. Two settings whose effects do not add up distort the
others: give them as --product, which adds a column, or leave the runs out that have both (--without). Do not rely on
an effect that changes much when you do.
"""

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra.config import flat_defaults
from electra.finetuning.probe_results import Estimate, estimate_mean_of_tasks, read_results, score_arrays
from electra.formatting import markdown_table
from electra.pretraining.config import PretrainConfig
from electra.pretraining.recipes import split_phase
from electra.runfolder import dump_json
from electra.studies.measures import PRETRAINING_SD, PROBE
from electra.studies.runs import MEASURES

SEED_AND_BUDGET = ("seed", "steps", "tokens", "minutes")
Scores = dict[str, NDArray]  # of one run, by task: [folds, seeds]


def changed_settings(settings: dict[str, Any], defaults: dict[str, Any]) -> set[str]:
    """The settings that differ from the defaults, as NAME=VALUE; those of phases are `phases.NAME=VALUE`."""
    changed = {
        f"{name}={value}"
        for name, value in settings.items()
        if name != "phases" and (value != defaults[name] if name in defaults else value)  # removed settings: off is 0
    }
    phases = [split_phase(phase) for phase in settings["phases"]]
    return changed | {f"phases.{name}={phase[name]}" for phase in phases for name in phase if name != "fraction"}


def build_columns(runs: list[set[str]], products: list[tuple[str, str]]) -> dict[str, NDArray]:
    """By label, 1 for the runs [R] that have a setting or both settings of a product; those that are equal are one."""
    values = {name: np.array([float(name in run) for run in runs]) for name in sorted(set().union(*runs))}
    values |= {f"{first} × {second}": values[first] * values[second] for first, second in products}
    labels = defaultdict(list)
    for label, column in values.items():
        labels[column.tobytes()].append(label)
    return {", ".join(same): values[same[0]] for same in labels.values() if values[same[0]].any()}


def estimate_effects(columns: dict[str, NDArray], scores: list[Scores], prior: float) -> dict[str, dict[str, Estimate]]:
    """By column, its effects on the mean and on each task. `prior` is the standard deviation of effects on the mean;
    those on tasks, and differences between pre-training seeds, are taken as independent and of equal size for all."""
    means = [estimate_mean_of_tasks(run.values()) for run in scores]
    noise = math.sqrt(PRETRAINING_SD**2 + np.mean([(each.error or 0.0) ** 2 for each in means]))
    matrix = np.column_stack([*columns.values(), np.ones(len(scores))])  # the last column: the mean of the defaults
    precision = matrix.T @ matrix / noise**2 + np.diag([*[prior**-2] * len(columns), 0.0])
    covariance = np.linalg.inv(precision)
    values = [[mean.mean, *(task.mean() for task in run.values())] for mean, run in zip(means, scores, strict=True)]
    solution = covariance @ matrix.T @ np.array(values) / noise**2
    of_mean = np.sqrt(np.diag(covariance))
    errors = of_mean[:, None] * [1.0, *[math.sqrt(len(scores[0]))] * len(scores[0])]
    return {
        label: {name: Estimate(float(value), float(error)) for name, value, error in zip(names, *rows, strict=True)}
        for names in [["mean", *scores[0]]]
        for label, *rows in zip(columns, solution, errors, strict=False)
    }


def check_occurs(words: list[str], changed: dict[str, set[str]]) -> None:
    known = set[str]().union(*changed.values())
    if unknown := sorted(set(words) - known):
        raise SystemExit(f"no run has {', '.join(unknown)}; choose from {', '.join(sorted(known))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, required=True, help="--output of electra study")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training of the runs")
    parser.add_argument("--objective", default="rtd", help="of the runs")
    parser.add_argument("--score", choices=("metric", "auc"), default="metric")
    parser.add_argument("--product", nargs=2, action="append", default=[], metavar="SETTING")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="SETTING", help="leave out runs that have all these"
    )
    parser.add_argument("--prior", type=float, default=1.0, help="standard deviation of effects, in points")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.prior <= 0:
        parser.error("--prior must be above 0")
    files = sorted((arguments.study / MEASURES).glob("*.json"))
    settings = {file.stem: json.loads(file.read_text(encoding="utf-8"))["settings"] for file in files}
    arrays = score_arrays(read_results(arguments.study / PROBE), arguments.score)
    num_tasks = max((len(scores) for scores in arrays.values()), default=0)
    names = [
        name
        for name, values in settings.items()
        if (values["minutes"], values["objective"]) == (arguments.minutes, arguments.objective)
        and len(arrays.get((name, "default"), {})) == num_tasks > 0
    ]
    if not names:
        raise SystemExit(f"no finished runs of {arguments.minutes:g} minutes in {arguments.study}")
    shortest = min(names, key=len)  # names list what differs from the defaults
    defaults = json.loads(dump_json(flat_defaults(PretrainConfig))) | settings[shortest]  # some are newer than records
    own = {name: {key: value for key, value in settings[name].items() if key not in SEED_AND_BUDGET} for name in names}
    changed = {name: changed_settings(own[name], defaults) for name in names}
    if arguments.without:
        check_occurs(arguments.without, changed)
        changed = {name: words for name, words in changed.items() if not words.issuperset(arguments.without)}
    check_occurs([word for words in arguments.product for word in words], changed)
    columns = build_columns(list(changed.values()), arguments.product)
    if not columns:
        raise SystemExit("these runs differ in no setting")
    effects = estimate_effects(columns, [arrays[name, "default"] for name in changed], arguments.prior / 100)
    if arguments.json:
        values = {name: {key: [each.mean, each.error] for key, each in row.items()} for name, row in effects.items()}
        print(json.dumps(values))
        return
    ordered = sorted(effects.items(), key=lambda item: -item[1]["mean"].mean)
    rows = [[label, *(each.format("+") for each in effect.values())] for label, effect in ordered]
    print(markdown_table([[f"effect on the probe ({arguments.score}), points", *next(iter(effects.values()))], *rows]))
    between = f"{100 * PRETRAINING_SD:.1f} points between pre-training seeds"
    print(
        f"\nFrom {len(changed)} runs, with a prior of {arguments.prior:g} points; errors include an assumed {between}."
    )


if __name__ == "__main__":
    main()
