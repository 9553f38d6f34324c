"""Count in how many of a hundred sentences a model finds the replaced word (electra/replaced_words.jsonl)."""

import argparse
from dataclasses import asdict
from pathlib import Path

from electra.baselines import find_replaced_words
from electra.runfolder import dump_json
from electra.serving.inference import load_text_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="run, model folder or Hugging Face folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = find_replaced_words(load_text_model(arguments.model, "auto"))
    print(dump_json(asdict(result)) if arguments.json else result)


if __name__ == "__main__":
    main()
