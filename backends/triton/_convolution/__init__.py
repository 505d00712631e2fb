"""Kernels of the causal convolution."""
