"""What many tests share: one thread each, so that two workers fit two cores, and small pairs and batches."""

from dataclasses import replace

import pytest
import torch

from electra.model.electra import Electra, ElectraConfig
from electra.model.encoder import EncoderConfig
from electra.text.batches import Batch
from electra.text.vocabulary import Vocabulary

torch.set_num_threads(1)

VOCABULARY = Vocabulary(size=60, pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4)
WIDE = EncoderConfig(layers=2, width=24, heads=3, feedforward=40, embedding_width=16, vocabulary=60, positions=32)
NARROW = replace(WIDE, width=8, heads=1, feedforward=16)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return VOCABULARY


@pytest.fixture
def make_pair():
    """Build a small pair by sharing scheme; with `all`, both parts have one size."""

    def build(sharing: str = "embeddings", dropout: float = 0.0) -> Electra:
        torch.manual_seed(0)
        wide = replace(WIDE, dropout=dropout, attention_dropout=dropout)
        narrow = wide if sharing == "all" else replace(NARROW, dropout=dropout, attention_dropout=dropout)
        return Electra(ElectraConfig(generator=narrow, discriminator=wide, sharing=sharing))

    return build


@pytest.fixture
def make_batch():
    """Build a batch of random text: [CLS] words [SEP], then padding where `lengths` says so."""

    def build(rows: int = 4, length: int = 16, lengths: list[int] | None = None, step: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(1)
        input_ids = torch.randint(5, VOCABULARY.size, (rows, length), generator=generator)
        ends = torch.tensor(lengths or [length] * rows)[:, None]
        place = torch.arange(length)
        input_ids = torch.where(place == 0, VOCABULARY.cls_id, input_ids)
        input_ids = torch.where(place == ends - 1, VOCABULARY.sep_id, input_ids)
        input_ids = torch.where(place >= ends, VOCABULARY.pad_id, input_ids)
        attention_mask = None if lengths is None else place < ends
        return Batch(input_ids, torch.tensor(step), torch.arange(rows), attention_mask)

    return build
