"""Encoders, heads and the generator-discriminator pair."""
