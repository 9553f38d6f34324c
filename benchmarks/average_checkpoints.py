"""Write a model folder with the mean of the weights of a run's last checkpoints.

    electra pretrain --data shards/ --output runs/x --minutes 15 --save-every 500 --keep-checkpoints 8
    python benchmarks/average_checkpoints.py --run runs/x --last 8 --output averaged
    electra probe --model runs/x averaged --data glue/ --output probe.jsonl

Checkpoints from before and after a phase with another width or number of layers cannot be averaged.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from electra.errors import DataError
from electra.model.electra import Electra
from electra.model.storage import load_model, save_model
from electra.runfolder import checkpoint_folders


def average_models(folders: Sequence[Path]) -> Electra:
    """The last of several models, with the mean of their weights."""
    models = [load_model(folder) for folder in folders]
    parameters = [dict(model.named_parameters()) for model in models]
    if any(model.config != models[-1].config for model in models):
        raise DataError(f"the models of {folders[0]} and {folders[-1]} have different configurations")
    with torch.no_grad():
        for name, parameter in parameters[-1].items():
            parameter.copy_(torch.stack([each[name].float() for each in parameters]).mean(dim=0))
    return models[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder of electra pretrain")
    parser.add_argument("--last", type=int, default=5, help="number of checkpoints (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="model folder to write")
    options = parser.parse_args(arguments)
    folders = checkpoint_folders(options.run)[-options.last :]
    if options.last < 1 or len(folders) < options.last:
        parser.error(f"--last is {options.last}; {options.run} has {len(checkpoint_folders(options.run))} checkpoints")
    save_model(average_models(folders), options.output, folders[-1])
    print(f"the mean of {', '.join(folder.name for folder in folders)} is in {options.output}")


if __name__ == "__main__":
    main()
