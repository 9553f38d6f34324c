"""Dev scores of fine-tuned models in PyTorch and as ONNX files in fp32 and int8, on a CPU.

    electra glue --model hf/x --data glue/ --tasks cola sst2 mrpc --seeds 1 --output tuned/x
    python benchmarks/int8_scores.py --tuned tuned/x --data glue/ --tasks cola sst2 mrpc --output onnx/x [--json]

The models are exported to a folder of --output each; a folder that is already there is evaluated again.
"""

import argparse
import json
from pathlib import Path

from electra.config import build_config
from electra.exporting.command import export
from electra.exporting.config import ExportConfig
from electra.finetuning.config import PredictorConfig, TaskConfig
from electra.finetuning.kinds import define_task
from electra.finetuning.predict import Predictor, evaluate_predictor
from electra.onnx.runtime import OnnxPredictor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", type=Path, required=True, help="the --output of electra glue")
    parser.add_argument("--data", required=True, help="folder of GLUE")
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder for the ONNX files")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.tasks:
        model, folder = arguments.tuned / name, arguments.output / name
        task = define_task(build_config(TaskConfig, task=name, data=arguments.data))
        dev = Path(task.splits["dev"])
        if not folder.exists():
            export(ExportConfig(model=model, to="onnx", int8=True, output=folder))
        predictors = {
            "pytorch": Predictor(PredictorConfig(model=model, input=dev, device="cpu")),
            "fp32": OnnxPredictor(folder, int8=False),
            "int8": OnnxPredictor(folder, int8=True),
        }
        metric = task.metrics[0]
        scores = {each: evaluate_predictor(it, dev).metrics[metric] for each, it in predictors.items()}
        results[name] = {"metric": metric} | scores
        if not arguments.json:
            cells = "   ".join(f"{each} {100 * score:.2f}" for each, score in scores.items())
            difference = 100 * (scores["int8"] - scores["pytorch"])
            print(f"{name:<6}{metric:<10}{cells}   int8 - pytorch {difference:+.2f}", flush=True)
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
