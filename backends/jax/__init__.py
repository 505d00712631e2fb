"""Plain JAX, on any device: a tree over time, fused by XLA.

Each operation has its own backward (`jax.custom_vjp`), which keeps the arguments and the output
and recomputes the rest.
"""
