"""Dtypes and kinds of tokens, shared by the operations of this folder."""

import jax.numpy as jnp

GOES_ON, STARTS, PADDING = 0, 1, 2


def accumulate(*tensors):
    """The dtype of states and sums: float64 if any argument is, else float32."""
    given = [t for t in tensors if t is not None]
    return jnp.float64 if any(t.dtype == jnp.float64 for t in given) else jnp.float32


def first_state(initial_state, shape, dtype):
    return jnp.zeros(shape, dtype) if initial_state is None else initial_state


def drop_padding(token_kind, *tensors):
    """The tensors [B, T, ...] with zeros at padding, whatever stood there."""
    if token_kind is None:
        return tensors
    padding = token_kind == PADDING
    return [jnp.where(jnp.expand_dims(padding, range(2, t.ndim)), 0, t) for t in tensors]


def effective_decay(token_kind, a):
    """The decay each token really applies: none of the past at a start, all of it at padding."""
    if token_kind is None:
        return a
    kind = token_kind[:, :, None]
    return jnp.where(kind == GOES_ON, a, jnp.where(kind == STARTS, 0, 1).astype(a.dtype))


def where_going_on(token_kind, gradient):
    """The gradient of a decay, which only a token that goes on has."""
    if token_kind is None:
        return gradient
    return jnp.where((token_kind == GOES_ON)[:, :, None], gradient, 0)


def sum_over_tokens(x):
    """The sum [D] of x [B, T, D], first by halves: XLA fuses those with what computes x."""
    while x.shape[1] % 2 == 0 and x.shape[1] > 8:
        x = x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :]
    return jnp.sum(x, axis=(0, 1))
