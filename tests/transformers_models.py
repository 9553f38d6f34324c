"""Small models of transformers with random weights, to compare with."""

import logging
from pathlib import Path

import torch
from transformers import BertConfig, ElectraConfig, ModernBertConfig

SIZES = {  # scaled down: embedding width, hidden size, heads, intermediate size, layers
    "small": (16, 32, 4, 64, 3),
    "small generator": (16, 8, 1, 32, 3),
    "base": (24, 24, 3, 48, 2),
    "base generator": (24, 8, 1, 32, 2),
    "large": (32, 32, 4, 64, 4),
    "one layer": (16, 32, 4, 64, 1),
}


def random_model(model_class, size: str = "small", config_class=ElectraConfig):
    """A model with ELECTRA's or BERT's encoder."""
    torch.manual_seed(0)
    embedding, hidden, heads, intermediate, layers = SIZES[size]
    width = {} if config_class is BertConfig else {"embedding_size": embedding}
    config = config_class(
        vocab_size=60,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        max_position_embeddings=32,
        **width,
    )
    return add_noise(model_class(config))


def random_modernbert(model_class, global_attention_every: int = 1, **settings):
    """A model with ModernBERT's encoder; its local attention has a window of 4 tokens."""
    torch.manual_seed(0)
    special = dict.fromkeys(("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"))
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "num_hidden_layers": 4}
    types = ["sliding_attention" if number % global_attention_every else "full_attention" for number in range(4)]
    labels = {"id2label": {0: "original", 1: "replaced"}, "label2id": {"original": 0, "replaced": 1}}
    common = {"vocab_size": 60, "pad_token_id": 0, "max_position_embeddings": 32, "local_attention": 4}
    config = ModernBertConfig(**special | sizes | labels | common | {"layer_types": types} | settings)
    return add_noise(model_class(config))


def add_noise(model):
    """Make all weights, also biases and norms, differ from zero and one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if hasattr(model, "classifier"):  # of a discriminator, whose logit of "original" is 0
            model.classifier.weight[0], model.classifier.bias[0] = 0, 0
    return model.eval()


def our_output(model, *inputs) -> torch.Tensor:
    """Hidden states of an encoder, or logits of a model with a head."""
    output = model(*inputs)
    return output if isinstance(output, torch.Tensor) else output.logits


def load_without_warnings(model_class, folder: Path, caplog):
    """Load a folder with transformers; no weight is missing or unexpected, and nothing is logged."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model, info = model_class.from_pretrained(folder, output_loading_info=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not any(info.values())
    return model.eval()
