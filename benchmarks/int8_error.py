"""How far the int8 file of an exported ONNX folder is from its fp32 file, on rows of text.

    electra export --model runs/x --to onnx --int8 --output onnx/x
    python benchmarks/int8_error.py --model onnx/x --input texts.txt [--rows 1000] [--length 128] [--json]

Each line of the file is a row. Prints the fraction of tokens whose hidden states have a cosine of at least 0.98.
"""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra.data.tokenizer import load_tokenizer
from electra.onnx.export import FOLDER, FP32, HIDDEN, INT8, open_session

MIN_COSINE = 0.98
BATCH_SIZE = 16


def build_inputs(encodings: list[Any], pad_id: int, names: set[str]) -> dict[str, NDArray]:
    """Padded inputs of the ONNX file."""
    width = max(len(encoding.ids) for encoding in encodings)
    input_ids = np.full((len(encodings), width), pad_id, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    for row, encoding in enumerate(encodings):
        input_ids[row, : len(encoding.ids)] = encoding.ids
        attention_mask[row, : len(encoding.ids)] = 1
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": np.zeros_like(input_ids)}
    return {name: value for name, value in inputs.items() if name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model)
    tokenizer.library.enable_truncation(arguments.length)
    sessions = [open_session(arguments.model / FOLDER / name, [HIDDEN]) for name in (FP32, INT8)]
    names = {each.name for each in sessions[0].get_inputs()}
    with arguments.input.open(encoding="utf-8") as file:
        texts = list(islice(filter(None, map(str.strip, file)), arguments.rows))
    cosines = []
    for start in range(0, len(texts), BATCH_SIZE):
        encodings = tokenizer.library.encode_batch(texts[start : start + BATCH_SIZE])
        inputs = build_inputs(encodings, tokenizer.vocabulary.pad_id, names)
        fp32, int8 = (session.run([HIDDEN], inputs)[0] for session in sessions)
        norms = np.linalg.norm(fp32, axis=-1) * np.linalg.norm(int8, axis=-1)
        cosines.append(((fp32 * int8).sum(-1) / norms)[inputs["attention_mask"] == 1])
    values = np.concatenate(cosines)
    report = {
        "rows": len(texts),
        "tokens": len(values),
        "fraction": float(np.mean(values >= MIN_COSINE)),
        "lowest": float(values.min()),
        "median": float(np.median(values)),
    }
    if arguments.json:
        print(json.dumps(report))
        return
    print(
        f"{report['rows']:,} rows, {report['tokens']:,} tokens: {report['fraction']:.2%} have a cosine of at least 0.98"
    )
    print(f"median {report['median']:.4f}, lowest {report['lowest']:.4f}")


if __name__ == "__main__":
    main()
