"""Who attends to whom."""

import math

import pytest
import torch

from electra.data.loader import compute_cu_seqlens
from electra.model import attention
from electra.model.attention import AttentionBias, attend, attention_bias_of, turned, turns_of, within


def test_without_padding_and_documents_there_is_no_mask():
    reach = attention_bias_of(None, None, kernel="documents")
    assert reach.mask is reach.starts is None


def test_padding_is_seen_by_nobody():
    reach = attention_bias_of(torch.tensor([[True, True, False]]), None, kernel="mask")
    assert reach.mask.tolist() == [[[[True, True, False]]]]


def test_tokens_see_their_own_document_only():
    reach = attention_bias_of(None, torch.tensor([[0, 0, 1]]), kernel="mask")
    assert reach.mask[0, 0].int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_padding_beside_documents_is_a_document_of_its_own():
    reach = attention_bias_of(torch.tensor([[True, True, False]]), torch.tensor([[0, 0, 0]]), kernel="mask")
    assert reach.mask[0, 0].int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("attention_mask", "documents", "seen"),
    [
        (None, None, ["1100", "1110", "0111", "0011"]),
        (torch.tensor([[1, 1, 0, 0]]), None, ["1100", "1100", "0110", "0001"]),
        (None, torch.tensor([[0, 0, 1, 1]]), ["1100", "1100", "0011", "0011"]),
    ],
)
def test_a_window_hides_what_is_farther_away_and_never_a_token_from_itself(attention_mask, documents, seen):
    reach = within(attention_bias_of(attention_mask, documents, kernel="mask"), 1, 4, torch.device("cpu"))
    assert ["".join(str(int(it)) for it in row) for row in reach.mask[0, 0].tolist()] == seen


def test_a_window_as_long_as_the_row_needs_no_mask():
    assert within(AttentionBias(), 3, 4, torch.device("cpu")) == AttentionBias()
    assert within(AttentionBias(), 2, 4, torch.device("cpu")).mask is not None


def test_turns_are_rotations_of_pairs_half_a_head_apart():
    turns = turns_of(3, 4, theta=100.0, device=torch.device("cpu"))
    vectors = torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(1, 3, 1, 4)
    expected = [[math.cos(p), -math.sin(p / 10), math.sin(p), math.cos(p / 10)] for p in range(3)]
    torch.testing.assert_close(turned(vectors, turns)[0, :, 0], torch.tensor(expected))


def test_documents_start_where_their_number_changes_and_in_every_row():
    documents = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 2]])
    assert compute_cu_seqlens(documents).tolist() == [0, 2, 4, 7, 8]
    assert compute_cu_seqlens(documents).dtype == torch.int32


def test_attention_by_mask_equals_attention_document_by_document():
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 4, 3, 3, 8, generator=generator)  # [B, L, 3, H, K]
    documents = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    packed = attend(qkv, attention_bias_of(None, documents, kernel="mask"), dropout=0)
    for row, start, end in ((0, 0, 2), (0, 2, 4), (1, 0, 1), (1, 1, 4)):
        own = qkv[row : row + 1, start:end]
        torch.testing.assert_close(packed[row : row + 1, start:end], attend(own, AttentionBias(), dropout=0))


def attend_one_by_one(query, key, value, starts, _, longest, __, window_size=(-1, -1)):
    """What the kernel on a GPU does: attention within each stretch of the flattened batch, and within a window."""
    assert int(starts.diff().max()) <= longest
    window = longest if window_size == (-1, -1) else window_size[0]
    stretches = [slice(*pair) for pair in zip(starts.tolist()[:-1], starts.tolist()[1:], strict=True)]
    own = [torch.stack([query, key, value], dim=1)[None, stretch] for stretch in stretches]
    reaches = [
        within(AttentionBias(), window, stretch.stop - stretch.start, torch.device("cpu")) for stretch in stretches
    ]
    return torch.cat([attend(qkv, reach, dropout=0)[0] for qkv, reach in zip(own, reaches, strict=True)])


PADDING = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.parametrize("attention_mask", [None, PADDING])
def test_attention_by_starts_equals_attention_by_mask(monkeypatch, attention_mask, window):
    monkeypatch.setattr(attention, "varlen_attn", attend_one_by_one, raising=False)  # there on GPUs
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 6, 3, 3, 8, generator=generator)  # [B, L, 3, H, K]
    reaches = (attention_bias_of(attention_mask, DOCUMENTS, kernel=kernel) for kernel in ("mask", "documents"))
    by_mask, by_starts = (attend(qkv, within(reach, window, 6, torch.device("cpu")), dropout=0) for reach in reaches)
    torch.testing.assert_close(by_starts, by_mask)


def test_short_rows_know_each_tokens_document():
    reach = attention_bias_of(PADDING, DOCUMENTS, kernel="short rows")
    assert reach.documents.tolist() == [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, -1, -1]]
    assert attention_bias_of(PADDING, None, kernel="short rows").documents.tolist() == [[0] * 6, [0] * 4 + [-1] * 2]
    assert attention_bias_of(None, None, kernel="short rows").documents is None
    assert within(reach, 2, 6, torch.device("cpu")).window == 2


def test_padding_is_a_document_of_its_own_in_a_list_of_one_length():
    reach = attention_bias_of(PADDING, None, kernel="documents")
    assert reach.starts.tolist() == [0, 6, 10, 12, 12]
    assert attention_bias_of(PADDING, DOCUMENTS, kernel="documents").starts.tolist() == [0, 2, 6, 7, 10, 12]
    listed = attention_bias_of(PADDING, DOCUMENTS, compute_cu_seqlens(DOCUMENTS, 4), kernel="documents").starts
    assert listed.tolist() == [0, 2, 6, 7, 10, 12, 12]


def test_whole_rows_that_see_a_window_need_a_mask():
    reach = within(attention_bias_of(None, None, kernel="documents"), 2, 6, torch.device("cpu"))
    assert (reach.kernel, reach.mask.sum().item()) == ("mask", 6 * 5 - 2 * (2 + 1))


def test_with_a_bound_on_documents_their_starts_are_as_many_in_every_batch():
    documents = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 2]])
    assert compute_cu_seqlens(documents, most=9).tolist() == [0, 2, 4, 8, 9, 11, 12, 12, 12, 12]
    assert compute_cu_seqlens(documents, most=6).tolist() == compute_cu_seqlens(documents).tolist()


@pytest.mark.parametrize(("attention_mask", "documents"), [(PADDING, None), (None, DOCUMENTS), (PADDING, DOCUMENTS)])
def test_short_rows_have_their_documents_row_by_row_in_memory(attention_mask, documents):
    """The kernel reads them there; what lies column by column would be taken for others."""
    attention_mask, documents = (None if it is None else it.T.contiguous().T for it in (attention_mask, documents))
    assert attention_bias_of(attention_mask, documents, kernel="short rows").documents.is_contiguous()
