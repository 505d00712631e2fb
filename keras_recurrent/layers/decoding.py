"""Decoding steps with fused operations, which read each weight once, on NVIDIA GPUs.

A layer with such a step defines `fused_step`, and `unfused_reason`, which returns the reason why
the step cannot run for this layer, or None. `ResidualBlock.stream` takes the fused steps of a block
if `can_fuse(inputs)` and its `unfused_reason` is None. `linear`, and the operations of
`ops/decoding_steps.py`, go through `dispatch`, which falls back to `portable/` if the Triton
kernel does not support the arguments.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.backends.constants import MAX_FUSED_ROWS, max_fused_rows
from keras_recurrent.checks.dtypes import dtype_of, sum_dtype
from keras_recurrent.devices import jax_steps
from keras_recurrent.layers import quantized
from keras_recurrent.layers.rms_norm import RMSNorm
from keras_recurrent.ops.decoding_steps import norm_linear, norm_quantized_linear
from keras_recurrent.ops.gated_linear_unit import gated_linear_unit

if dispatch.BACKEND == "torch":
    from keras_recurrent.layers.torch_calls import matrix_product


class _Scope(threading.local):
    active = False


_scope = _Scope()


@contextlib.contextmanager
def decoding_scope():
    """Context manager in which layers may call fused operations, which have no gradients."""
    before, _scope.active = _scope.active, True
    try:
        yield
    finally:
        _scope.active = before


def is_active():
    """Returns True inside a `decoding_scope`."""
    return _scope.active


def can_fuse(inputs):
    """Returns True if a layer should take its fused step for inputs [B, T, ...]."""
    if not _scope.active or inputs.shape[1] > 1 or not dispatch.uses_triton_kernels(inputs):
        return False
    # On several devices, each operation of the step must take the rows, in any dtype.
    return keras.distribution.distribution() is None or inputs.shape[0] <= MAX_FUSED_ROWS


def first_reason(*reasons):
    """Returns the first reason that is not None, or None."""
    return next((reason for reason in reasons if reason is not None), None)


def class_reason(layer, cls):
    """Reason why a fused step of `cls` cannot compute `layer`, or None.

    Torch hooks are not checked: no fused step is requested for a model that has any.
    """
    if type(layer) is not cls:
        return f"`{layer.name}` is of class {type(layer).__name__}, not {cls.__name__}"
    return f"`{layer.name}` has a custom `call`" if "call" in vars(layer) else None


def norm_reason(norm):
    """Reason why a fused step cannot compute a norm, or None."""
    reason = class_reason(norm, RMSNorm)
    if reason is None and norm.num_groups > 1:
        return f"`{norm.name}` normalizes groups of channels"
    return reason


def dense_reason(layer, cls=keras.layers.Dense):
    """Reason why a fused step cannot compute a layer of Keras's class `cls`, or None."""
    reason = class_reason(layer, cls)
    if reason is not None:
        return reason
    if cls is keras.layers.Dense and layer.activation is not keras.activations.linear:
        return f"`{layer.name}` has an activation"
    if layer.lora_enabled:
        return f"`{layer.name}` has a LoRA adapter"
    if layer.quantization_mode is None:
        return None
    if cls is not keras.layers.Dense:
        return f"`{layer.name}`, of class {cls.__name__}, is quantized"
    return quantized.dense_reason(layer)


def denses_reason(*groups):
    """Reason why fused operations cannot compute groups of `Dense`, one operation each, or None."""
    for group in groups:
        reason = first_reason(*map(dense_reason, group)) or quantized.difference_reason(group)
        if reason is not None:
            return reason
        for layer in group:
            is_distributed = keras.distribution.distribution() is not None
            if is_distributed and layer.quantization_mode is not None:
                return f"`{layer.name}` is quantized, and a `keras.distribution` is set"
    return None


def split_heads_reason(layer):
    """Reason why query heads and their key and value heads may be on different devices, or None."""
    num_key_value_heads = layer.k_proj.units // layer.head_dim
    of_queries, of_keys = (
        jax_steps.variable_axes(dense.kernel)[1:] for dense in (layer.q_proj, layer.k_proj)
    )
    if num_key_value_heads == 1 or of_queries == of_keys:
        return None
    return (
        f"`{layer.name}` has {num_key_value_heads} heads of keys and values, which are not split "
        "like its queries; pass `num_key_value_heads`, which the model axis must divide, to "
        "`get_layout_map`"
    )


class Stream(NamedTuple):
    """The residual stream of a decoding step.

    Attributes:
        x: `[B, D]`.
        scaled: x multiplied by the weight of the next norm, or None.
        squares: `[B, U]`, sums of squares of x, or None.
    """

    x: Any
    scaled: Any = None
    squares: Any = None


def add_linear(stream, x, layers, norm=None, residual=None, **options):
    """Adds the product of `linear` to a `Stream`, or to `residual`; returns the next `Stream`."""
    residual = stream.x if residual is None else residual
    return Stream(*linear(x, layers, norm, residual=residual, **options))


