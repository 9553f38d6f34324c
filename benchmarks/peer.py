"""The peer of benchmarks/pretrain.py: joint training of transformers' ELECTRA models, written in two ways."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from electra.data.tokenizer import Vocabulary
from electra.huggingface.convert import electra_settings
from electra.model.config import ElectraConfig as PairConfig
from electra.model.config import EncoderConfig

Losses = dict[str, Tensor]


class TransformersPair(nn.Module):
    """Generator and discriminator of transformers with shared embeddings."""

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        assert config.generator is not None
        assert config.discriminator is not None
        self.generator = ElectraForMaskedLM(transformers_config(config.generator))
        self.discriminator = ElectraForPreTraining(transformers_config(config.discriminator))
        self.discriminator.electra.embeddings = self.generator.electra.embeddings


def transformers_config(config: EncoderConfig) -> ElectraConfig:
    return ElectraConfig(**electra_settings(config))


def eager_losses(pair: TransformersPair, input_ids: Tensor, count: int, vocabulary: Vocabulary) -> Losses:
    """The usual implementation: labels, boolean masks, an attention mask of ones, and logits at all positions."""
    positions = random_positions(input_ids, count, vocabulary)
    is_masked = torch.zeros_like(input_ids, dtype=torch.bool).scatter(1, positions, True)
    masked = input_ids.masked_fill(is_masked, vocabulary.mask_id)
    labels, attention_mask = input_ids.masked_fill(~is_masked, -100), torch.ones_like(input_ids)
    mlm = pair.generator(masked, attention_mask=attention_mask, labels=labels)
    corrupted = input_ids.clone()
    with torch.no_grad():
        probabilities = mlm.logits[is_masked].float().softmax(-1)
        corrupted[is_masked] = torch.multinomial(probabilities, 1).squeeze(1)
    is_replaced = (corrupted != input_ids).long()
    rtd = pair.discriminator(corrupted, attention_mask=attention_mask, labels=is_replaced)
    return {"generator": mlm.loss, "discriminator": rtd.loss}


def static_losses(pair: TransformersPair, input_ids: Tensor, count: int, vocabulary: Vocabulary) -> Losses:
    """An implementation for torch.compile: static shapes, logits at masked positions only, Gumbel-max samples."""
    generator, positions = pair.generator, random_positions(input_ids, count, vocabulary)
    hidden = generator.electra(input_ids.scatter(1, positions, vocabulary.mask_id)).last_hidden_state
    hidden = hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[2]))
    logits = generator.generator_lm_head(generator.generator_predictions(hidden)).float()  # [B, M, V]
    loss = cross_entropy(logits.flatten(0, 1), input_ids.gather(1, positions).flatten())
    with torch.no_grad():
        sampled = (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)
    corrupted = input_ids.scatter(1, positions, sampled)
    rtd = pair.discriminator(corrupted, labels=(corrupted != input_ids).long())
    return {"generator": loss, "discriminator": rtd.loss}


def random_positions(input_ids: Tensor, count: int, vocabulary: Vocabulary) -> Tensor:
    """Positions [B, M] to mask, never those of [CLS] and [SEP]."""
    scores = torch.rand(input_ids.shape, device=input_ids.device)
    is_special = (input_ids == vocabulary.cls_id) | (input_ids == vocabulary.sep_id)
    return scores.masked_fill(is_special, -1.0).topk(count, dim=1).indices
