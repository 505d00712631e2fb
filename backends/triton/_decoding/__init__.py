"""Kernels of decoding steps: embedding, soft cap and argmax, and code of the step operations."""
