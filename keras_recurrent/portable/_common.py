"""What the operations of this folder share: dtypes, token kinds, exact logarithms."""

from keras import ops

from keras_recurrent.backends.constants import PADDING, STARTS
from keras_recurrent.checks.dtypes import accumulation_dtype, dtype_of


def sum_dtype(*tensors):
    """The dtype of states and sums, of tensors or Nones."""
    return accumulation_dtype(*(dtype_of(t) for t in tensors if t is not None))


def state_or_zeros(initial_state, shape, dtype):
    return ops.zeros(shape, dtype) if initial_state is None else ops.cast(initial_state, dtype)


def kinds(token_kind, ndim):
    """Whether tokens are starts, and padding: two tensors [B, T, 1, ...], or twice None."""
    if token_kind is None:
        return None, None
    token_kind = ops.cast(token_kind, "int32")  # runtimes compare few dtypes
    for _ in range(ndim - 2):
        token_kind = ops.expand_dims(token_kind, -1)
    return ops.equal(token_kind, STARTS), ops.equal(token_kind, PADDING)


def where(condition, value, tensor):
    """`value`, a number, where the condition holds, else the tensor; None: nowhere."""
    if condition is None:
        return tensor
    return ops.where(condition, ops.cast(value, tensor.dtype), tensor)


def applied_decay(a, starts, padding):
    """The decay of the state before a token: 0 at a start, 1 at padding."""
    return where(padding, 1.0, where(starts, 0.0, a))


# Formats have no `expm1`, `log1p` and exact `softplus`, and make of them what loses the digits of
# small numbers. These keep all but the last few.


def minus_expm1(x):
    """1 - exp(x) for x <= 0, as 2 t / (1 + t) with t = tanh(-x / 2)."""
    t = ops.tanh(-0.5 * x)
    return 2.0 * t / (1.0 + t)


def log1p(x):
    """log(1 + x) for x >= 0, as log(u) x / (u - 1) with u = 1 + x, whose errors cancel."""
    u = 1.0 + x
    d = u - 1.0
    tiny = ops.equal(d, 0.0)
    return ops.where(tiny, x, ops.log(u) * (x / ops.where(tiny, ops.ones_like(d), d)))


def softplus(x):
    return ops.relu(x) + log1p(ops.exp(-ops.abs(x)))
