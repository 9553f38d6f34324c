"""The sentences with replaced words, and how a model's probabilities are compared on them."""

import re

import pytest

import electra
from electra.data.tokenizer import build_wordpiece_tokenizer
from electra.serving.comparison import count_found, find_replaced_words, read_corrupted_sentences, word_scores

SENTENCES = read_corrupted_sentences()


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
