"""What the definitions share: the kinds of a token, and the precision of their arguments."""

import numpy as np

GOES_ON, STARTS, PADDING = 0, 1, 2


def prepare(dtype, *arrays):
    """The arrays in the precision of the computation."""
    return [np.asarray(array).astype(dtype) for array in arrays]


def token_kinds(x, token_kind):
    """The kind of each token as [B, T, 1], beside x: [B, T, D]."""
    if token_kind is None:
        return np.zeros((*x.shape[:2], 1), np.int8)
    return np.asarray(token_kind)[:, :, None]


def first_state(x, initial_state, dtype):
    """The [B, D] before the first token of x: [B, T, D]; zeros when nothing is given."""
    if initial_state is None:
        return np.zeros((x.shape[0], x.shape[2]), dtype)
    return np.asarray(initial_state, dtype)


def sigmoid(z):
    return np.exp(-np.logaddexp(0, -z))
