"""The operations in plain JAX, on any device.

Operations over time have a backward of their own (`jax.custom_vjp`), for which the arguments and
the output are kept and everything else is computed again (but for what the Triton kernels keep); so
has `token_crossentropy`. JAX differentiates the other operations without a state.
"""
