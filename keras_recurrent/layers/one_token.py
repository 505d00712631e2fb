"""Steps of generation by fused operations, which read each weight once, on NVIDIA GPUs."""

import contextlib
import threading
from collections.abc import Callable

import keras
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.backends.constants import MAX_FUSED_ROWS
from keras_recurrent.layers import quantized
from keras_recurrent.layers.rms_norm import RMSNorm
from keras_recurrent.layers.tokens import Tokens
from keras_recurrent.ops.gated_linear_unit import gated_linear_unit
from keras_recurrent.ops.norm_linear import norm_linear
from keras_recurrent.ops.norm_quantized_linear import norm_quantized_linear

if dispatch.BACKEND == "torch":
    from keras_recurrent.layers.torch_calls import product_with_bias


class _Writing(threading.local):
    now = False


_writing = _Writing()


@contextlib.contextmanager
def writing():
    """Inside, gradients are not asked for, and blocks may take their fused steps."""
    before, _writing.now = _writing.now, True
    try:
        yield
    finally:
        _writing.now = before


def wanted(inputs):
    """Whether a block should take a fused step for inputs [B, T, D]."""
    return _writing.now and inputs.shape[1] == 1 and has_kernels(inputs)


def has_kernels(inputs):
    """Whether the kernels for NVIDIA GPUs serve here, if only in the interpreter."""
    if "triton" not in dispatch.serving() or keras.distribution.distribution() is not None:
        return False
    if dispatch.chosen_name():
        return dispatch.chosen_name() == "triton"
    if dispatch.BACKEND == "jax":
        import jax

        return jax.default_backend() == "gpu"
    return inputs.is_cuda


def unfused_blocks(model):
    """`{block: why it takes no fused step}` of a language model; empty where none could."""
    if not has_kernels(model.variables[0].value):
        return {}
    reasons = ((b.name, b.unfused_because()) for b in model.backbone.transformer_layers)
    return {name: reason for name, reason in reasons if reason is not None}


def first(reasons):
    """The first that is not None; None if all are."""
    return next((reason for reason in reasons if reason is not None), None)


def because_of_map(layer, kind=keras.layers.Dense):
    """Why a fused step does not compute a linear map, of Keras's class `kind`; None if it does."""
    if type(layer) is not kind:
        return f"`{layer.name}` is of class {type(layer).__name__}, not `{kind.__name__}` of Keras"
    if kind is keras.layers.Dense and layer.activation is not keras.activations.linear:
        return f"`{layer.name}` has an activation of its own"
    if layer.lora_enabled:
        return f"`{layer.name}` has a LoRA adapter"
    if layer.quantization_mode is not None:
        if kind is not keras.layers.Dense:
            return f"`{layer.name}`, of class {kind.__name__}, is quantized"
        return quantized.because_of(layer) or because_of_call(layer)
    return because_of_call(layer)


def because_of_maps(*together):
    """As `because_of_map`, for lists of `Dense` of which each is one operation."""
    for layers in together:
        reason = first(map(because_of_map, layers)) or quantized.because_of_difference(layers)
        if reason is not None:
            return reason
    return None


def because_of_norm(norm):
    """Why a fused step does not compute a norm; None if it does."""
    if type(norm) is not RMSNorm:
        return f"`{norm.name}` is of class {type(norm).__name__}, not `RMSNorm`"
    return because_of_call(norm)


def because_of_call(layer):
    """Whether something else runs in place of the layer's `call`; None if it does not.

    Hooks of torch are not looked at: where there are some, nobody may ask for fused steps.
    """
    return f"`{layer.name}` has a `call` of its own" if "call" in vars(layer) else None


def plain_weights(layers):
    """What `ops.norm_linear` takes of the weights of `Dense`."""
    return {"kernels": [ops.cast(dense.kernel, dense.compute_dtype) for dense in layers]}


def linear(x, layers, norm=None, gate=None, residual=None):
    """The outputs of some `Dense` for x [B, D], behind a norm, as in `ops.norm_linear`.

    Quantized ones, which are alike, are those of `ops.norm_quantized_linear`, with a gate two.
    """
    operation: Callable = norm_linear
    weights, most = plain_weights, MAX_FUSED_ROWS
    if layers[0].quantization_mode is not None:
        operation, weights, most = norm_quantized_linear, quantized.weights, 1
    if x.shape[0] <= most:
        return operation(
            x,
            **weights(layers),
            biases=[dense.bias if dense.use_bias else None for dense in layers],
            scale=None if norm is None else norm.factor(),
            epsilon=None if norm is None else norm.epsilon,
            gate=gate,
            residual=residual,
        )
    x = x if norm is None else norm(x)
    if gate is not None:
        to_gate, to_up, *layers = layers
        x = gated_linear_unit(_map(to_gate, x), _map(to_up, x), activation=gate)
    outputs = [_map(dense, x) for dense in layers] or [x]
    return outputs if residual is None else [outputs[0] + residual]


