"""The GLUE-6 score of an entry of docs/race.md: of runs that differ in their seed alone, from their exported folders.

    electra pretrain --data shards/ --minutes 15 --seed 0 --output runs/0        # and with seeds 1 and 2
    python benchmarks/race.py --runs runs/0 runs/1 runs/2 --data glue/ --output entry/

Each run is exported to Hugging Face's format and fine-tuned by `electra glue` at the settings of rule 4. The same
command continues after an interruption. The dev sets are used once per entry: choose settings by `electra probe`.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import electra
from electra.errors import ConfigError, DataError
from electra.finetuning.glue import GLUE_6, GlueTable
from electra.finetuning.storage import checksum_of_weights
from electra.finetuning.tasks import get_glue_task
from electra.formatting import markdown_table
from electra.pretraining.config import CHANGEABLE_ON_RESUME, read_run_record
from electra.reporting.runs import read_run
from electra.runfolder import check_same_settings, describe_changed_settings, read_json, write_json
from electra.training.checkpoint import find_model_folder

MEAN = "GLUE-6"
SOURCE = "source.json"  # what was exported


def check_entry(options: argparse.Namespace) -> None:
    """Raise, before anything is written, if the runs are no entry or GLUE's files are missing."""
    first, *others = [read_run_record(run).pretraining for run in options.runs]
    for run, settings in zip(options.runs[1:], others, strict=True):
        if changes := describe_changed_settings(first, settings, CHANGEABLE_ON_RESUME | {"seed"}):
            raise ConfigError(f"{options.runs[0]} and {run} differ in more than their seed: {'; '.join(changes)}")
    if len({run.name for run in options.runs}) < len(options.runs):
        raise ConfigError("--runs must have different folder names, by which their results are stored")
    for run in options.runs:
        if (unfinished := read_run(run, glue_table=None).unfinished) is not None:
            raise ConfigError(f"{run} is not finished: {unfinished}")
    for task in GLUE_6:
        get_glue_task(task, options.data)


def score_run(run: Path, options: argparse.Namespace) -> GlueTable:
    """Export a run, unless it is exported, and fine-tune it on GLUE-6."""
    folder = options.output / run.name
    exported, source = folder / "huggingface", {"weights": checksum_of_weights(find_model_folder(run))}
    if exported.exists():
        check_same_settings(folder, read_json(folder / SOURCE), source, advice="choose another --output")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SOURCE, source)
        electra.export(model=run, output=exported)
    return electra.glue(
        model=exported,
        data=options.data,
        output=folder / "glue",
        tasks=["glue-6"],
        seeds=options.seeds,
        large_seeds=options.large_seeds,
        workers=options.workers,
        device=options.device,
    )


@dataclass(frozen=True)
class ScoredRun:
    """A run with its cost and its scores on the dev sets, in percent."""

    run: str
    commit: str
    minutes: float
    steps: int
    tokens: int
    metrics: dict[str, float]  # held out, at the end
    scores: dict[str, float]  # by task, and their mean

    @property
    def cells(self) -> list[str]:
        costs = [f"{self.minutes:.2f}", f"{self.steps:,}", f"{self.tokens:,}"]
        return [self.run, self.commit, *costs, *(f"{score:.2f}" for score in self.scores.values())]


def build_scored_run(folder: Path, table: GlueTable) -> ScoredRun:
    """The medians of a GLUE table, with the cost of the run that was fine-tuned."""
    run, commit = read_run(folder, glue_table=None), read_run_record(folder).environment.get("commit", "")
    medians = {row.task: row.median for row in table.rows if row.task in GLUE_6}
    scores = medians | {MEAN: statistics.mean(medians.values())}
    return ScoredRun(str(folder), commit[:7], run.minutes, run.steps, run.tokens, run.final_metrics, scores)


def format_entry(runs: list[ScoredRun]) -> str:
    """A table with a row for each run, and one for their mean and the standard deviation between them."""
    rows = [["run", "commit", "minutes", "steps", "tokens", *runs[0].scores], *(run.cells for run in runs)]
    if len(runs) > 1:
        columns = [[run.scores[name] for run in runs] for name in runs[0].scores]
        spread = [f"{statistics.mean(column):.2f} ± {statistics.stdev(column):.2f}" for column in columns]
        rows.append(["mean ± standard deviation", "", "", "", "", *spread])
    return markdown_table(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="run folders of electra pretrain")
    parser.add_argument("--data", required=True, help="GLUE's official download")
    parser.add_argument("--output", type=Path, required=True, help="folder for exported models and fine-tunings")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of fine-tuning (default: %(default)s)")
    parser.add_argument("--large-seeds", type=int, default=2, help="for SST-2 and QNLI (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="fine-tuning runs in parallel; default as in electra glue")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        check_entry(options)
        runs = [build_scored_run(run, score_run(run, options)) for run in options.runs]
    except (ConfigError, DataError) as error:
        parser.error(str(error))
    print(json.dumps([asdict(run) for run in runs]) if options.json else format_entry(runs))


if __name__ == "__main__":
    main()
