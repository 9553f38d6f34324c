"""The blind training loop and what it needs: optimizers, checkpoints, progress."""
