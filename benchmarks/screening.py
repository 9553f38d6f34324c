"""Which of eleven settings of pre-training improve the probe: a Plackett-Burman design of twelve runs.

    python benchmarks/screening.py --data shards --glue glue --minutes 3 --output study [--runs 0 1 2] [--overlap]
    python benchmarks/screening.py --minutes 3 --output study --summarize     # trains nothing

Each run changes about half of the settings together, so that every effect, the difference that a setting makes, is
estimated from all twelve runs: with 0.6 points between pre-training seeds its standard error is 0.35, where a
comparison of two runs has 0.85. The price: an effect is the mean over the levels of the other settings, and
interactions of two settings are spread over the effects of the others. Run 0 has the defaults; all suit --size small.

Effects are estimated by least squares with a normal prior of mean 0 and a standard deviation of --prior points, which
also allows fewer than twelve runs: what they cannot tell apart is divided among the settings.

The runs are those of `electra study compare` in --output: what is finished there is not run again, and --runs trains
some of them now.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra.config import build_config
from electra.finetuning.glue import markdown_table
from electra.finetuning.probe_results import Estimate, estimate_mean_of_tasks, read_results, score_arrays
from electra.pretraining.config import PretrainConfig
from electra.studies.measures import PRETRAINING_SD, PROBE

FACTORS = {
    "weight decay": "0.3",
    "generator": "4 layers of width 128",
    "learning rate": "twice the learning rate in the discriminator's own parameters",
    "warm-up": "500 steps",
    "corrective LM": "with a weight of 8: All-Tokens MLM's ratio of copying and predicting",
    "bag of words": "with a weight of 1",
    "Adam": "β2 0.98 and ε 1e-10 (embeddings, biases, norms)",
    "masks": "25 % of the tokens",
    "temperature": "samples at temperature 2 in the last 30 %",
    "batch": "twice as many rows, at √2 times the learning rate",
    "short rows": "64 tokens, and twice as many rows, in the first half",
}
FIRST_ROW = (1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0)  # of the design by Plackett and Burman; the others are rotations of it


def design() -> NDArray:
    """The levels [runs, factors], 1 for those of FACTORS; any two columns are orthogonal."""
    rotations = [np.roll(FIRST_ROW, shift) for shift in range(len(FACTORS))]
    return np.array([np.zeros(len(FACTORS), dtype=int), *rotations])


def pretraining_settings(levels: NDArray) -> list[str]:
    """The settings of electra pretrain for one row of the design, as KEY=VALUE."""
    chosen = {name for name, level in zip(FACTORS, levels, strict=True) if level}
    defaults = build_config(PretrainConfig, data="shards", output="run", steps=1)
    batch_size = defaults.loader.batch_size * (2 if "batch" in chosen else 1)
    settings = {
        "weight decay": ["weight_decay=0.3"],
        "generator": ["generator_layers=4", "generator_width=128"],
        "learning rate": ["discriminator_lr_scale=2"],
        "warm-up": ["warmup=500"],
        "corrective LM": ["corrective_lm_weight=8"],
        "bag of words": ["bag_of_words_weight=1"],
        "Adam": ["beta2=0.98", "epsilon=1e-10"],
        "masks": ["mask_fraction=0.25"],
        "batch": [f"batch_size={batch_size}", f"learning_rate={math.sqrt(2) * defaults.optimizer.learning_rate:.4g}"],
    }
    words = [word for name in FACTORS if name in chosen for word in settings.get(name, [])]
    return words + [f"phases={phase}" for phase in phases(chosen, batch_size)]


def phases(chosen: set[str], batch_size: int) -> list[str]:
    """The phases of a run, none if it has only one."""
    merged: list[tuple[float, str]] = []
    for begin, end in ((0.0, 0.5), (0.5, 0.7), (0.7, 1.0)):
        values = ""
        if "short rows" in chosen and begin < 0.5:
            values += f",length=64,batch-size={2 * batch_size}"
        if "temperature" in chosen and begin >= 0.7:
            values += ",temperature=2"
        fraction = end - begin
        if merged and merged[-1][1] == values:
            fraction += merged.pop()[0]
        merged.append((fraction, values))
    return [f"fraction={fraction:.1f}{values}" for fraction, values in merged] if len(merged) > 1 else []


def run_study(runs: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Train and probe runs of the design by electra study compare; its result as JSON."""
    rows = design()
    settings = [word for run in runs for word in (f"run-{run}", *pretraining_settings(rows[run]))]
    command = [sys.executable, "-m", "electra", "study", "compare", "--settings", *settings, "--json"]
    command += ["--output", arguments.output]
    command += ["--data", arguments.data] if arguments.data else []
    command += ["--glue", arguments.glue] if arguments.glue else []
    command += ["--minutes", arguments.minutes] if arguments.steps is None else ["--steps", arguments.steps]
    command += ["--pretraining", *arguments.pretraining] if arguments.pretraining else []
    command += ["--probe-rows", arguments.probe_rows] if arguments.probe_rows else []
    command += ["--overlap"] if arguments.overlap else []
    command += ["--summarize"] if arguments.summarize else []
    process = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False)
    result = json.loads(process.stdout)
    if process.returncode:
        raise SystemExit(f"electra study failed: {result.get('error') or result['failed']}")
    return result


