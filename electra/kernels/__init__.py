"""Triton kernels, fused layers, CUDA graphs, streams and bf16 weights for GPUs."""
