"""Models of transformers to compare with."""

import torch
from transformers import BertConfig, ElectraConfig, ModernBertConfig

LAYOUTS = {  # small, base and large scaled down: embedding width, hidden width, heads, feed-forward, layers
    "small": (16, 32, 4, 64, 3),
    "small generator": (16, 8, 1, 32, 3),
    "base": (24, 24, 3, 48, 2),
    "base generator": (24, 8, 1, 32, 2),
    "large": (32, 32, 4, 64, 4),
}


def peer(kind, layout: str = "small", config_class=ElectraConfig):
    """A model of transformers with weights that are all different from zero and one."""
    torch.manual_seed(0)
    embedding, hidden, heads, feedforward, layers = LAYOUTS[layout]
    width = {} if config_class is BertConfig else {"embedding_size": embedding}
    model = kind(
        config_class(
            vocab_size=60,
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=feedforward,
            num_hidden_layers=layers,
            max_position_embeddings=32,
            **width,
        )
    )
    return shaken(model)


def modern_peer(kind, global_attention_every: int = 1, **settings):
    """A model of transformers with ModernBERT's encoder; of its layers, one in so many sees more than 2 tokens away."""
    torch.manual_seed(0)
    special = dict.fromkeys(("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"))
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "num_hidden_layers": 4}
    kinds = ["sliding_attention" if number % global_attention_every else "full_attention" for number in range(4)]
    labels = {"id2label": {0: "original", 1: "replaced"}, "label2id": {"original": 0, "replaced": 1}}
    common = {"vocab_size": 60, "pad_token_id": 0, "max_position_embeddings": 32, "local_attention": 4}
    config = ModernBertConfig(**special | sizes | labels | common | {"layer_types": kinds} | settings)
    return shaken(kind(config))


def shaken(model):
    """The model with weights that are all different from zero and one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if hasattr(model, "classifier"):  # of a discriminator: the label "original" always has 0
            model.classifier.weight[0], model.classifier.bias[0] = 0, 0
    return model.eval()
