"""Block-diagonal linear maps, the form of the gates."""

import keras
from keras import ops

from keras_recurrent.devices.jax_layouts import flatten_tokens
from keras_recurrent.layers.initializers import clone_initializer
from keras_recurrent.layers.remat import no_further_remat


def block_diagonal_dense(layer, name, units):
    """A gate of `layer`: `num_blocks` linear maps, each from one block of its width to `units`.

    It is an `EinsumDense`, so that LoRA and quantization work on it. A kernel of shape
    `[num_blocks, block width, units]` is drawn with the block width as its fan-in.
    """
    with no_further_remat():
        dense = keras.layers.EinsumDense(
            "hni,hij->hnj",
            output_shape=(None, units),
            bias_axes="hj",
            kernel_initializer=clone_initializer(layer.kernel_initializer),
            bias_initializer=clone_initializer(layer.bias_initializer),
            dtype=layer.dtype_policy,
            name=name,
        )
    dense.build((layer.num_blocks, None, layer.width // layer.num_blocks))
    return dense


def apply_blocks(dense, inputs):
    """Applies a block-diagonal map to `[B, T, D]`; returns `[B, T, num_blocks * units]`.

    The product is made with the blocks as the first axis and the tokens as the second. XLA by
    itself would put the tokens last, and all that follows would read memory across them.
    """
    num_blocks, _, units = dense.bias.shape
    width = inputs.shape[-1] // num_blocks
    tokens, in_rows = flatten_tokens(inputs)
    blocks = ops.transpose(ops.reshape(tokens, (-1, num_blocks, width)), (1, 0, 2))
    outputs = ops.transpose(dense(blocks), (1, 0, 2))
    return in_rows(ops.reshape(outputs, (-1, num_blocks * units)))
