"""Who attends to whom."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import WIDE

from electra.model import attention
from electra.model.attention import Reach, attend, reach_of, starts_of, turned, turns_of, within
from electra.model.encoder import Encoder


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


@pytest.mark.parametrize(
    ("attention_mask", "documents", "seen"),
    [
        (None, None, ["1100", "1110", "0111", "0011"]),
        (torch.tensor([[1, 1, 0, 0]]), None, ["1100", "1100", "0110", "0001"]),
        (None, torch.tensor([[0, 0, 1, 1]]), ["1100", "1100", "0011", "0011"]),
    ],
)
def test_a_window_hides_what_is_farther_away_and_never_a_token_from_itself(attention_mask, documents, seen):
    reach = within(reach_of(attention_mask, documents, has_kernel=False), 1, 4, torch.device("cpu"))
    assert ["".join(str(int(it)) for it in row) for row in reach.mask[0, 0].tolist()] == seen


def test_a_window_as_long_as_the_row_needs_no_mask():
    assert within(Reach(), 3, 4, torch.device("cpu")) == Reach()
    assert within(Reach(), 2, 4, torch.device("cpu")).mask is not None


def test_turns_are_rotations_of_pairs_half_a_head_apart():
    turns = turns_of(3, 4, theta=100.0, device=torch.device("cpu"))
    vectors = torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(1, 3, 1, 4)
    expected = [[math.cos(p), -math.sin(p / 10), math.sin(p), math.cos(p / 10)] for p in range(3)]
    torch.testing.assert_close(turned(vectors, turns)[0, :, 0], torch.tensor(expected))


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


def attend_one_by_one(query, key, value, starts, _, longest, __, window_size):
    """What the kernel on a GPU does: attention within each stretch of the flattened batch, and within a window."""
    assert int(starts.diff().max()) <= longest
    window = longest if window_size == (-1, -1) else window_size[0]
    stretches = [slice(*pair) for pair in zip(starts.tolist()[:-1], starts.tolist()[1:], strict=True)]
    own = [[tensor[None, stretch] for tensor in (query, key, value)] for stretch in stretches]
    reaches = [within(Reach(), window, stretch.stop - stretch.start, torch.device("cpu")) for stretch in stretches]
    return torch.cat([attend(*tensors, reach, dropout=0)[0] for tensors, reach in zip(own, reaches, strict=True)])


PADDING = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.parametrize("attention_mask", [None, PADDING])
def test_attention_by_starts_equals_attention_by_mask(monkeypatch, attention_mask, window):
    monkeypatch.setattr(attention, "varlen_attn", attend_one_by_one)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 6, 3, 8, generator=generator) for _ in range(3))  # [B, L, H, K]
    reaches = (reach_of(attention_mask, DOCUMENTS, has_kernel=has_kernel) for has_kernel in (False, True))
    by_mask, by_starts = (
        attend(query, key, value, within(reach, window, 6, torch.device("cpu")), dropout=0) for reach in reaches
    )
    torch.testing.assert_close(by_starts, by_mask)


def outputs_and_gradients(encoder: Encoder, precision: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states where there is no padding, and how the attention's weights would change them."""
    encoder.zero_grad()
    text = torch.arange(5, 17).view(2, 6).cuda()
    with torch.autocast("cuda", precision, enabled=precision == torch.bfloat16):
        assert encoder.has_document_kernel() == (precision == torch.bfloat16)
        hidden = encoder(text, PADDING.cuda(), documents=DOCUMENTS.cuda())[PADDING.cuda()].float()
    (hidden * torch.linspace(-1, 1, hidden.numel()).cuda().view_as(hidden)).sum().backward()
    return hidden, encoder.layers[0].attention.qkv.weight.grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel that attends by document needs a GPU")
def test_on_a_gpu_attention_by_document_and_by_mask_have_the_same_outputs_and_gradients():
    torch.manual_seed(0)
    encoder = Encoder(replace(WIDE, layers=1, width=64, heads=2, dropout=0.0, attention_dropout=0.0)).cuda()
    with torch.no_grad():
        for parameter in encoder.layers[0].attention.parameters():
            parameter.mul_(10)  # so that a token in the wrong document is seen: 2.3 and 0.5, against 0.02 and 0.01
    by_document, by_mask = (outputs_and_gradients(encoder, kind) for kind in (torch.bfloat16, torch.float32))
    torch.testing.assert_close(by_document, by_mask, atol=0.1, rtol=0)
