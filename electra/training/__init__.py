"""The trainer, optimizers, checkpoints and logging."""
