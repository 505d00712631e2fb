"""Block-diagonal linear maps, the form of the gates."""

import keras
from keras import ops

from keras_recurrent.layers.initializers import clone_initializer


def block_diagonal_dense(layer, name, units):
    """A gate of `layer`: `num_blocks` maps of their own, from blocks of its width to `units`.

    An `EinsumDense`, so that LoRA and quantization reach it. A kernel of shape
    `[num_blocks, block width, units]` is drawn with the block width as its fan-in.
    """
    # Recomputed with its layer, if at all, not a second time by itself.
    with keras.RematScope(mode=None):
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
    """`[B, T, D]` through a block-diagonal map, blocks side by side again.

    Blocks go first, tokens follow: left to itself, XLA would put the tokens last and read all that
    comes after across them.
    """
    num_blocks, _, units = dense.bias.shape
    width = inputs.shape[-1] // num_blocks
    blocks = ops.transpose(ops.reshape(inputs, (-1, num_blocks, width)), (1, 0, 2))
    outputs = ops.transpose(dense(blocks), (1, 0, 2))
    return ops.reshape(outputs, (*ops.shape(inputs)[:2], num_blocks * units))
