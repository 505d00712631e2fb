"""Plain JAX, on any device: a tree over time, fused by XLA.

Each operation over time has its own backward (`jax.custom_vjp`), which keeps the arguments and the
output and recomputes the rest. Those without a state are fused by XLA, and differentiated by JAX
but for `token_crossentropy`.
"""
