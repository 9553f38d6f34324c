"""The encoder, its heads, and the generator-discriminator pair."""