def _map(dense, x):
    """dense(x) for x [B, D]."""
    if dispatch.BACKEND != "torch" or not dense.use_bias or dense.quantization_mode is not None:
        return dense(x)
    return product_with_bias(dense, ops.cast(x, dense.compute_dtype))


def embedding(token_ids, layer, scale, state=None):
    """What an `Embedding` of Keras makes of token ids [B, 1], times a scale, by one launch.

    None where that does not compute it, and on JAX, where XLA does as well. With a state that goes
    on by a real token, `(x, tokens, places)`, the others as of `tokens.find_tokens`.
    """
    if dispatch.BACKEND != "torch" or not _writing.now or layer.mask_zero:
        return None
    token_ids = ops.convert_to_tensor(token_ids)
    if not wanted(token_ids):
        return None
    if layer.lora_enabled or layer.quantization_mode is not None or because_of_call(layer):
        return None
    from keras_recurrent.backends.triton._decoding import embedding as kernels

    table, token = ops.convert_to_tensor(layer.embeddings), token_ids[:, 0]
    given = [(state or {}).get(name) for name in ("segment", "position")]
    if kernels.unsupported(table, token, *given) is not None:
        return None
    scale = 1.0 if scale is None else scale
    x, kind, position, *after = kernels.embedding(table, token, scale, layer.compute_dtype, *given)
    if state is None:
        return x[:, None]
    tokens = Tokens(kind[:, None], None if position is None else position[:, None])
    places = zip(("segment", "position"), after, strict=True)
    return x[:, None], tokens, {name: place for name, place in places if place is not None}


def logits(hidden_states, layer):
    """The logits of hidden states [B, 1, D] by a `ReversibleEmbedding`, by few launches.

    One caps them, and one makes those of a row by a quantized matrix, of which Keras makes floats.
    None where the layer itself does: where it has neither, and of a cap on JAX.
    """
    quantized_row = layer.quantization_mode is not None
    cap = layer.logit_soft_cap if dispatch.BACKEND == "torch" else None
    if (cap is None and not quantized_row) or not wanted(hidden_states):
        return None
    if quantized_row:
        if hidden_states.shape[0] > 1 or quantized.because_of_logits(layer) is not None:
            return None
        hidden = ops.cast(hidden_states[:, 0], layer.compute_dtype)
        (found,) = norm_quantized_linear(hidden, **quantized.weights_of_logits(layer))
    else:
        dtype = layer.reverse_dtype or layer.compute_dtype
        hidden = ops.cast(hidden_states[:, 0], dtype)
        kernel = ops.transpose(layer.embeddings) if layer.tie_weights else layer.reverse_embeddings
        found = ops.matmul(hidden, ops.cast(kernel, dtype))
    return _capped(found, layer.logit_soft_cap)[:, None]


def _capped(found, cap):
    """Logits [B, V] with a soft cap, or None for none."""
    if cap is None:
        return found
    if dispatch.BACKEND == "torch":
        from keras_recurrent.backends.triton._decoding import soft_cap as kernels

        if kernels.unsupported(found) is None:
            return kernels.soft_cap(found, cap)
    return ops.multiply(ops.tanh(ops.divide(found, cap)), cap)


def mlp(x, layer, norm, gate):
    """x [B, D], and what a gated multilayer perceptron makes of it behind a norm."""
    maps = [layer.gate_proj, layer.up_proj, layer.down_proj]
    if all(dense.quantization_mode is None for dense in maps):
        (y,) = linear(x, maps, norm, gate=gate, residual=x)
        return y
    (y,) = linear(x, maps[:2], norm, gate=gate)
    (y,) = linear(y, maps[2:], residual=x)
    return y


def kinds(tokens):
    """What each row's only token is, int8 [B]; None if all go on or begin from nothing."""
    return None if tokens.kind is None else tokens.kind[:, 0]
