"""Pallas kernels for TPU, on JAX.

Blocks of the sequence stream through VMEM from the first to the last, in the backward from the
last to the first, and the state stays there; every tensor is read and written once. A file has
the functions `forward` and `backward` of its operation in `backends/jax`, with their arguments.
"""
