"""Masking, objectives and evaluation on held-out text."""
