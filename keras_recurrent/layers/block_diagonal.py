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
            "bthi,hij->bthj",
            output_shape=(None, layer.num_blocks, units),
            bias_axes="hj",
            kernel_initializer=clone_initializer(layer.kernel_initializer),
            bias_initializer=clone_initializer(layer.bias_initializer),
            dtype=layer.dtype_policy,
            name=name,
        )
    dense.build((None, None, layer.num_blocks, layer.width // layer.num_blocks))
    return dense


def apply_blocks(dense, inputs):
    """`[B, T, D]` through a block-diagonal map, blocks side by side again."""
    batch, length, width = ops.shape(inputs)
    num_blocks, units = dense.bias.shape
    blocks = ops.reshape(inputs, (batch, length, num_blocks, width // num_blocks))
    return ops.reshape(dense(blocks), (batch, length, num_blocks * units))
