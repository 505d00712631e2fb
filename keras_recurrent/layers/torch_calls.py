"""Calls of a layer inside another one that need nothing of what else Keras does around a call."""

import contextlib

import keras
import torch
from keras import ops

from keras_recurrent.backends.torch._hooks import has_hooks
from keras_recurrent.compat import AutocastScope, get_autocast_scope

_PACKAGE = "keras_recurrent."
_CALL = keras.layers.Dense.call


def is_plain(outer, layer, inputs):
    """Whether `call_plain(layer, inputs)` is all there is to `layer(inputs)` in `outer`'s call.

    Layers of others may ask Keras for `training` or a mask, or do more in their `__call__`: only
    those of this package and `keras.layers.Dense` are plain, if they have the dtypes of the outer
    layer. A `DTypePolicyMap` has policies by path, which `layer` asks.
    """
    return (
        type(inputs) is torch.Tensor
        and (type(layer) is keras.layers.Dense or type(layer).__module__.startswith(_PACKAGE))
        and layer.built
        and layer.compute_dtype == outer.compute_dtype
        and layer.variable_dtype == outer.variable_dtype
        and inputs.dtype is getattr(torch, layer.compute_dtype)
        and layer.quantization_mode is None
        and layer.activity_regularizer is None
        and not has_hooks(layer)
        and "forward" not in vars(layer)  # as accelerate replaces it
        and keras.distribution.distribution() is None
    )


def call_plain(layer, inputs, **kwargs):
    """`layer.call(inputs, **kwargs)`, with weights cast as Keras casts them around a call.

    The product of a `Dense` adds its bias.
    """
    with weights_scope(layer):
        if type(layer) is keras.layers.Dense and _product_can_add_bias(layer, inputs):
            return product_with_bias(layer, inputs)
        return layer.call(inputs, **kwargs)


def _product_can_add_bias(dense, inputs):
    """Whether all that Keras does is a product in the dtype of the inputs, and a sum.

    Nobody has put another `call` in the place of Keras's. Keras multiplies float64, and float16 on
    CPUs, as float32, and under `torch.autocast` it casts the product back before it adds.
    """
    as_float32 = inputs.dtype is torch.float64 or (
        inputs.dtype is torch.float16 and inputs.device.type == "cpu"
    )
    return (
        dense.bias is not None
        and getattr(dense.call, "__func__", None) is _CALL
        and dense.autocast
        and not as_float32
        and not _under_autocast(inputs.device.type)
    )


def _under_autocast(device_type):
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def product_with_bias(dense, x):
    """dense(x) for x [..., D], whose product of matrices adds the bias before it rounds.

    A sum of its own reads and writes all outputs once more, and the bias, which is broadcast, one
    number at a time: where one row of a text is written, it takes a third as long as the products.
    """
    x = ops.convert_to_tensor(x)  # on Keras's device
    kernel, bias = (ops.cast(w, dense.compute_dtype) for w in (dense.kernel, dense.bias))
    y = torch.nn.functional.linear(x.contiguous(), kernel.T, bias)  # else torch adds it afterwards
    return y if dense.activation is None else dense.activation(y)


def weights_scope(layer):
    """The context in which Keras calls `layer`: the dtype that weights are cast to.

    The enclosing scope may have another dtype, as where a layer calls a method of an inner layer.
    """
    dtype = layer.compute_dtype if layer.autocast else None
    enclosing = get_autocast_scope()
    if enclosing is None:
        is_needed = layer.compute_dtype != layer.variable_dtype
    else:
        is_needed = enclosing.dtype != dtype
    return AutocastScope(dtype) if is_needed else contextlib.nullcontext()
