"""h_t = a_t * h_{t-1} + x_t over axis 1, without a loop over time.

Time is cut into blocks of a fixed number of tokens. Inside all blocks at once, neighbours are
joined, then pairs, then fours. The last tokens of the blocks make a sequence of their own, which is
scanned in the same way and gives the state before each block. If the length is not known, there are
as many levels of this as 2^30 tokens need. Decays are multiplied, never divided by one another.
"""

from keras import ops

LONGEST = 2**30


def scan(a, x, state, block=64, multiply=ops.multiply, longest=LONGEST):
    """All h, with the shape of x.

    Args:
        a, x: `[B, T, ...]`; `a` may have sizes of 1 behind T where x has more.
        state: `[B, ...]`, what comes before the first token.
        block: tokens of a block, a power of two.
        multiply: the product of two decays, or of a decay and a state.
        longest: the largest length, if the length is not known.
    """
    length = x.shape[1]
    longest = longest if not isinstance(length, int) else length
    if longest == 1:
        return x + multiply(a, ops.expand_dims(state, 1))
    a, x = blocks(a, block), blocks(x, block)
    shift = 1
    while shift < block:
        later, earlier = a[:, :, shift:], a[:, :, :-shift]
        added = multiply(later, x[:, :, :-shift])
        x = ops.concatenate([x[:, :, :shift], x[:, :, shift:] + added], axis=2)
        a = ops.concatenate([a[:, :, :shift], multiply(later, earlier)], axis=2)
        shift *= 2
    after = scan(a[:, :, -1], x[:, :, -1], state, block, multiply, -(-longest // block))
    before = ops.expand_dims(before_each(after, state), 2)
    return unblocked(x + multiply(a, before), length)


def before_each(after, state):
    """The states before each block, from those after each, and the first."""
    return ops.concatenate([ops.expand_dims(state, 1), after[:, :-1]], axis=1)


def blocks(x, size):
    """x [B, T, ...] as [B, N, size, ...], with zeros at the end."""
    batch, length, *rest = ops.shape(x)
    count = (length + size - 1) // size
    zeros = ops.zeros((batch, size - 1, *rest), x.dtype)
    x = ops.concatenate([x, zeros], axis=1)[:, : count * size]
    return ops.reshape(x, (batch, count, size, *rest))


def unblocked(x, length):
    """The opposite of `blocks`."""
    batch, count, size, *rest = ops.shape(x)
    return ops.reshape(x, (batch, count * size, *rest))[:, :length]
