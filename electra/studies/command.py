"""`electra study`: train the runs of a study, measure them, and write its table, figure and verdicts."""

from electra.data.shards import Shards, open_shards
from electra.errors import DataError, TrainingError
from electra.runfolder import lock_folder
from electra.signals import explain_stop
from electra.studies.config import OutputRecord, StudyConfig
from electra.studies.measures import check_probe, finetunings_per_run, measure_runs, read_measures
from electra.studies.results import StudyResult, check_study_folder, summarize_study, write_study
from electra.studies.runs import StudyEstimate, StudyRun, estimate_study, plan_runs, train_runs
from electra.studies.studies import Study, find_study
from electra.training.hardware import choose_device


def study(config: StudyConfig) -> StudyResult | StudyEstimate:
    """Train and measure what is not finished, and summarize the study; a dry run returns an estimate instead."""
    study = find_study(config)
    runs = plan_runs(study, config)
    check_study_folder(config.output / config.name)
    if config.data is None:
        return summarize(config, study, runs, {})
    shards = open_shards(config.data)
    text = {"text in --data": shards.index.totals_by_split("tokens")}
    record = OutputRecord("study", text | {"tokenizer of --data": shards.tokenizer.fingerprint})
    record.check(config.output)
    if config.summarize:
        return summarize(config, study, runs, {})
    check_probe(runs, config)
    if config.dry_run:
        return estimate_study(runs, shards, finetunings_per_run(config))
    with lock_folder(config.output), explain_stop(lambda: "the same command continues the study"):
        record.write(config.output)
        return summarize(config, study, runs, train_and_measure(runs, shards, config))


def train_and_measure(runs: list[StudyRun], shards: Shards, config: StudyConfig) -> dict[str, str]:
    """Train the runs, and measure each when it ends or, if several use the GPUs at the same time, all of them at the
    end; returns errors by name."""
    failed, on_gpu = {}, choose_device(config.device).type == "cuda"
    one_by_one = not (on_gpu and (config.parallel or config.overlap))
    measure_finished(runs, config)  # those of an interrupted command, before others as without a break
    for run, error in train_runs(runs, shards, config):
        if error is not None:
            failed[run.name] = error
        elif one_by_one:
            measure_finished([run], config)
    # once more: what failed, and runs that ended before there was a generator to corrupt rows for all of them
    return failed | measure_finished(runs, config)


def measure_finished(runs: list[StudyRun], config: StudyConfig) -> dict[str, str]:
    """Compute missing measures of those runs that are finished; returns errors by name."""
    finished = [run for run in runs if run.is_finished()]
    try:
        return measure_runs(finished, config) if finished else {}
    except TrainingError as error:  # the process that measures was killed
        return dict.fromkeys((run.name for run in finished), str(error))


def summarize(config: StudyConfig, study: Study, runs: list[StudyRun], failed: dict[str, str]) -> StudyResult:
    """Write the tables and figures of the finished runs."""
    measured = read_measures(runs, config)
    if not measured:
        reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise DataError(
            f"no run of the study {config.name} with these settings is finished in {config.output}"
            f"{'; ' * bool(reasons)}{reasons}"
        )
    finished = {each.run.name for each in measured}
    missing = [run.name for run in runs if run.name not in finished]
    return write_study(
        summarize_study(config.name, study, measured, missing, failed), study, config.output / config.name
    )