def estimate_effects(levels: NDArray, scores: list[dict[str, NDArray]], prior: float) -> dict[str, dict[str, Estimate]]:
    """By factor, the effects on the mean and on each task, of `levels` [runs, factors] and the scores [folds, seeds]
    of the runs by task. `prior` is the standard deviation of effects on the mean; those on tasks, and differences
    between pre-training seeds, are taken as independent and of equal size for all tasks."""
    means = [estimate_mean_of_tasks(run.values()) for run in scores]
    noise = math.sqrt(PRETRAINING_SD**2 + np.mean([(each.error or 0.0) ** 2 for each in means]))
    matrix = np.column_stack([levels, np.ones(len(levels))])  # the last column: the mean without any setting
    precision = matrix.T @ matrix / noise**2 + np.diag([*[prior**-2] * len(FACTORS), 0.0])
    covariance = np.linalg.inv(precision)
    values = np.array(
        [[mean.mean, *(task.mean() for task in run.values())] for mean, run in zip(means, scores, strict=True)]
    )
    solution = covariance @ matrix.T @ values / noise**2
    errors = np.sqrt(np.diag(covariance))[:, None] * [1.0, *[math.sqrt(len(scores[0]))] * len(scores[0])]
    return {
        factor: {
            name: Estimate(*map(float, pair)) for name, *pair in zip(["mean", *scores[0]], effects, error, strict=True)
        }
        for factor, effects, error in zip(FACTORS, solution, errors, strict=False)
    }


def main() -> None:
    all_runs = list(range(len(design())))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of shards")
    parser.add_argument("--glue", help="folder of GLUE")
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs, as of electra study")
    parser.add_argument("--minutes", type=float, default=3.0, help="of training, for each run")
    parser.add_argument("--steps", type=int, help="instead of --minutes")
    parser.add_argument("--runs", type=int, nargs="+", choices=all_runs, default=all_runs, metavar="RUN")
    parser.add_argument("--pretraining", nargs="+", help="settings of electra pretrain for all runs, as KEY=VALUE")
    parser.add_argument("--probe-rows", type=int, help="use at most this many rows of each task, for a trial")
    parser.add_argument("--overlap", action="store_true", help="compile each run while the one before it is trained")
    parser.add_argument("--prior", type=float, default=1.0, help="standard deviation of effects, in points")
    parser.add_argument("--summarize", action="store_true", help="train nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.summarize:
        if arguments.data is None or arguments.glue is None:
            parser.error("training needs --data and --glue; --summarize needs neither")
        run_study(arguments.runs, arguments)
    arguments.summarize = True
    names = {setting["label"]: setting["runs"][0] for setting in run_study(all_runs, arguments)["settings"]}
    results = [result for result in read_results(arguments.output / PROBE) if result.model in names.values()]
    arrays, tasks = score_arrays(results, "metric"), {result.task for result in results}
    scores = {run: arrays.get((names.get(f"run-{run}", ""), "default"), {}) for run in all_runs}
    finished = [run for run in all_runs if tasks and scores[run].keys() == tasks]
    if len(finished) < 2:
        raise SystemExit("no effects yet: fewer than two runs are finished")
    effects = estimate_effects(design()[finished], [scores[run] for run in finished], arguments.prior / 100)
    if arguments.json:
        values = {name: {key: [each.mean, each.error] for key, each in row.items()} for name, row in effects.items()}
        print(json.dumps(values))
        return
    rows = [
        [f"{name}: {FACTORS[name]}", *(each.format("+") for each in effect.values())]
        for name, effect in sorted(effects.items(), key=lambda item: -item[1]["mean"].mean)
    ]
    print(markdown_table([["effect on the probe, points", *next(iter(effects.values()))], *rows]))
    between = f"{100 * PRETRAINING_SD:.1f} points between pre-training seeds"
    listed = f"{len(finished)} of {len(all_runs)} runs"
    print(f"\nFrom {listed}, with a prior of {arguments.prior:g} points; errors include an assumed {between}.")


if __name__ == "__main__":
    main()
