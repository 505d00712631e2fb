"""Plain JAX, on any device: a tree over time, fused by XLA, with its own backward (`jax.custom_vjp`).

The backward keeps the arguments and the output, and recomputes the rest.
"""
