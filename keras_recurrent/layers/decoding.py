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

import keras
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.backends.constants import MAX_FUSED_ROWS
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


def can_fuse(inputs):
    """Returns True if a layer should take its fused step for inputs [B, T, ...]."""
    return _scope.active and inputs.shape[1] == 1 and dispatch.decodes_with_kernels(inputs)


def unfused_blocks(model):
    """Returns `{block: reason}` of the blocks without a fused step; empty without kernels."""
    if not dispatch.decodes_with_kernels(model.variables[0].value):
        return {}
    reasons = ((b.name, b.unfused_reason()) for b in model.backbone.transformer_layers)
    return {name: reason for name, reason in reasons if reason is not None}


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
    return class_reason(norm, RMSNorm)


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
    return None


def linear(
    x, layers, norm=None, gate=None, residual=None, input_gate=None, output_scale=None
):  # fmt: skip
    """Applies an optional RMSNorm and up to four `Dense` to x [B, D]; returns a list of outputs.

    Args:
        x: `[B, D]`.
        layers: `Dense` layers, all quantized in the same way or not at all.
        norm: the `RMSNorm` of x, or None.
        gate: activation of a gated unit of the first two layers, or None. A third layer is applied
            to its result; quantized layers must be exactly two.
        residual: `[B, N]`, added to the only output, or None.
        input_gate: `[B, D]`, whose sigmoid multiplies the normalized x, or None.
        output_scale: number, factor of the outputs before the residual is added, or None.
    """
    operation: Callable = norm_linear
    weights, max_rows = _weights, MAX_FUSED_ROWS
    if layers[0].quantization_mode is not None:
        operation, weights, max_rows = norm_quantized_linear, quantized.weights, 1
    if x.shape[0] <= max_rows:
        return operation(
            x,
            **weights(layers),
            biases=[dense.bias if dense.use_bias else None for dense in layers],
            scale=None if norm is None else norm.factor(),
            epsilon=None if norm is None else norm.epsilon,
            gate=gate,
            residual=residual,
            input_gate=input_gate,
            output_scale=output_scale,
        )
    x = x if norm is None else norm(x)
    x = x if input_gate is None else ops.multiply(x, ops.sigmoid(input_gate))
    if gate is not None:
        to_gate, to_up, *layers = layers
        x = gated_linear_unit(_apply(to_gate, x), _apply(to_up, x), activation=gate)
    outputs = [_apply(dense, x) for dense in layers] or [x]
    if output_scale is not None:
        outputs = [y * output_scale for y in outputs]
    return outputs if residual is None else [outputs[0] + residual]


def _weights(layers):
    return {"kernels": [ops.cast(dense.kernel, dense.compute_dtype) for dense in layers]}


def _apply(dense, x):
    """Computes dense(x) for x [B, D]."""
    if dispatch.BACKEND != "torch" or not dense.use_bias or dense.quantization_mode is not None:
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
