"""Attention biases, rotary positions and the attention backends that run on a CPU."""

import math

import pytest
import torch

from electra.data.loader import compute_cu_seqlens
from electra.kernels import dispatch
from electra.kernels.dispatch import AttentionBias, attention
from electra.kernels.reference import apply_rope
from electra.model.encoder import limit_to_window, make_attention_bias, make_rope

CPU = torch.device("cpu")
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
DOCUMENT_IDS = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])


def rows(mask: torch.Tensor) -> list[str]:
    """A mask [1, 1, ?, L] as one string per query."""
    return ["".join(str(int(value)) for value in row) for row in mask[0, 0].tolist()]


@pytest.mark.parametrize(
    ("attention_mask", "document_ids", "expected"),
    [
        ([[1, 1, 0]], None, ["110"]),  # all queries alike
        (None, [[0, 0, 1]], ["110", "110", "001"]),
        ([[1, 1, 0]], [[0, 0, 0]], ["110", "110", "001"]),  # padding is a document of its own
    ],
    ids=["padding", "documents", "both"],
)
def test_mask_of_padding_and_documents(attention_mask, document_ids, expected):
    tensors = (None if values is None else torch.tensor(values) for values in (attention_mask, document_ids))
    assert rows(make_attention_bias(*tensors, backend="sdpa").mask) == expected


@pytest.mark.parametrize("backend", ["sdpa", "varlen", "short"])
def test_full_rows_need_no_bias(backend):
    assert make_attention_bias(None, None, backend=backend) == AttentionBias(backend)


@pytest.mark.parametrize(
    ("attention_mask", "document_ids", "expected"),
    [
        (None, None, ["1100", "1110", "0111", "0011"]),
        (torch.tensor([[1, 1, 0, 0]]), None, ["1100", "1100", "0110", "0001"]),
        (None, torch.tensor([[0, 0, 1, 1]]), ["1100", "1100", "0011", "0011"]),
    ],
)
def test_window_masks_distant_tokens_but_never_the_token_itself(attention_mask, document_ids, expected):
    bias = make_attention_bias(attention_mask, document_ids, backend="sdpa")
    assert rows(limit_to_window(bias, 1, 4, CPU).mask) == expected


def test_window_as_long_as_the_row_needs_no_mask():
    assert limit_to_window(AttentionBias(), 3, 4, CPU) == AttentionBias()
    assert limit_to_window(AttentionBias(), 2, 4, CPU).mask is not None


def test_window_without_documents_falls_back_from_varlen_to_a_mask():
    bias = limit_to_window(make_attention_bias(None, None, backend="varlen"), 2, 6, CPU)
    assert (bias.backend, bias.mask.sum().item()) == ("sdpa", 6 * 5 - 2 * (2 + 1))


def test_rope_rotates_pairs_half_a_head_apart():
    rope = make_rope(3, 4, theta=100.0, device=CPU)
    vectors = torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(1, 3, 1, 4)
    expected = [[math.cos(p), -math.sin(p / 10), math.sin(p), math.cos(p / 10)] for p in range(3)]
    torch.testing.assert_close(apply_rope(vectors, rope)[0, :, 0], torch.tensor(expected))


def test_masked_attention_equals_attention_over_each_document_alone():
    qkv = torch.randn(2, 4, 3, 3, 8, generator=torch.Generator().manual_seed(0))  # [B, L, 3, H, K]
    document_ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    packed = attention(qkv, make_attention_bias(None, document_ids, backend="sdpa"), dropout=0)
    for row, start, end in ((0, 0, 2), (0, 2, 4), (1, 0, 1), (1, 1, 4)):
        document = qkv[row : row + 1, start:end]
        torch.testing.assert_close(packed[row : row + 1, start:end], attention(document, AttentionBias(), dropout=0))


def varlen_by_loop(query, key, value, cu_seqlens, _, max_length, __, window_size=(-1, -1)):
    """`torch.nn.attention.varlen.varlen_attn`, which only runs on GPUs, as a loop over documents."""
    assert int(cu_seqlens.diff().max()) <= max_length
    window, qkv = max_length if window_size == (-1, -1) else window_size[0], torch.stack([query, key, value], dim=1)
    outputs = []
    for start, end in zip(cu_seqlens.tolist()[:-1], cu_seqlens.tolist()[1:], strict=True):
        bias = limit_to_window(AttentionBias(), window, end - start, CPU)
        outputs.append(attention(qkv[None, start:end], bias, dropout=0)[0])
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.parametrize("attention_mask", [None, PADDING])
def test_varlen_attention_equals_masked_attention(monkeypatch, attention_mask, window):
    monkeypatch.setattr(dispatch, "varlen_attn", varlen_by_loop, raising=False)
    qkv = torch.randn(2, 6, 3, 3, 8, generator=torch.Generator().manual_seed(0))  # [B, L, 3, H, K]
    biases = (make_attention_bias(attention_mask, DOCUMENT_IDS, backend=backend) for backend in ("sdpa", "varlen"))
    masked, varlen = (attention(qkv, limit_to_window(bias, window, 6, CPU), dropout=0) for bias in biases)
    torch.testing.assert_close(varlen, masked)


def test_cu_seqlens_are_boundaries_of_documents_and_of_rows():
    document_ids = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 2]])
    assert compute_cu_seqlens(document_ids).tolist() == [0, 2, 4, 7, 8]
    assert compute_cu_seqlens(document_ids).dtype == torch.int32


def test_cu_seqlens_have_the_same_length_in_every_batch_with_a_bound():
    document_ids = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 2]])
    assert compute_cu_seqlens(document_ids, 9).tolist() == [0, 2, 4, 8, 9, 11, 12, 12, 12, 12]
    assert compute_cu_seqlens(document_ids, 6).tolist() == compute_cu_seqlens(document_ids).tolist()


def test_padding_is_a_document_in_cu_seqlens():
    def cu_seqlens(*arguments: torch.Tensor | None) -> list[int]:
        return make_attention_bias(PADDING, *arguments, backend="varlen").cu_seqlens.tolist()

    assert cu_seqlens(None) == [0, 6, 10, 12, 12]
    assert cu_seqlens(DOCUMENT_IDS) == [0, 2, 6, 7, 10, 12]
    assert cu_seqlens(DOCUMENT_IDS, compute_cu_seqlens(DOCUMENT_IDS, 4)) == [0, 2, 6, 7, 10, 12, 12]


def test_short_attention_takes_document_ids():
    bias = make_attention_bias(PADDING, DOCUMENT_IDS, backend="short")
    assert bias.document_ids.tolist() == [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, -1, -1]]
    assert limit_to_window(bias, 2, 6, CPU).window == 2
    padded = make_attention_bias(PADDING, None, backend="short").document_ids
    assert padded.tolist() == [[0] * 6, [0] * 4 + [-1] * 2]


@pytest.mark.parametrize(
    ("attention_mask", "document_ids"), [(PADDING, None), (None, DOCUMENT_IDS), (PADDING, DOCUMENT_IDS)]
)
def test_document_ids_of_short_attention_are_contiguous(attention_mask, document_ids):
    """The kernel reads them row by row in memory."""
    transposed = (None if each is None else each.T.contiguous().T for each in (attention_mask, document_ids))
    assert make_attention_bias(*transposed, backend="short").document_ids.is_contiguous()


def test_a_cpu_uses_sdpa():
    assert dispatch.select_attention_backend(torch.empty(0), 128, 64, has_cu_seqlens=True) == (
        "short" if dispatch.IS_INTERPRETED else "sdpa"
    )
