"""Conversion to and from Hugging Face's transformers."""
