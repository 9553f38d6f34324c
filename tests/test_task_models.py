"""Task models: equal to a linear head on transformers' encoder."""

import pytest
import torch
from transformers import BertConfig, BertModel, ElectraModel
from transformers_models import random_model

from electra.errors import ConfigError
from electra.finetuning.kinds import KINDS
from electra.finetuning.models import TaskModel, WindowModel
from electra.finetuning.storage import build_task_model, load_pretrained


def padded_pairs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask and segment ids of three pairs."""
    lengths = torch.tensor([[16], [9], [12]])
    positions = torch.arange(16)
    input_ids = torch.randint(5, 60, (3, 16), generator=torch.Generator().manual_seed(0))
    attention_mask = positions < lengths
    return torch.where(attention_mask, input_ids, 0), attention_mask, ((positions >= 5) & attention_mask).long()


@pytest.mark.parametrize("kind", [ElectraModel, BertModel])
def test_logits_equal_a_linear_head_on_the_encoder_of_transformers(tmp_path, kind):
    theirs = random_model(kind, **({"config_class": BertConfig, "size": "base"} if kind is BertModel else {}))
    theirs.save_pretrained(tmp_path)
    ours = TaskModel(load_pretrained(tmp_path, dropout=0.0).encoder, num_labels=3)
    input_ids, attention_mask, segment_ids = padded_pairs()
    hidden = theirs(input_ids, attention_mask.long(), segment_ids).last_hidden_state[:, 0]
    expected = hidden @ ours.head.weight.T + ours.head.bias
    logits = ours(input_ids, attention_mask, segment_ids)
    assert (logits - expected).abs().max() < 1e-6
    labels = torch.tensor([0, 2, 1])
    loss = KINDS["classification"].loss(logits, labels).mean()
    assert abs(loss - torch.nn.functional.cross_entropy(expected, labels)) < 1e-6


def test_classic_encoders_support_only_the_first_token(encoder_folder):
    with pytest.raises(ConfigError, match="classic encoders support only cls"):
        build_task_model(load_pretrained(encoder_folder), num_labels=2, pooling="mean", seed=1)


def test_the_head_of_windows_gets_the_mean_of_their_pooled_states(encoder_folder):
    torch.manual_seed(0)
    encoder = load_pretrained(encoder_folder).encoder
    model = WindowModel(encoder, num_labels=3).eval()
    input_ids = torch.randint(5, 20, (2, 3, 8))
    lengths = torch.tensor([[8, 8, 4], [5, 1, 1]])[..., None]  # the second row has one window; the others are missing
    attention_mask = torch.arange(8) < lengths
    logits = model(input_ids, attention_mask, torch.zeros_like(input_ids))
    states = [
        [encoder(window[None, :length])[0, 0] for window, length in zip(row, of_row, strict=True)]
        for row, of_row in zip(input_ids, lengths.squeeze(-1).tolist(), strict=True)
    ]
    expected = model.head(torch.stack([torch.stack(states[0]).mean(0), states[1][0]]))
    torch.testing.assert_close(logits, expected)
