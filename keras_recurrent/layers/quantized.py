"""Quantized Keras layers as arguments of fused operations, and unsupported reasons."""

import contextlib
import weakref

import keras
import numpy as np
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.backends.constants import MIN_SCALE_BLOCK, ROW_EPSILON

BITS = {"int8": 8, "int4": 4}
# Value range of the default `keras.quantizers.AbsMaxQuantizer` of layers.
_VALUES = (-127, 127)
# {layer: (value of `g_idx`, its version, True if blocks contain consecutive channels)}
_consecutive: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def dense_reason(layer):
    """Reason why a fused step cannot compute a quantized `Dense`, or None."""
    mode, name = layer.quantization_mode, f"`{layer.name}`"
    if mode not in BITS:
        return f"{name} is quantized ({mode}), for which there is no fused operation"
    reason = _quantizer_reason(layer)
    if reason is not None:
        return reason
    if layer.units * BITS[mode] % 32:
        return f"{name} has {layer.units} columns; {mode} needs a multiple of {32 // BITS[mode]}"
    size = block_size(layer)
    if size is not None and (size < MIN_SCALE_BLOCK or size & (size - 1)):
        return (
            f"{name} is quantized in blocks of {size} channels; a power of 2, at least "
            f"{MIN_SCALE_BLOCK}, is needed"
        )
    if size is not None and not _has_consecutive_blocks(layer, size):
        return f"the channels of a block of `{layer.name}` are not consecutive (`g_idx`)"
    return None


def difference_reason(layers):
    """Reason why one operation cannot compute several `Dense`, or None."""
    kinds = [_kind(layer) for layer in layers]
    for layer, kind in zip(layers, kinds, strict=True):
        if kind != kinds[0]:
            return (
                f"`{layers[0].name}` and `{layer.name}` share one operation, but have different "
                "quantization"
            )
    return None


def block_size(layer):
    """Returns the number of channels that share a scale in a column; None if all channels do."""
    size = getattr(layer, "_int4_block_size", None)
    return None if size is None or size == -1 else size


def weights(layers):
    """Returns the weights of quantized `Dense` as arguments of `norm_quantized_linear`."""
    size = block_size(layers[0])
    return {
        "kernels": [ops.convert_to_tensor(dense._kernel) for dense in layers],
        "kernel_scales": [ops.cast(dense.kernel_scale, dense.compute_dtype) for dense in layers],
        "kernel_zeros": [None if size is None else dense.kernel_zero for dense in layers],
        "bits": BITS[layers[0].quantization_mode],
        "block_size": size,
        "row_dtype": _row_dtype(layers[0]),
    }


def logits_reason(layer):
    """Reason why a fused operation cannot compute logits with a quantized embedding, or None."""
    name = f"`{layer.name}`"
    if layer.quantization_mode != "int8" or layer.tie_weights:
        return f"{name} computes logits with a matrix that is tied, or packed along channels"
    reason = _quantizer_reason(layer, axes=(None, (-1,)))
    if reason is not None:
        return reason
    if layer.input_dim % 4:
        return f"{name} has {layer.input_dim} columns; a multiple of 4 is needed"
    return None


def logits_weights(layer):
    """Returns a quantized `ReversibleEmbedding` as arguments of `norm_quantized_linear`."""
    scale = ops.cast(layer.reverse_embeddings_scale, layer.compute_dtype)
    return {
        "kernels": [ops.convert_to_tensor(layer.reverse_embeddings)],
        "kernel_scales": [scale],
        "kernel_zeros": [None],
        "biases": [None],
        "row_dtype": _row_dtype(layer),
    }


def _row_dtype(layer):
    """Returns the dtype of the inputs that a layer quantizes, or None."""
    return None if layer.inputs_quantizer is None else layer.compute_dtype


def _kind(layer):
    mode = layer.quantization_mode
    if mode is None:
        return None
    return mode, block_size(layer), layer.inputs_quantizer is not None


def _quantizer_reason(layer, axes=None):
    """Reason why a fused step cannot quantize the inputs of a layer, or None.

    axes: the allowed axes of the quantizer. None: any, because the layer passes one in each call.
    """
    quantizer = layer.inputs_quantizer
    if quantizer is None or (_is_plain(quantizer) and (axes is None or quantizer.axis in axes)):
        return None
    return f"`{layer.name}` quantizes its inputs with another quantizer than the default"


def _is_plain(quantizer):
    return (
        type(quantizer) is keras.quantizers.AbsMaxQuantizer
        and tuple(quantizer.value_range) == _VALUES
        and quantizer.epsilon == ROW_EPSILON
        and quantizer.output_dtype == "int8"
    )


def _has_consecutive_blocks(layer, size):
    """Returns True if blocks contain consecutive channels.

    Reads `g_idx` once for each of its values, because a step must not wait for the device.
    """
    # In a traced program, `g_idx.value` is a symbol.
    value = layer.g_idx._value
    version = getattr(value, "_version", None)  # torch increments it when a tensor is modified
    known = _consecutive.get(layer)
    if known is None or known[0] is not value or known[1] != version:
        with _suspend_tracing():
            found = ops.convert_to_numpy(value)
        consecutive = np.array_equal(found, np.arange(len(found)) // size)
        _consecutive[layer] = known = value, version, consecutive
    return known[2]


def _suspend_tracing():
    if dispatch.BACKEND != "torch":
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()
