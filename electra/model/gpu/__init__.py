"""Kernels of our own for GPUs, and layers made of them; imported only where Triton is there."""
