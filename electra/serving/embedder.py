"""Embeddings of texts: pooled hidden states of an encoder."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra.data.tokenizer import TextTokenizer
from electra.errors import ConfigError, check_finite
from electra.finetuning.features import compute_logits, default_batch_size, make_features
from electra.finetuning.models import POOL
from electra.finetuning.tasks import Examples
from electra.model.config import EmbeddingPooling
from electra.model.encoder import Encoder


class Embedder:
    """Pooled hidden states of an encoder as embeddings of texts, computed in batches of similar length."""

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: TextTokenizer,  # will encode special tokens as text
        device: torch.device,
        length: int,  # longer texts are truncated
        *,
        layers: tuple[int, ...] = (-1,),
        pooling: EmbeddingPooling = "mean",
        batch_size: int | None = None,  # of texts; default 64, on a GPU 512
        max_tokens: int | None = None,  # of a batch, instead of `batch_size`
        precision: torch.dtype = torch.float32,
    ) -> None:
        if pooling not in POOL:
            raise ConfigError(f"is {pooling!r}; choose from {', '.join(POOL)}", field="pooling")
        encoder.config.check_length(length)
        self.layers = encoder.config.layer_indices(layers)
        self.encoder = encoder.to(device).eval()
        self.tokenizer = tokenizer
        self.device, self.length, self.precision = device, length, precision
        self.pooling: EmbeddingPooling = pooling
        self.batch_size, self.max_tokens = batch_size or default_batch_size(device), max_tokens
        self.truncated = 0  # texts so far

    @property
    def dimensions(self) -> int:
        return len(self.layers) * self.encoder.config.width

    def embed(self, texts: list[str]) -> NDArray:
        """The embeddings [N, dimensions] of texts; those of several layers are concatenated."""
        return self.embed_with_truncation(texts)[0]

    def embed_with_truncation(self, texts: list[str]) -> tuple[NDArray, NDArray]:
        """The embeddings [N, dimensions] of texts, and which texts were truncated [N]."""
        if not texts:
            return np.empty((0, self.dimensions), np.float32), np.empty(0, bool)
        features = make_features(Examples(texts=texts), self.tokenizer, self.length)
        self.truncated += int(features.is_truncated.sum())
        vectors = compute_logits(
            self.pooled_states,
            features.to(self.device),
            self.batch_size,
            self.length,
            self.encoder.config.pad_id,
            self.precision,
            self.max_tokens,
        )
        check_finite(vectors, "the encoder")
        return vectors, features.is_truncated.numpy()

    def pooled_states(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """The embeddings [B, dimensions] of a batch."""
        if self.layers == [self.encoder.config.layers]:  # where layers may be fused
            hidden = self.encoder(input_ids, attention_mask, segment_ids)  # [B, L, D]
        else:
            states = self.encoder.hidden_states(input_ids, attention_mask, segment_ids)
            hidden = torch.cat([states[layer] for layer in self.layers], dim=-1)
        return POOL[self.pooling](hidden.float(), attention_mask)
