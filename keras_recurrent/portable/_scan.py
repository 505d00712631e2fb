"""h_t = a_t * h_{t-1} + x_t over axis 1.

Time is split into blocks of a fixed number of tokens. All blocks are scanned in parallel, combining
neighbors, then pairs, then fours. The last tokens of the blocks form a shorter sequence, whose scan
gives the state before each block. For an unknown length, a loop over time replaces all this. Decays
are multiplied, never divided by one another.
"""

from keras import ops

from keras_recurrent.portable import _loop


def scan(a, x, state, block=64, multiply=ops.multiply):
    """Returns all h, with the shape of x.

    Args:
        a, x: `[B, T, ...]`; after T, sizes of `a` may be 1 where those of x are larger.
        state: `[B, ...]`, the state before the first token.
        block: the maximum number of tokens in a block, a power of two.
        multiply: the product of two decays, or of a decay and a state.
    """
    if _loop.is_needed(x):
        h, _ = _loop.loop(lambda h, a, x: 2 * (multiply(a, h) + x,), state, (a, x))
        return h
    batch, length, *rest = ops.shape(x)
    if length == 1:
        return x + multiply(a, ops.expand_dims(state, 1))
    block = min(block, power_of_two(length))
    a, x = split_blocks(a, block), split_blocks(x, block)
    shift = 1
    while shift < block:
        later, earlier = a[:, shift:], a[:, :-shift]
        added = multiply(later, x[:, :-shift])
        x = ops.concatenate([x[:, :shift], x[:, shift:] + added], axis=1)
        a = ops.concatenate([a[:, :shift], multiply(later, earlier)], axis=1)
        shift *= 2
    decays, ends = _last_tokens(a, batch, length, block), _last_tokens(x, batch, length, block)
    after = scan(decays, ends, state, block, multiply)
    before = ops.reshape(states_before(after, state), (-1, 1, *rest))
    return merge_blocks(x + multiply(a, before), batch, length)


def _last_tokens(x, batch, length, block):
    """Returns the last tokens of blocks, [B, N, ...]."""
    last = ops.copy(x[:, -1])
    return ops.reshape(last, (batch, _count(length, block), *ops.shape(last)[1:]))


def states_before(after, state):
    """Returns the states before each block from the states after each and the initial state."""
    return ops.concatenate([ops.expand_dims(state, 1), after], axis=1)[:, :-1]


def power_of_two(length):
    """Returns the smallest power of two that is at least `length`."""
    return 1 << (length - 1).bit_length()


def split_blocks(x, size):
    """Reshapes x [B, T, ...] to [B N, size, ...], with zeros at the end of each sequence."""
    batch, length, *rest = ops.shape(x)
    zeros = ops.zeros((batch, _count(length, size) * size - length, *rest), x.dtype)
    return ops.reshape(ops.concatenate([x, zeros], axis=1), (-1, size, *rest))


def merge_blocks(x, batch, length):
    """Inverse of `split_blocks`."""
    size, *rest = ops.shape(x)[1:]
    return ops.reshape(x, (batch, _count(length, size) * size, *rest))[:, :length]


def _count(length, size):
    return (length + size - 1) // size
