"""Linear layers inside another layer."""

import keras

from keras_recurrent.devices.jax_layouts import flatten_tokens
from keras_recurrent.dispatch import BACKEND
from keras_recurrent.layers.initializers import clone_initializer
from keras_recurrent.layers.remat import no_further_remat

if BACKEND == "torch":
    from keras_recurrent.layers.torch_calls import call_plain, is_plain


def inner_dense(layer, units, name, use_bias=False, input_shape=None):
    """Creates a `Dense` inside `layer`, with that layer's initializers and dtype.

    Args:
        layer: the outer layer. Its `kernel_initializer` and, with a bias, its `bias_initializer`
            are cloned.
        units: integer, the size of the output.
        name: string, the name of the new layer.
        use_bias: boolean, whether it has a bias.
        input_shape: tuple, the shape for which the new layer is built. None: it is not built.
    """
    with no_further_remat():
        dense = keras.layers.Dense(
            units,
            use_bias=use_bias,
            kernel_initializer=clone_initializer(layer.kernel_initializer),
            bias_initializer=clone_initializer(layer.bias_initializer) if use_bias else "zeros",
            dtype=layer.dtype_policy,
            name=name,
        )
        if input_shape is not None:
            dense.build(input_shape)
        return dense


def project(layer, dense, inputs):
    """Applies a `Dense` inside `layer` to `[B, T, D]`, called with one matrix `[B * T, D]`.

    The gradient of the weight is a sum over all tokens. With two axes of tokens, XLA on CPUs
    would first copy the gradient of the output to transpose it. Inputs of variable sizes, as in an
    export, are not reshaped.
    """
    if BACKEND == "torch" and is_plain(layer, dense, inputs):
        return call_plain(dense, inputs)  # torch's product reshapes its inputs
    if not all(isinstance(size, int) for size in inputs.shape):
        return dense(inputs)
    tokens, restore_time = flatten_tokens(inputs)
    return restore_time(dense(tokens))