def linear(
    x,
    layers,
    norm=None,
    gate=None,
    residual=None,
    squares=None,
    activation=None,
    output_scale=None,
    next_norm=None,
):
    """Applies an optional RMSNorm and up to four `Dense` to x [B, D]; returns all outputs.

    If the rows of the last kernel are split among devices (see `jax_steps`), the outputs are summed
    over devices.

    Args:
        x: `[B, D]`, or a `Stream`.
        layers: `Dense` layers, all quantized in the same way or not at all.
        norm: the `RMSNorm` of x, or None.
        gate: activation of a gated unit of the first two layers, or None. A third layer is applied
            to its result; quantized layers must be exactly two.
        residual: `[B, N]`, added to the only output, or None.
        squares: `[B, ...]`, sums of squares of each row, computed before x was multiplied by the
            weight of `norm` and by gates. None: x is the input of `norm`.
        activation: "squared_relu", applied to the outputs, or None; None for quantized layers.
        output_scale: number, factor of the outputs before the residual is added, or None.
        next_norm: the `RMSNorm` that follows the only output, or None. The result may then end with
            the `scaled` and `squares` of the next `Stream`, which save a launch for several rows.
    """
    if isinstance(x, Stream):
        x, squares = (x.x, None) if x.squares is None else (x.scaled, x.squares)
    if squares is not None:
        squares = ops.reshape(squares, (x.shape[0], -1))
    if not jax_steps.has_part(layers[-1].kernel, 0):
        ends = {"residual": residual, "output_scale": output_scale, "next_norm": next_norm}
        ends["activation"] = activation
        return _linear(x, layers, _biases(layers), norm, gate, squares, **ends)
    *biases, last_bias = _biases(layers)
    (y,) = _linear(x, layers, [*biases, None], norm, gate, squares)
    is_split = norm is not None and x.shape[1] != norm.scale.shape[0]
    y = _sum_of_normalized(y, x, squares, norm) if is_split else jax_steps.sum_over_devices(y)
    y = ops.cast(y, sum_dtype(y))
    if last_bias is not None:
        y = y + ops.cast(last_bias, y.dtype)
    residual = None if residual is None else ops.cast(residual, y.dtype)
    return [ops.cast(_finish(y, activation, output_scale, residual), x.dtype)]


def _linear(
    x,
    layers,
    biases,
    norm,
    gate,
    squares,
    residual=None,
    activation=None,
    output_scale=None,
    next_norm=None,
):
    """Computes `linear` from these biases, on one device."""
    operation: Callable = norm_linear
    weights, max_rows, further = _weights, max_fused_rows(dtype_of(x)), {"activation": activation}
    if dispatch.BACKEND == "torch" and dtype_of(x) in ("float32", "bfloat16"):
        max_rows = x.shape[0]  # its kernels surround the products of more rows
    if layers[0].quantization_mode is not None:
        operation, weights, max_rows, further = norm_quantized_linear, quantized.weights, 1, {}
    # In float16, x that is multiplied by a weight but not normalized may be out of range.
    elif next_norm is not None and x.shape[0] > 1 and dtype_of(x) != "float16":
        further["next_scale"] = next_norm.factor()
    if x.shape[0] <= max_rows:
        return operation(
            x=x,
            **weights(layers),
            biases=biases,
            scale=None if norm is None or squares is not None else norm.factor(),
            epsilon=None if norm is None else norm.epsilon,
            gate=gate,
            residual=residual,
            squares=squares,
            output_scale=output_scale,
            **further,
        )
    if squares is not None:
        mean = ops.sum(squares, axis=1, keepdims=True) / x.shape[1]
        x = ops.cast(x * ops.rsqrt(mean + norm.epsilon), x.dtype)
    elif norm is not None:
        x = norm(x)
    if gate is not None:
        to_gate, to_up, *layers = layers
        x = gated_linear_unit(_apply(to_gate, x), _apply(to_up, x), activation=gate)
    outputs = [_apply(dense, x) for dense in layers] or [x]
    return [_finish(y, activation, output_scale, residual) for y in outputs]


def _finish(y, activation, output_scale, residual):
    if activation is not None:
        y = ops.square(ops.relu(y))
    if output_scale is not None:
        y = y * output_scale
    return y if residual is None else y + residual


def _sum_of_normalized(y, x, squares, norm):
    """Returns the linear layer of norm(x), from the results of all devices.

    The result of a device is normalized by its own channels only. Squares and outputs are summed
    over devices together.
    """
    y, squares = ops.cast(y, norm.state_dtype), ops.cast(squares, norm.state_dtype)
    squares = ops.sum(squares, axis=-1, keepdims=True)
    y = y * ops.sqrt(squares / x.shape[1] + norm.epsilon)
    total = jax_steps.sum_over_devices(ops.concatenate([y, squares], axis=-1))
    return total[:, :-1] / ops.sqrt(total[:, -1:] / norm.scale.shape[0] + norm.epsilon)


def _biases(layers):
    return [_bias(dense) if dense.use_bias else None for dense in layers]


def _bias(dense):
    if not jax_steps.has_part(dense.kernel, 1):
        return dense.bias
    return jax_steps.local_part(dense.bias, ops.convert_to_tensor(dense.kernel).shape[1])


def _weights(layers):
    return {"kernels": [ops.cast(dense.kernel, dense.compute_dtype) for dense in layers]}


def _apply(dense, x):
    """Computes dense(x) for x [B, D]."""
    if dispatch.BACKEND != "torch" or dense.quantization_mode is not None:
        return dense(x)
    return matrix_product(dense, ops.cast(x, dense.compute_dtype))


def heads(x, head_dim, dtype):
    """Returns x [B, H K] as heads [B, H, K] of a dtype."""
    return ops.cast(ops.reshape(x, (x.shape[0], -1, head_dim)), dtype)


def head_norms(q_norm, k_norm):
    """Returns the `RMSNorm`s of heads, or Nones, as arguments of an operation."""
    if q_norm is None:
        return {}
    scales = {"q_scale": q_norm.factor(), "k_scale": k_norm.factor()}
    return {**scales, "epsilon": q_norm.epsilon}


def token_kinds(tokens):
    """Returns the kind of the only token of each sequence, int8 [B], or None."""
    return None if tokens.kind is None else tokens.kind[:, 0]
