"""A baseline for unigram_rtd_auc: replaced token detection by bigram counts of the training text.

    python benchmarks/bigram.py --data shards/

prints the AUC on the same corrupted held-out text as `electra pretrain`. The score of a token is its negative pointwise
mutual information with its neighbours, −log p(x | previous) / p(x) − log p(next | x) / p(next), smoothed towards the
unigram distribution. The best of several smoothing weights, selected on the evaluation text itself, is reported: an
upper bound for this baseline.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from electra.data.loader import validation_batches
from electra.data.packing import LoaderConfig
from electra.data.shards import Shards, open_shards
from electra.objectives.evaluation import SEED, corrupt_with_unigram_samples, roc_auc
from electra.objectives.objectives import ObjectiveContext
from electra.pretraining.initialize import unigram_frequencies

SMOOTHING = (0.5, 2.0, 10.0, 50.0, 200.0)  # pseudo-counts


def bigram_counts(shards: Shards) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorted bigrams (first · V + second) of the training text, their counts, and the counts of tokens."""
    size = shards.tokenizer.vocabulary.size
    tokens = np.concatenate([part.astype(np.int64) for part in shards.tokens_by_shard("train")])
    pairs, counts = np.unique(tokens[:-1] * size + tokens[1:], return_counts=True)
    return pairs, counts, np.bincount(tokens, minlength=size)


def mutual_information(first: np.ndarray, second: np.ndarray, counts: tuple, smoothing: float) -> np.ndarray:
    """log p(second | first) / p(second)."""
    bigrams, bigram_count, token_count = counts
    keys = first * len(token_count) + second
    index = np.searchsorted(bigrams, keys).clip(max=len(bigrams) - 1)
    joint = np.where(bigrams[index] == keys, bigram_count[index], 0)
    unigram = (token_count[second] + 1) / (token_count.sum() + len(token_count))
    return np.log((joint + smoothing * unigram) / (token_count[first] + smoothing) / unigram)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of shards")
    parser.add_argument("--length", type=int, default=128, help="tokens per row, as in the run to compare with")
    parser.add_argument("--rows", type=int, default=512, help="held-out rows, as --evaluation-rows of the run")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    shards = open_shards(arguments.data)
    frequencies = unigram_frequencies(shards, torch.device("cpu"))
    context = ObjectiveContext(vocabulary=shards.tokenizer.vocabulary, seed=SEED)
    counts = bigram_counts(shards)
    loader = LoaderConfig(length=arguments.length, batch_size=32)
    batches = validation_batches(shards, loader)
    corrupted = [corrupt_with_unigram_samples(batch, context, frequencies).corrupted for batch in batches]
    corrupted = corrupted[: arguments.rows // 32]
    ids = torch.cat([part.input_ids for part in corrupted]).numpy()
    labels = torch.cat([part.is_replaced for part in corrupted]).numpy()
    aucs = {}
    for smoothing in SMOOTHING:
        information = mutual_information(ids[:, :-1], ids[:, 1:], counts, smoothing)  # of each token with the previous
        scores = np.zeros(ids.shape)
        scores[:, 1:] -= information
        scores[:, :-1] -= information
        aucs[smoothing] = roc_auc(scores.ravel(), labels.ravel())
    best = max(aucs, key=lambda smoothing: aucs[smoothing])
    entropy = -(frequencies * frequencies.clamp(min=1e-12).log()).sum().item()
    result = {"bigram_auc": aucs[best], "smoothing": best, "unigram_entropy": entropy, "tokens": int(counts[2].sum())}
    print(
        json.dumps(result) if arguments.json else "\n".join(f"{name:<18}{value:.4g}" for name, value in result.items())
    )


if __name__ == "__main__":
    main()
