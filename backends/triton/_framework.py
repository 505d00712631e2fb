"""What the running Keras backend does for the files of this folder.

`run(launch)` returns the arrays that a launch writes, in the order of its outputs, None for one
that is not wanted. `operation(definition)` makes a differentiable function of an `Operation`,
`forward_operation` one without gradients, for steps of generation.
"""

import importlib
from typing import Any

import keras


def of_framework(suffix="") -> Any:
    """The file of this folder for the framework, such as `_torch_attention.py`."""
    name = "jax" if keras.config.backend() == "jax" else "torch"
    return importlib.import_module(f"keras_recurrent.backends.triton._{name}{suffix}")


framework = of_framework()

aligned = framework.aligned
cast = framework.cast
forward_operation = framework.forward_operation
operation = framework.operation
overlap = framework.overlap
places_of_numbers = framework.places_of_numbers
refusal = framework.refusal
refusal_of_steps = framework.refusal_of_steps
refusal_of_joined = framework.refusal_of_joined
refusal_of_token_wise = framework.refusal_of_token_wise
zeros_like = framework.zeros_like


def run(launch):
    return framework.run(launch)
