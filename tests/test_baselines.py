"""A model beside its baselines: bigram counts, the sentences with replaced words, and the table of all measures."""

import re

import numpy as np
import pytest
import torch

import electra
from electra.baselines import (
    BaselineComparison,
    BigramCounts,
    bigram_auc,
    bigram_mlm_loss,
    count_bigrams,
    count_found,
    describe_comparisons,
    evaluation_batches,
    evaluation_samples,
    find_replaced_words,
    read_corrupted_sentences,
    word_scores,
)
from electra.data.shards import open_shards
from electra.data.tokenizer import build_wordpiece_tokenizer
from electra.objectives.evaluation import DetectionMetrics, MaskedAndCorrupted, evaluate
from electra.objectives.masking import Masked
from electra.objectives.objectives import Corrupted
from electra.pretraining.held_out import held_out_batches
from electra.pretraining.token_counts import unigram_frequencies
from electra.serving.inference import load_text_model

SENTENCES = read_corrupted_sentences()


def samples_of(shards, electra=None):
    return evaluation_samples(shards, evaluation_batches(shards, length=16, rows=64), electra)


def test_a_token_that_never_occurs_beside_its_neighbours_has_the_highest_score():
    """The text is 0 1 2 0 1 2 …: bigrams 0 1, 1 2 and 2 0."""
    counts = BigramCounts(np.array([1, 5, 6]), np.array([10, 10, 9]), np.array([10, 10, 10]))
    scores = counts.replaced_scores(np.array([[0, 1, 2, 2, 1, 2, 0]]), smoothing=0.5)
    assert scores.argmax() == 3
    assert scores[0, 1] < 0 < scores[0, 3]


def test_bigrams_are_counted_in_the_training_text_and_find_random_tokens(shards):
    counts = count_bigrams(open_shards(shards))
    assert counts.bigram_counts.sum() == counts.token_counts.sum() - 1
    auc, _ = bigram_auc(counts, samples_of(open_shards(shards)))
    assert 0.9 < auc < 1


@pytest.mark.parametrize("with_generator", [True, False])
def test_the_baseline_is_measured_on_the_samples_of_a_run_s_evaluation(
    run_config, shards, monkeypatch, with_generator, finished_run
):
    opened, found = open_shards(shards), []
    electra = load_text_model(finished_run, "cpu").electra
    add = DetectionMetrics.add

    def keep(metrics, logits, corrupted, batch):
        found.append(corrupted.input_ids)
        add(metrics, logits, corrupted, batch)

    monkeypatch.setattr(DetectionMetrics, "add", keep)
    config = run_config(evaluation_rows=64, length=16)
    batches = held_out_batches(config, opened, torch.device("cpu"))
    evaluate(electra, batches, unigram_frequencies(opened, torch.device("cpu")), opened.tokenizer.vocabulary)
    expected = torch.cat(found[0 if with_generator else 1 :: 2])  # of each batch: the generator's, then unigram samples
    samples = samples_of(opened, electra if with_generator else None)
    assert torch.equal(torch.cat([each.corrupted.input_ids for each in samples]), expected)


def test_a_masked_token_between_known_neighbours_is_predicted_by_bigrams():
    """The text is 0 1 2 0 1 2 …; token 3 is [MASK], which is also in place of the neighbour in the second row."""
    counts = BigramCounts(np.array([1, 6, 8]), np.array([10, 10, 10]), np.array([10, 10, 10, 0]))
    known, unknown = torch.tensor([[0, 3, 2, 0]]), torch.tensor([[3, 3, 3, 3]])
    losses = {}
    for name, ids in (("known", known), ("unknown", unknown)):
        masked = Masked(
            ids, positions=torch.tensor([[1, 0]]), labels=torch.tensor([[1, 0]]), weights=torch.tensor([[1, 0]])
        )
        corrupted = Corrupted(ids, is_replaced=ids == 3)
        losses[name] = bigram_mlm_loss(counts, [MaskedAndCorrupted(masked, corrupted)], mask_id=3)
    assert losses["known"] < 0.01
    assert losses["unknown"] == pytest.approx(-np.log(11 / 34))  # of its frequency alone


def test_a_hundred_different_sentences_have_one_replaced_word_each():
    assert len({sentence.text for sentence in SENTENCES}) == len({each.replaced_word for each in SENTENCES}) == 100
    for sentence in SENTENCES:
        assert re.fullmatch(r"[A-Za-z]+", sentence.replaced_word)
        assert sentence.replaced_word != sentence.original
    assert {sentence.position for sentence in SENTENCES} >= set(range(10))


def test_a_sentence_counts_if_its_replaced_word_has_the_highest_score():
    by_text = {sentence.text: sentence for sentence in SENTENCES}

    def score_words(text):
        highest = by_text[text].position if len(text) % 2 else (by_text[text].position + 1) % len(text.split())
        return [float(index == highest) for index in range(len(text.split()))]

    result = count_found(score_words)
    assert result.found == sum(len(sentence.text) % 2 for sentence in SENTENCES)
    assert result.found + len(result.missed) == 100
    assert result.guessing == pytest.approx(9.9, abs=0.1)


def test_a_word_has_the_highest_score_of_its_tokens():
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", ",", "."]
    tokenizer = build_wordpiece_tokenizer(tokens, lowercase=True)
    assert tokenizer.library.encode("The cats, the cat.").tokens == [
        "[CLS]",
        "the",
        "cat",
        "##s",
        ",",
        "the",
        "cat",
        ".",
        "[SEP]",
    ]
    scores = [9.0, 0.1, 0.5, 0.7, 9.0, 0.2, 0.3, 9.0, 9.0]
    assert word_scores(tokenizer, "The cats, the cat.", scores) == [0.1, 0.7, 0.2, 0.3]


def test_every_sentence_is_scored_by_a_model(finished_run):
    result = find_replaced_words(electra.load(finished_run, device="cpu"))
    assert result.sentences == 100


@pytest.mark.parametrize(
    ("model", "higher_is_better", "is_better"), [(0.9, True, True), (0.7, True, False), (0.4, False, True)]
)
def test_a_model_is_compared_with_the_best_baseline(model, higher_is_better, is_better):
    comparison = BaselineComparison("AUC", 2, {"guessing": 0.5, "bigram counts": 0.8}, model, higher_is_better)
    assert comparison.is_better() == is_better
    verdict = describe_comparisons([comparison], has_before=False)[-1]
    assert verdict.startswith("Better than all" if is_better else "Not better than all baselines: AUC")


def test_a_table_has_a_column_for_each_baseline_and_for_the_model_before_and_after():
    auc = BaselineComparison("AUC", 3, {"guessing": 0.5, "bigram counts": 0.85}, 0.9, True, before=0.875)
    loss = BaselineComparison("loss", 2, {"guessing": 9.01, "token frequencies": 6.0}, 4.5, False)
    lines = [line.split("  ") for line in describe_comparisons([auc, loss], has_before=True)]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines[:3]]
    assert cells == [
        ["guessing", "token frequencies", "bigram counts", "before", "model"],
        ["AUC", "0.500", "–", "0.850", "0.875", "0.900"],
        ["loss", "9.01", "6.00", "–", "–", "4.50"],
    ]
