"""Helpers shared by the definitions."""

import numpy as np

from ..constants import CONTINUES


def cast(dtype, *arrays):
    """Casts the arrays to the precision of the computation."""
    return [np.asarray(array).astype(dtype) for array in arrays]


def broadcast_kinds(token_kind, like):
    """The kind of each token as [B, T, 1, ...], with as many axes as `like` [B, T, ...]."""
    if token_kind is None:
        token_kind = np.full(like.shape[:2], CONTINUES, np.int8)
    return np.expand_dims(token_kind, tuple(range(2, like.ndim)))


def state_or_zeros(initial_state, shape, dtype):
    """The initial state in `dtype`; None means zeros."""
    if initial_state is None:
        return np.zeros(shape, dtype)
    return np.asarray(initial_state, dtype)


def sigmoid(z):
    return np.exp(-np.logaddexp(0, -z))


def group_squares(x, size):
    """The sums of the squares of x [..., N] in groups of `size` channels: [..., ceil(N / size)]."""
    squares = np.pad(x * x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
    return squares.reshape(*x.shape[:-1], -1, size).sum(-1)


def product(a, b):
    """a b for a [..., K] and b [K, N].

    In 32 bits, products are added one after another, as in a loop: the order in which a library
    adds them, and thus the error of a long sum, depends on the CPU.
    """
    if a.dtype != np.float32:
        return a @ b
    total = np.zeros((*a.shape[:-1], b.shape[1]), np.float32)
    for column, row in zip(np.moveaxis(a, -1, 0), b, strict=True):
        total += column[..., None] * row
    return total
