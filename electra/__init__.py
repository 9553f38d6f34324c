"""Pre-train text encoders as discriminators: ELECTRA's replaced token detection on PyTorch."""

__version__ = "0.1.0"
