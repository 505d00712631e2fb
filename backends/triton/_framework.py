"""What the running Keras backend does for the files of this folder.

`run(launch)` returns the arrays that a launch writes, in the order of its outputs, None for one
that is not wanted. `operation(definition)` makes a differentiable function of an `Operation`.
"""

import importlib
from typing import Any

import keras

_name = "_jax" if keras.config.backend() == "jax" else "_torch"
framework: Any = importlib.import_module(f"keras_recurrent.backends.triton.{_name}")

cast = framework.cast
operation = framework.operation
places_of_numbers = framework.places_of_numbers
refusal = framework.refusal
refusal_of_token_wise = framework.refusal_of_token_wise
zeros_like = framework.zeros_like


def run(launch):
    return framework.run(launch)
