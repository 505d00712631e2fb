"""Calls of an inner layer without the overhead of Keras's `__call__`, on torch.

`RecurrentBlock(32)` on 8×8 tokens takes 2.2 ms forward on one busy CPU core, and 4.8 ms if
`is_plain` returns False.
"""

import keras
import numpy as np
import torch
from keras import ops
from torch.nn.modules import module as torch_module

from keras_recurrent.checks.dtypes import weights_scope

_PACKAGE = "keras_recurrent."
_CALL = keras.layers.Dense.call
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_REPLACED = {"call", "forward"}  # on an instance, as accelerate does


def is_plain(outer, layer, inputs):
    """Returns True if `call_plain(layer, inputs)` is equivalent to `layer(inputs)` in `outer`.

    Other layers may need `training` or a mask from Keras, or override `__call__`: only layers of
    this package and `keras.layers.Dense` are plain, if they have the dtypes of the outer layer and
    are not recomputed. The dtypes are read from `layer`, because a `DTypePolicyMap` has policies by
    path.
    """
    remat = layer._remat_mode  # the `keras.RematScope` in which the layer was created
    return (
        type(inputs) is torch.Tensor
        and (type(layer) is keras.layers.Dense or type(layer).__module__.startswith(_PACKAGE))
        and layer.built
        and layer.compute_dtype == outer.compute_dtype
        and layer.variable_dtype == outer.variable_dtype
        and inputs.dtype is getattr(torch, layer.compute_dtype)
        and layer.quantization_mode is None
        and layer.activity_regularizer is None
        and (remat is None or remat.mode is None)
        and not has_hooks(layer)
        and "forward" not in vars(layer)  # replaced by accelerate
        and keras.distribution.distribution() is None
    )


def call_plain(layer, inputs, **kwargs):
    """Computes `layer.call(inputs, **kwargs)`, with the weight casts of Keras's `__call__`.

    A `Dense` is computed by `matrix_product`.
    """
    with weights_scope(layer):
        if type(layer) is keras.layers.Dense and _is_matrix_product(layer, inputs):
            return matrix_product(layer, inputs)
        return layer.call(inputs, **kwargs)


def _is_matrix_product(dense, inputs):
    """Returns True if Keras's `call` computes a product in the dtype of the inputs, and a sum.

    The `call` must not be replaced. Keras multiplies float64, and float16 on CPUs, as float32, and
    under `torch.autocast` it casts the product back before the sum.
    """
    as_float32 = inputs.dtype is torch.float64 or (
        inputs.dtype is torch.float16 and inputs.device.type == "cpu"
    )
    return (
        getattr(dense.call, "__func__", None) is _CALL
        and dense.autocast
        and not as_float32
        and not _under_autocast(inputs.device.type)
    )


def _under_autocast(device_type):
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def matrix_product(dense, x):
    """Computes dense(x) for x [..., D] with a matrix product that adds the bias before rounding.

    A separate sum would read and write all outputs again, and read the broadcast bias one number at
    a time. In decoding at batch size 1, it takes a third of the time of the products. `keras.ops`
    would take more host time than the launch.
    """
    kernel, bias, x = _weights_and_inputs(dense, x)
    y = torch.matmul(x, kernel) if bias is None else _affine(x, kernel, bias)
    return y if dense.activation is None else dense.activation(y)


def _affine(x, kernel, bias):
    """Computes x kernel + bias for x [..., D] and a matrix in one operator."""
    y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), kernel)
    return y.view(*x.shape[:-1], y.shape[-1])


def multiplies_directly(x):
    """Returns True if x is a plain tensor outside of `torch.autocast`, for products of blocks."""
    return type(x) is torch.Tensor and not _under_autocast(x.device.type)


def block_diagonal_product(dense, x):
    """Computes a block-diagonal layer of x [..., D] as a product with its whole matrix.

    dense: an `EinsumDense` with a kernel [blocks, block width, units], in the dtype of x.
    """
    kernel, bias, x = _weights_and_inputs(dense, x)
    num_blocks, width, units = kernel.shape
    blocks = torch.diag_embed(kernel.permute(1, 2, 0), dim1=0, dim2=2)
    return _affine(x, blocks.view(num_blocks * width, num_blocks * units), bias.view(-1))


def _weights_and_inputs(dense, x):
    """Returns a layer's kernel and bias, or None, in the dtype of x, and x on Keras's device."""
    # Keras's property takes as long as a launch, to look for quantization.
    kernel = dense.kernel if dense.lora_enabled else dense._kernel.value
    bias = None if dense.bias is None else dense.bias.value.to(x.dtype)
    x = x if x.device == kernel.device else ops.convert_to_tensor(x)
    return kernel.to(x.dtype), bias, x


_copies: dict = {}  # {(numbers, dtype, device): tensor}; kept because CUDA graphs read them


def copy_to_device(numbers, dtype, device):
    """Returns a tensor of a few numbers, without waiting for the GPU as `torch.tensor` does.

    A CUDA graph cannot copy from the host. During a capture, the function returns the tensor of
    the first earlier call with the same arguments, which must exist.
    """
    key = tuple(numbers), dtype, device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _copies[key]
    copy = torch.from_numpy(np.array(numbers, dtype)).to(device, non_blocking=True)
    if type(copy) is torch.Tensor:  # not a tensor of a tracer
        _copies.setdefault(key, copy)
    return copy


def has_hooks(module):
    """Returns True if the module has a hook, or torch has one for all modules."""
    found = vars(module)
    for kind in _HOOKS:
        if found[kind]:
            return True
    return torch_module._has_any_global_hook()


def modules_of(model):
    """Returns the torch modules of a model once each: its layers and their submodules."""
    found: dict = {}
    pending = list(model._flatten_layers())
    while pending:
        module = pending.pop()
        if module is not None and module not in found:
            found[module] = None
            pending.extend(module._modules.values())
    return found


def hook_reason(modules, with_gradients=False):
    """Reason other code runs before, after or in place of a call of these modules, or None.

    with_gradients: boolean, True includes hooks of gradients, which only run in training.
    """
    is_global = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    if is_global or (with_gradients and torch_module._has_any_global_hook()):
        return "torch has a hook for all modules"
    kinds = _HOOKS if with_gradients else _HOOKS[:2]
    for module in modules:
        found = vars(module)
        if any(found[kind] for kind in kinds) or not _REPLACED.isdisjoint(found):
            name = getattr(module, "name", type(module).__name__)
            return f"`{name}` has a hook, or an instance attribute `call` or `forward`"
    return None
