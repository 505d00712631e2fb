"""What the running Keras backend does for the files of this folder.

`run(launch)` returns the arrays that a launch writes, in the order of its outputs, None for one
that is not wanted. `operation(definition)` makes a differentiable function of an `Operation`.
"""

import keras

if keras.config.backend() == "jax":
    from keras_recurrent.backends.triton import _jax as framework
else:
    from keras_recurrent.backends.triton import _torch as framework

cast = framework.cast
operation = framework.operation
places_of_numbers = framework.places_of_numbers
refusal = framework.refusal
refusal_of_token_wise = framework.refusal_of_token_wise
zeros_like = framework.zeros_like


def run(launch):
    return framework.run(launch)
