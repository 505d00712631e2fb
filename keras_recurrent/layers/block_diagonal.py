"""Block-diagonal linear layers, used as gates."""

import keras
from keras import ops

from keras_recurrent.devices.jax_layouts import flatten_tokens
from keras_recurrent.dispatch import BACKEND

if BACKEND == "torch":
    from keras_recurrent.layers.torch_calls import (
        block_diagonal_product,
        has_hooks,
        multiplies_directly,
    )

WIDEST_WHOLE_MATRIX = 64  # widest inputs of layers that multiply by a matrix with zeros


def block_diagonal_dense(layer, name, units):
    """Builds a gate of `layer`: a linear layer with `num_blocks` blocks of `units` outputs each.

    The gate is an `EinsumDense`, so LoRA and quantization apply to it. Its kernel has the shape
    `[num_blocks, block width, units]` and is initialized with the block width as its fan-in.
    """
    dense = layer.make_sublayer(
        keras.layers.EinsumDense,
        "hni,hij->hnj",
        output_shape=(None, units),
        bias_axes="hj",
        kernel_initializer=layer.kernel_initializer,
        bias_initializer=layer.bias_initializer,
        name=name,
    )
    dense.build((layer.num_blocks, None, layer.width // layer.num_blocks))
    return dense


def apply_blocks(denses, inputs):
    """Applies block-diagonal layers of equal sizes to `[B, T, D]`.

    Returns a list of `[B, T, num_blocks * units]`, one for each layer.

    A narrow layer multiplies by its whole matrix, zeros included, which takes less time on CPUs
    than small blocks. Otherwise, the matrix product has the blocks as its first axis and the tokens
    as its second. By default, XLA would put the tokens last, and subsequent operations would access
    memory with a stride.
    """
    num_blocks, _, units = denses[0].bias.shape
    is_narrow = inputs.shape[-1] <= WIDEST_WHOLE_MATRIX and all(map(_is_affine, denses))
    if is_narrow and BACKEND == "torch" and multiplies_directly(inputs):
        return [block_diagonal_product(dense, inputs) for dense in denses]
    tokens, restore_time = flatten_tokens(inputs)
    if is_narrow:
        return [restore_time(_multiply_whole_matrix(dense, tokens)) for dense in denses]
    width = inputs.shape[-1] // num_blocks
    blocks = ops.transpose(ops.reshape(tokens, (-1, num_blocks, width)), (1, 0, 2))
    outputs = [ops.transpose(dense(blocks), (1, 0, 2)) for dense in denses]
    return [restore_time(ops.reshape(x, (-1, num_blocks * units))) for x in outputs]


def _multiply_whole_matrix(dense, tokens):
    num_blocks, _, units = dense.bias.shape
    width = tokens.shape[-1] // num_blocks
    # OpenVINO cannot convert TensorFlow's `eye`, and an array would be copied to the GPU.
    indices = ops.arange(0, num_blocks)  # jax2onnx needs both ends
    diagonal = ops.cast(indices[:, None] == indices, "float32")[:, None, :, None]
    blocks = ops.multiply(ops.reshape(dense.kernel, (num_blocks, width, 1, units)), diagonal)
    matrix = ops.reshape(blocks, (num_blocks * width, -1))
    return ops.matmul(tokens, matrix) + ops.reshape(dense.bias, (-1,))


def _is_affine(dense):
    """Returns True if a call of the layer only multiplies and adds its weights, in float32."""
    return (
        type(dense) is keras.layers.EinsumDense
        and "call" not in vars(dense)
        and not dense.lora_enabled
        and dense.quantization_mode is None
        and dense.compute_dtype == dense.variable_dtype == "float32"
        and dense.activity_regularizer is None
        and keras.distribution.distribution() is None
        and not (BACKEND == "torch" and has_hooks(dense))
    )
