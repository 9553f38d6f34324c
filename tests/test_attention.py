"""Who attends to whom."""

import torch

from electra.model.attention import Reach, attend, reach_of, starts_of


def test_without_padding_and_documents_there_is_no_mask():
    assert reach_of(None, None, has_kernel=False) == Reach(mask=None, starts=None)


def test_padding_is_seen_by_nobody():
    reach = reach_of(torch.tensor([[True, True, False]]), None, has_kernel=False)
    assert reach.mask.tolist() == [[[[True, True, False]]]]


def test_tokens_see_their_own_document_only():
    reach = reach_of(None, torch.tensor([[0, 0, 1]]), has_kernel=False)
    assert reach.mask[0, 0].int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_padding_beside_documents_is_a_document_of_its_own():
    reach = reach_of(torch.tensor([[True, True, False]]), torch.tensor([[0, 0, 0]]), has_kernel=False)
    assert reach.mask[0, 0].int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_documents_start_where_their_number_changes_and_in_every_row():
    documents = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 2]])
    assert starts_of(documents).tolist() == [0, 2, 4, 7, 8]
    assert starts_of(documents).dtype == torch.int32


def test_attention_by_mask_equals_attention_document_by_document():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 3, 8, generator=generator) for _ in range(3))  # [B, L, H, K]
    documents = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    packed = attend(query, key, value, reach_of(None, documents, has_kernel=False), dropout=0)
    for row, start, end in ((0, 0, 2), (0, 2, 4), (1, 0, 1), (1, 1, 4)):
        own = [tensor[row : row + 1, start:end] for tensor in (query, key, value)]
        torch.testing.assert_close(packed[row : row + 1, start:end], attend(*own, Reach(), dropout=0))
