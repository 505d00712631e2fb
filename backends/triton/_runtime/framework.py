"""What the running Keras backend does for the files of this folder.

`run(launch)` returns the arrays that a launch writes, in the order of its outputs, None for one
that is not wanted. `operation(definition)` makes a differentiable function of an `Operation`,
`forward_operation` one without gradients, for steps of generation.
"""

from typing import Any

from ... import host

framework: Any
if host.framework == "jax":
    from . import jax_functions as framework
else:
    from . import torch_operators as framework

aligned = framework.aligned
cast = framework.cast
forward_operation = framework.forward_operation
operation = framework.operation
pdl_options = framework.pdl_options
places_of_numbers = framework.places_of_numbers
refusal = framework.refusal
refusal_of_steps = framework.refusal_of_steps
refusal_of_joined = framework.refusal_of_joined
refusal_of_token_wise = framework.refusal_of_token_wise
zeros_like = framework.zeros_like


def run(launch):
    return framework.run(launch)
