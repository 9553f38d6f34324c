"""Dev scores of fine-tuned models in PyTorch and as ONNX files in fp32 and int8, on a CPU.

    electra glue --model hf/x --data glue/ --tasks glue-6 --seeds 2 --keep-models --output tuned/x
    python benchmarks/int8_scores.py --tuned tuned/x --data glue/ --tasks cola sst2 mrpc --output onnx/x [--json]

Without --keep-models there is one model for each task, that of the best seed. The models are exported to a folder of
--output each; a folder that is already there is evaluated again. A score of int8 differs from PyTorch's by the few rows
whose prediction changes, in either direction, so the mean over tasks and seeds says more than a single model.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

from electra.config import build_config
from electra.exporting.command import export
from electra.exporting.config import ExportConfig
from electra.finetuning.config import PredictorConfig, TaskConfig
from electra.finetuning.jobs import seed_model_folders
from electra.finetuning.kinds import define_task
from electra.finetuning.predict import Predictor, evaluate_predictor
from electra.onnx.runtime import OnnxPredictor


def evaluate_model(model: Path, folder: Path, dev: Path, metric: str) -> dict[str, float]:
    """100 × the metric of a model in PyTorch, fp32 and int8; its ONNX files are written into `folder` if missing."""
    if not folder.exists():
        export(ExportConfig(model=model, to="onnx", int8=True, output=folder))
    predictors = {
        "pytorch": Predictor(PredictorConfig(model=model, input=dev, device="cpu")),
        "fp32": OnnxPredictor(folder, int8=False),
        "int8": OnnxPredictor(folder, int8=True),
    }
    return {name: 100 * evaluate_predictor(it, dev).metrics[metric] for name, it in predictors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", type=Path, required=True, help="the --output of electra glue")
    parser.add_argument("--data", required=True, help="folder of GLUE")
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder for the ONNX files")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for name in arguments.tasks:
        task = define_task(build_config(TaskConfig, task=name, data=arguments.data))
        for model in seed_model_folders(arguments.tuned / name):
            seed = model.parent.name
            folder = arguments.output / name / seed
            scores = evaluate_model(model, folder, Path(task.splits["dev"]), task.metrics[0])
            results.append({"task": name, "seed": seed, "metric": task.metrics[0]} | scores)
            if not arguments.json:
                cells = "   ".join(f"{each} {score:.2f}" for each, score in scores.items())
                difference = scores["int8"] - scores["pytorch"]
                print(f"{name:<6}{seed:<8}{task.metrics[0]:<10}{cells}   int8 - pytorch {difference:+.2f}", flush=True)
    if arguments.json:
        print(json.dumps(results))
        return
    differences = [
        mean(row["int8"] - row["pytorch"] for row in results if row["task"] == name) for name in arguments.tasks
    ]
    print(f"mean over tasks: int8 - pytorch {mean(differences):+.2f}")


if __name__ == "__main__":
    main()
