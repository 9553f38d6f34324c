"""Feature-based fine-tuning as in BERT's paper: hidden states of a frozen encoder, and a BiLSTM on them."""

from typing import Any

import torch
from torch import Tensor, nn

from electra.finetuning.config import FrozenConfig
from electra.model.config import EncoderConfig
from electra.model.electra import meta_device
from electra.model.encoder import Encoder

LSTM_LAYERS = 2


class BiLSTM(nn.Module):
    """Two layers of LSTMs in both directions; padding at the end of a row changes nothing.

    Static shapes instead of packed sequences: rows are reversed by index, so that steps can be CUDA graphs."""

    def __init__(self, inputs: int, width: int, dropout: float) -> None:
        super().__init__()
        sizes = [inputs, *[width] * (LSTM_LAYERS - 1)]
        self.forwards = nn.ModuleList(nn.LSTM(size, width // 2, batch_first=True) for size in sizes)
        self.backwards = nn.ModuleList(nn.LSTM(size, width // 2, batch_first=True) for size in sizes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Outputs [B, L, width] of states [B, L, inputs], in fp32."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        lengths = attention_mask.sum(1, keepdim=True)
        reverse = torch.where(attention_mask, lengths - 1 - positions, positions)  # [B, L]
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.float()
            for forward_lstm, backward_lstm in zip(self.forwards, self.backwards, strict=True):
                hidden = self.dropout(hidden)
                outputs, _ = forward_lstm(hidden)
                reversed_outputs, _ = backward_lstm(reverse_rows(hidden, reverse))
                hidden = torch.cat([outputs, reverse_rows(reversed_outputs, reverse)], dim=-1)
        return hidden


def reverse_rows(hidden: Tensor, reverse: Tensor) -> Tensor:
    return hidden.gather(1, reverse[..., None].expand_as(hidden))


class FrozenEncoder(Encoder):
    """An encoder whose weights get no gradient and that has no dropout; its outputs are concatenated hidden states of
    several layers, or those of a BiLSTM on them, which is trained."""

    def __init__(self, config: EncoderConfig, frozen: FrozenConfig) -> None:
        with meta_device():  # weights are assigned later
            super().__init__(config)
        self.frozen, self.indices = frozen, frozen.indices(config)
        self.requires_grad_(False)
        inputs = len(self.indices) * config.width
        self.bilstm = BiLSTM(inputs, 2 * config.width, config.dropout) if frozen.bilstm else None
        self.output_width = 2 * config.width if frozen.bilstm else inputs
        self.train()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> Tensor:  # type: ignore[override]  # no documents or positions
        """Features [B, L, output_width]."""
        with torch.no_grad():
            states = self.hidden_states(input_ids, attention_mask, segment_ids)
            hidden = torch.cat([states[index] for index in self.indices], dim=-1)
        return hidden if self.bilstm is None else self.bilstm(hidden, attention_mask)

    def train(self, mode: bool = True) -> Any:
        """Only the BiLSTM has dropout in training."""
        super().train(False)
        if self.bilstm is not None:
            self.bilstm.train(mode)
        return self


def freeze(encoder: Encoder, frozen: FrozenConfig) -> FrozenEncoder:
    """A frozen encoder with the weights of another."""
    result = FrozenEncoder(encoder.config, frozen)
    result.load_state_dict(encoder.state_dict(), assign=True, strict=False)
    return result
