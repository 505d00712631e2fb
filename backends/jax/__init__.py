"""JAX's own versions of operations, on any device.

`keras_recurrent/portable` implements linear attention; `_time_groups.py` calls it for one group of
tokens after another.

Operations over time and `token_crossentropy` define a backward pass (`jax.custom_vjp`) whose
residuals are the arguments and the output; everything else is recomputed. Backward passes over
chunks of tokens differentiate one chunk at a time (`jax.vjp`). Triton kernels may save more. The
other operations, which have no state, are differentiated by JAX.
"""
