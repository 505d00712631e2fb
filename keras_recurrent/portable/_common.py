"""Helpers of this folder's operations: dtypes, token kinds, products, accurate logarithms."""

import contextlib
from typing import Any

import keras
from keras import ops

from keras_recurrent.backends.constants import PADDING, STARTS
from keras_recurrent.checks.dtypes import sum_dtype as sum_dtype

# On JAX, Keras computes these in float32 for float64, too.
_functions: Any = ops
if keras.backend.backend() == "jax":
    import jax.numpy as _functions
cos, sin, tanh = _functions.cos, _functions.sin, _functions.tanh
# Of the framework, for decoding steps, which are never exported; see `log1p` below.
framework_expm1 = _functions.expm1


def sigmoid(x):
    """σ(x); on TensorFlow with a gradient that keeps its digits where σ(x) is nearly 1."""
    if keras.backend.backend() != "tensorflow":
        return ops.sigmoid(x)
    positive = x > 0
    e = ops.exp(ops.where(positive, -x, x))
    return ops.where(positive, ops.ones_like(e), e) / (1.0 + e)


def framework_softplus(x):
    return ops.relu(x) + _functions.log1p(ops.exp(-ops.abs(x)))


def state_or_zeros(initial_state, shape, dtype):
    return ops.zeros(shape, dtype) if initial_state is None else ops.cast(initial_state, dtype)


def token_masks(token_kind, ndim):
    """Returns masks of starts and of padding [B, T, 1, ...], or None, None."""
    if token_kind is None:
        return None, None
    token_kind = ops.cast(token_kind, "int32")  # runtimes compare only some dtypes
    for _ in range(ndim - 2):
        token_kind = ops.expand_dims(token_kind, -1)
    return ops.equal(token_kind, STARTS), ops.equal(token_kind, PADDING)


def fill_where(condition, value, tensor):
    """Replaces the elements of a tensor where `condition` is True by the number `value`.

    condition: a boolean tensor, or None, which replaces nothing.
    """
    if condition is None:
        return tensor
    return ops.where(condition, ops.cast(value, tensor.dtype), tensor)


def applied_decay(a, starts, padding):
    """Returns the decays of the state before each token: 0 at a start, 1 at padding."""
    return fill_where(padding, 1.0, fill_where(starts, 0.0, a))


def group_squares(x, size):
    """Returns the sums of squares in groups of `size` channels of the last axis."""
    squares = ops.pad(x * x, [(0, 0)] * (len(x.shape) - 1) + [(0, -x.shape[-1] % size)])
    return ops.sum(ops.reshape(squares, (*x.shape[:-1], -1, size)), axis=-1)


def matmul(a, b):
    """a b in full precision, unlike that of TPUs, and of `ops.matmul` with float64 on torch."""
    with _full_precision():
        return a @ b


def _full_precision():
    if keras.backend.backend() != "jax":
        return contextlib.nullcontext()
    import jax

    return jax.default_matmul_precision("highest")


# Formats have no `expm1`, `log1p` and accurate `softplus`, and replace them by formulas that lose
# the digits of small numbers. These functions keep all but the last few digits.


def minus_expm1(x):
    """1 - exp(x) for x <= 0, near 0 as 2 t / (1 + t) with t = tanh(-x / 2).

    Elsewhere, the derivative of t would lose digits.
    """
    t = tanh(-0.5 * x)
    return ops.where(x < -0.5, 1.0 - ops.exp(x), 2.0 * t / (1.0 + t))


def log1p(x):
    """log(1 + x) for x >= 0, as log(u) x / (u - 1) with u = 1 + x, whose errors cancel.

    The constant 1 is a tensor, because graphs of TensorFlow would otherwise replace log(1 + x) by
    `log1p`, and the error of u - 1 would not cancel.
    """
    one = ops.cast(x >= 0.0, x.dtype)
    u = one + x
    d = u - one
    tiny = ops.equal(d, 0.0)
    return ops.where(tiny, x, ops.log(u) * (x / ops.where(tiny, ops.ones_like(d), d)))


def softplus(x):
    return ops.relu(x) + log1p(ops.exp(-ops.abs(x)))
