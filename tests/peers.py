"""Models of transformers to compare with."""

import torch
from transformers import BertConfig, ElectraConfig

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
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
