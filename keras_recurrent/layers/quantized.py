"""Quantized layers of Keras as arguments of fused operations, and reasons why some are not."""

import contextlib
import weakref

import keras
import numpy as np
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.backends.constants import MIN_SCALE_BLOCK, ROW_EPSILON

BITS = {"int8": 8, "int4": 4}
# Of `keras.quantizers.AbsMaxQuantizer`, as layers make it where nobody asks for another.
_VALUES = (-127, 127)
_in_order: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def dense_reason(layer):
    """Reason why a fused step does not compute a quantized `Dense`, or None."""
    mode, name = layer.quantization_mode, f"`{layer.name}`"
    if mode not in BITS:
        return f"{name} is quantized ({mode}), for which there is no fused operation"
    reason = _quantizer_reason(layer)
    if reason is not None:
        return reason
    if layer.units * BITS[mode] % 32:
        return f"{name} has {layer.units} columns, no multiple of {32 // BITS[mode]} as for {mode}"
    size = block_size(layer)
    if size is not None and (size < MIN_SCALE_BLOCK or size & (size - 1)):
        return (
            f"{name} is quantized in blocks of {size} channels, no power of 2 from "
            f"{MIN_SCALE_BLOCK} on"
        )
    if size is not None and not _has_blocks_in_order(layer, size):
        return f"the blocks of `{layer.name}` are not of channels that follow one another (`g_idx`)"
    return None


def difference_reason(layers):
    """Reason why one operation does not compute several `Dense`, or None."""
    kinds = [_kind(layer) for layer in layers]
    for layer, kind in zip(layers, kinds, strict=True):
        if kind != kinds[0]:
            return (
                f"`{layers[0].name}` and `{layer.name}` are one operation, and not quantized alike"
            )
    return None


def block_size(layer):
    """The channels that share a scale in each column of a layer; None if all channels do."""
    size = getattr(layer, "_int4_block_size", None)
    return None if size is None or size == -1 else size


def weights(layers):
    """The weights of quantized `Dense` as arguments of `norm_quantized_linear`."""
    size = block_size(layers[0])
    return {
        "kernels": [ops.convert_to_tensor(dense._kernel) for dense in layers],
        "kernel_scales": [ops.cast(dense.kernel_scale, dense.compute_dtype) for dense in layers],
        "kernel_zeros": None if size is None else [dense.kernel_zero for dense in layers],
        "bits": BITS[layers[0].quantization_mode],
        "block_size": size,
        "quantize_row": layers[0].inputs_quantizer is not None,
    }


def logits_reason(layer):
    """Reason why no fused operation computes logits with a quantized embedding, or None."""
    name = f"`{layer.name}`"
    if layer.quantization_mode != "int8" or layer.tie_weights:
        return f"{name} makes logits by a matrix that is tied, or packed along channels"
    reason = _quantizer_reason(layer, axes=(None, (-1,)))
    if reason is not None:
        return reason
    if layer.input_dim % 4:
        return f"{name} has {layer.input_dim} columns, no multiple of 4"
    return None


def logits_weights(layer):
    """The weights of a quantized `ReversibleEmbedding` as arguments of `norm_quantized_linear`."""
    scale = ops.cast(layer.reverse_embeddings_scale, layer.compute_dtype)
    return {
        "kernels": [ops.convert_to_tensor(layer.reverse_embeddings)],
        "kernel_scales": [scale],
        "kernel_zeros": None,
        "biases": [None],
        "quantize_row": layer.inputs_quantizer is not None,
    }


def _kind(layer):
    mode = layer.quantization_mode
    if mode is None:
        return None
    return mode, block_size(layer), layer.inputs_quantizer is not None


def _quantizer_reason(layer, axes=None):
    """Reason why a fused step does not quantize the layer's inputs as it does, or None.

    axes: those that the quantizer may have; None: any, since the layer passes one at each call.
    """
    quantizer = layer.inputs_quantizer
    if quantizer is None or (_is_plain(quantizer) and (axes is None or quantizer.axis in axes)):
        return None
    return f"`{layer.name}` quantizes its inputs by another than Keras's AbsMaxQuantizer as it is"


def _is_plain(quantizer):
    return (
        type(quantizer) is keras.quantizers.AbsMaxQuantizer
        and tuple(quantizer.value_range) == _VALUES
        and quantizer.epsilon == ROW_EPSILON
        and quantizer.output_dtype == "int8"
    )


def _has_blocks_in_order(layer, size):
    """Reads `g_idx` once for each of its values: a step must not wait for the device."""
    # Not `g_idx.value`, which a program that is being traced replaces by a symbol.
    value = layer.g_idx._value
    version = getattr(value, "_version", None)  # torch's, which rises where a tensor is written
    known = _in_order.get(layer)
    if known is None or known[0] is not value or known[1] != version:
        with _outside_of_traces():
            found = ops.convert_to_numpy(value)
        in_order = np.array_equal(found, np.arange(len(found)) // size)
        _in_order[layer] = known = value, version, in_order
    return known[2]


def _outside_of_traces():
    if dispatch.BACKEND != "torch":
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()
