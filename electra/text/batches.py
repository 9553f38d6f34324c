"""Batches: rows of token ids, and what the model and the objectives need to know of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of one training step, or of one micro-batch of it."""

    input_ids: Tensor  # [B, L]
    step: Tensor  # [] the training step, counted from 0
    rows: Tensor  # [B] each row's number within the whole step's batch, over all ranks and micro-batches
    attention_mask: Tensor | None = None  # [B, L] bool, False at padding; None: there is no padding
    segment_ids: Tensor | None = None  # [B, L] 0 in segment A, 1 in segment B; None: all A
    documents: Tensor | None = None  # [B, L] which document of the row a token belongs to; None: one document a row
    continues_word: Tensor | None = None  # [B, L] bool, True at a word's second and later pieces; None: not known

    def tokens(self) -> Tensor:
        """How many tokens of each row are not padding: [B]."""
        if self.attention_mask is None:
            return torch.full_like(self.rows, self.input_ids.shape[1])
        return self.attention_mask.long().sum(1)

    def surroundings(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What an encoder takes beside the token ids, in its order: padding, segments, documents."""
        return self.attention_mask, self.segment_ids, self.documents
