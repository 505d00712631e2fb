"""Functions of the running Keras backend, torch or JAX, for the files of `backends/triton`.

- `run(launch)` runs a launch and returns its outputs in order, None for an output that is None.
- `operation(definition)` makes an `Operation` a differentiable `Kernel`.
- `compile_ahead()` is a context manager in which threads compile the kernels of a first call.
- `decoding_step(...)` makes a function without gradients the `Kernel` of a decoding step.
- `compute_capability(x)` returns that of the GPU that runs kernels on x, such as (9, 0), or None.
- `matrix_product(a, b, dtype)` returns a b in a dtype of at least theirs, by the framework.
- `*unsupported_reason(...)` return the reason why kernels cannot take the tensors among arguments,
  or None.
"""

from typing import Any

from ... import host

framework: Any
if host.framework == "jax":
    from . import jax_functions as framework
else:
    from . import torch_operators as framework

are_aligned = framework.are_aligned
cast = framework.cast
compile_ahead = framework.compile_ahead
compute_capability = framework.compute_capability
decoding_step = framework.decoding_step
matrix_product = framework.matrix_product
operation = framework.operation
pdl_options = framework.pdl_options
search_sorted_rows = framework.search_sorted_rows
unsupported_reason = framework.unsupported_reason
step_unsupported_reason = framework.step_unsupported_reason
fusible_unsupported_reason = framework.fusible_unsupported_reason
fusible_step_unsupported_reason = framework.fusible_step_unsupported_reason
token_wise_unsupported_reason = framework.token_wise_unsupported_reason
zeros_like = framework.zeros_like


def run(launch):
    """Looks `run` up in the framework's module at each call, where tests replace it."""
    return framework.run(launch)
