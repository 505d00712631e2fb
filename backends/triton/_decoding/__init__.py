"""Kernels of decoding steps, and parts of the step operations."""
