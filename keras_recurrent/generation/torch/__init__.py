"""Decoding steps, loops and CUDA graphs on torch."""
