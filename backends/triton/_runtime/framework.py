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


def __getattr__(name):
    return getattr(framework, name)


def run(launch):
    """Looks `run` up in the framework's module at each call, where tests replace it."""
    return framework.run(launch)
