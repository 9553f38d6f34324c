"""The peer of benchmarks/pretrain.py: transformers' generator and discriminator, and their joint loss in two ways."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from electra.data.tokenizer import Vocabulary
from electra.huggingface.convert import electra_settings
from electra.model.config import EncoderConfig
from electra.model.electra import ElectraConfig as PairConfig

Losses = dict[str, Tensor]


class Pair(nn.Module):
    """Transformers' two models with one set of embeddings: tables and their LayerNorm."""

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        assert config.generator is not None
        assert config.discriminator is not None
        self.generator = ElectraForMaskedLM(their_config(config.generator))
        self.discriminator = ElectraForPreTraining(their_config(config.discriminator))
        self.discriminator.electra.embeddings = self.generator.electra.embeddings


def their_config(config: EncoderConfig) -> ElectraConfig:
    """An encoder's settings in transformers' words."""
    return ElectraConfig(**electra_settings(config))


def eager_losses(pair: Pair, input_ids: Tensor, count: int, vocabulary: Vocabulary) -> Losses:
    """The joint loss as people write it: labels, boolean masks, and logits of every token."""
    is_masked = torch.zeros_like(input_ids, dtype=torch.bool).scatter(1, chosen(input_ids, count, vocabulary), True)
    masked = input_ids.masked_fill(is_masked, vocabulary.mask_id)
    labels, ones = input_ids.masked_fill(~is_masked, -100), torch.ones_like(input_ids)
    guesses = pair.generator(masked, attention_mask=ones, labels=labels)
    corrupted = input_ids.clone()
    with torch.no_grad():
        chances = guesses.logits[is_masked].float().softmax(-1)
        corrupted[is_masked] = torch.multinomial(chances, 1).squeeze(1)
    verdicts = pair.discriminator(corrupted, attention_mask=ones, labels=(corrupted != input_ids).long())
    return {"generator": guesses.loss, "discriminator": verdicts.loss}


def lean_losses(pair: Pair, input_ids: Tensor, count: int, vocabulary: Vocabulary) -> Losses:
    """The joint loss as a compiler likes it: fixed shapes, logits of masked rows only, samples by Gumbel noise."""
    generator, positions = pair.generator, chosen(input_ids, count, vocabulary)
    hidden = generator.electra(input_ids.scatter(1, positions, vocabulary.mask_id)).last_hidden_state
    hidden = hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[2]))
    logits = generator.generator_lm_head(generator.generator_predictions(hidden)).float()  # [B, M, V]
    loss = cross_entropy(logits.flatten(0, 1), input_ids.gather(1, positions).flatten())
    with torch.no_grad():
        sampled = (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)
    corrupted = input_ids.scatter(1, positions, sampled)
    verdicts = pair.discriminator(corrupted, labels=(corrupted != input_ids).long())
    return {"generator": loss, "discriminator": verdicts.loss}


def chosen(input_ids: Tensor, count: int, vocabulary: Vocabulary) -> Tensor:
    """Positions [B, M] to mask, never those of special tokens, of which dense rows have two."""
    lots = torch.rand(input_ids.shape, device=input_ids.device)
    is_special = (input_ids == vocabulary.cls_id) | (input_ids == vocabulary.sep_id)
    lots = lots.masked_fill(is_special, -1.0)
    return lots.topk(count, dim=1).indices
