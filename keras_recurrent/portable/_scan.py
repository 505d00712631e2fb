"""h_t = a_t * h_{t-1} + x_t over axis 1.

Time is split into blocks of eight tokens. All blocks are computed together: first from a zero
state, which gives the contribution of a block to the state and the product of its decays. The scan
of these totals gives the state before each block, from which all tokens are computed. For an
unknown length, a loop over time replaces all this. Decays are multiplied, never divided by one
another.
"""

import functools

from keras import ops

from keras_recurrent.portable import _loop

BLOCK = 8


def scan(a, x, state, multiply=ops.multiply):
    """Returns all h, with the shape of x.

    Args:
        a, x: `[B, T, ...]`; after T, sizes of `a` may be 1 where those of x are larger.
        state: `[B, ...]`, the state before the first token.
        multiply: the product of two decays, or of a decay and a state.
    """
    if _loop.is_needed(x):
        h, _ = _loop.loop(lambda h, a, x: 2 * (multiply(a, h) + x,), state, (a, x))
        return h
    batch, length, *rest = ops.shape(x)
    if length <= BLOCK:
        steps = _steps(ops.unstack(a, axis=1), ops.unstack(x, axis=1), state, multiply)
        return ops.stack(steps, axis=1)
    a, x = (ops.unstack(split_blocks(t, BLOCK), axis=1) for t in (a, x))
    totals = functools.reduce(multiply, a), _steps(a[1:], x[1:], x[0], multiply)[-1]
    a_blocks, x_blocks = (
        ops.reshape(t, (batch, _count(length, BLOCK), *ops.shape(t)[1:])) for t in totals
    )
    before = states_before(scan(a_blocks, x_blocks, state, multiply), state)
    h = ops.stack(_steps(a, x, ops.reshape(before, (-1, *rest)), multiply), axis=1)
    return merge_blocks(h, batch, length)


def _steps(a, x, state, multiply):
    """Returns h for lists of tensors, one for each token."""
    states = []
    for a_t, x_t in zip(a, x, strict=True):
        state = multiply(a_t, state) + x_t
        states.append(state)
    return states


def states_before(after, state):
    """Returns the states before each block from the states after each and the initial state."""
    return ops.concatenate([ops.expand_dims(state, 1), after], axis=1)[:, :-1]


def power_of_two(length):
    """Returns the smallest power of two that is at least `length`."""
    return 1 << (length - 1).bit_length()


def split_blocks(x, size):
    """Reshapes x [B, T, ...] to [B N, size, ...], with zeros at the end of each sequence."""
    batch, length, *rest = ops.shape(x)
    missing = -length % size
    if missing:
        x = ops.concatenate([x, ops.zeros((batch, missing, *rest), x.dtype)], axis=1)
    return ops.reshape(x, (-1, size, *rest))


def merge_blocks(x, batch, length):
    """Inverse of `split_blocks`."""
    size, *rest = ops.shape(x)[1:]
    return ops.reshape(x, (batch, _count(length, size) * size, *rest))[:, :length]


def _count(length, size):
    return (length + size - 1) // size
