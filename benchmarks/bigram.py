"""A detector without a model: how unlikely is a token beside its neighbours, by counts of pairs in the same text?

    python benchmarks/bigram.py --data shards/

prints its measures on the frozen corrupted set that `electra pretrain` reports as unigram_rtd_auc, so that the
discriminator's number has something to beat. The score of a token is how much rarer than chance it makes the pairs it
stands in: −log p(x | before) / p(x) − log p(after | x) / p(after), smoothed towards the unigram. Several weights of
that smoothing are tried, and the best on the measured set itself is reported: a bound that flatters the detector.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from electra.data.loader import validation_batches
from electra.data.packing import LoaderConfig
from electra.data.shards import Shards, open_shards
from electra.objectives.evaluation import SEED, auc, unigram_samples
from electra.objectives.objectives import ObjectiveContext
from electra.pretraining.initialize import unigram_frequencies

SMOOTHING = (0.5, 2.0, 10.0, 50.0, 200.0)  # pairs' worth of unigram that each first token is given


def pair_counts(shards: Shards) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct pairs of neighbouring training tokens as sorted numbers, how often each came, and counts of tokens."""
    size = shards.tokenizer.vocabulary.size
    tokens = np.concatenate([part.astype(np.int64) for part in shards.tokens("train")])
    pairs, counts = np.unique(tokens[:-1] * size + tokens[1:], return_counts=True)
    return pairs, counts, np.bincount(tokens, minlength=size)


def association(first: np.ndarray, second: np.ndarray, counted: tuple, weight: float) -> np.ndarray:
    """log p(second | first) / p(second), smoothed."""
    pairs, counts, single = counted
    wanted = first * len(single) + second
    place = np.searchsorted(pairs, wanted).clip(max=len(pairs) - 1)
    together = np.where(pairs[place] == wanted, counts[place], 0)
    chance = (single[second] + 1) / (single.sum() + len(single))
    return np.log((together + weight * chance) / (single[first] + weight) / chance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of shards")
    parser.add_argument("--length", type=int, default=128, help="tokens in a row, as in the run to compare with")
    parser.add_argument("--rows", type=int, default=512, help="held-out rows, as --evaluation-rows of the run")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    shards = open_shards(arguments.data)
    frequencies = unigram_frequencies(shards, torch.device("cpu"))
    context = ObjectiveContext(vocabulary=shards.tokenizer.vocabulary, seed=SEED)
    counted = pair_counts(shards)
    loader = LoaderConfig(length=arguments.length, batch_size=32)
    batches = validation_batches(shards, loader)
    corrupted = [unigram_samples(batch, context, frequencies).corrupted for batch in batches]
    corrupted = corrupted[: arguments.rows // 32]
    ids = torch.cat([part.input_ids for part in corrupted]).numpy()
    truth = torch.cat([part.is_replaced for part in corrupted]).numpy()
    found = {}
    for weight in SMOOTHING:
        left = association(ids[:, :-1], ids[:, 1:], counted, weight)  # of each token with the one before it
        scores = np.zeros(ids.shape)
        scores[:, 1:] -= left
        scores[:, :-1] -= left
        found[weight] = auc(scores.ravel(), truth.ravel())
    best = max(found, key=lambda weight: found[weight])
    entropy = -(frequencies * frequencies.clamp(min=1e-12).log()).sum().item()
    result = {"bigram_auc": found[best], "smoothing": best, "unigram_entropy": entropy, "tokens": int(counted[2].sum())}
    print(
        json.dumps(result) if arguments.json else "\n".join(f"{name:<18}{value:.4g}" for name, value in result.items())
    )


if __name__ == "__main__":
    main()
