"""Evaluate counts of bigrams (electra/baselines.py) on the held-out rows and unigram samples of
`unigram_rtd_auc`, and as predictions of masked tokens; the best of several smoothing weights is reported: an upper
bound for this baseline."""

import argparse
import json
from pathlib import Path

import numpy as np

from electra.baselines import bigram_auc, bigram_mlm_loss, count_bigrams, evaluation_batches, evaluation_samples
from electra.data.shards import open_shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of shards")
    parser.add_argument("--length", type=int, default=128, help="tokens per row, as in the run to compare with")
    parser.add_argument("--rows", type=int, default=512, help="held-out rows, as --evaluation-rows of the run")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    shards = open_shards(arguments.data)
    counts = count_bigrams(shards)
    samples = evaluation_samples(shards, evaluation_batches(shards, arguments.length, arguments.rows))
    auc, smoothing = bigram_auc(counts, samples)
    loss = bigram_mlm_loss(counts, samples, shards.tokenizer.vocabulary.mask_id)
    frequencies = counts.token_counts / counts.token_counts.sum()
    entropy = -(frequencies * np.log(frequencies.clip(min=1e-12))).sum()
    tokens = int(counts.token_counts.sum())
    result = {"bigram_auc": auc, "smoothing": smoothing, "bigram_mlm_loss": loss}
    result |= {"unigram_entropy": entropy, "tokens": tokens}
    print(
        json.dumps(result) if arguments.json else "\n".join(f"{name:<18}{value:.4g}" for name, value in result.items())
    )


if __name__ == "__main__":
    main()
