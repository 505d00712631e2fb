"""h_t = a_t * h_{t-1} + x_t over axis 1.

Time is cut into blocks of a fixed number of tokens. Inside all blocks at once, neighbours are
joined, then pairs, then fours. The last tokens of the blocks make a sequence of their own, which is
scanned in the same way and gives the state before each block. If the length is not known, a loop
takes the place of all this. Decays are multiplied, never divided by one another.
"""

from keras import ops

from keras_recurrent.portable import _loop


def scan(a, x, state, block=64, multiply=ops.multiply):
    """All h, with the shape of x.

    Args:
        a, x: `[B, T, ...]`; `a` may have sizes of 1 behind T where x has more.
        state: `[B, ...]`, what comes before the first token.
        block: the most tokens of a block, a power of two.
        multiply: the product of two decays, or of a decay and a state.
    """
    if _loop.is_needed(x):
        h, _ = _loop.loop(lambda h, a, x: 2 * (multiply(a, h) + x,), state, (a, x))
        return h
    batch, length, *rest = ops.shape(x)
    if length == 1:
        return x + multiply(a, ops.expand_dims(state, 1))
    block = min(block, power_of_two(length))
    a, x = blocks(a, block), blocks(x, block)
    shift = 1
    while shift < block:
        later, earlier = a[:, shift:], a[:, :-shift]
        added = multiply(later, x[:, :-shift])
        x = ops.concatenate([x[:, :shift], x[:, shift:] + added], axis=1)
        a = ops.concatenate([a[:, :shift], multiply(later, earlier)], axis=1)
        shift *= 2
    decays, ends = _ends(a, batch, length, block), _ends(x, batch, length, block)
    after = scan(decays, ends, state, block, multiply)
    before = ops.reshape(before_each(after, state), (-1, 1, *rest))
    return unblocked(x + multiply(a, before), batch, length)


def _ends(x, batch, length, block):
    """The last tokens of blocks, [B, N, ...]."""
    last = ops.copy(x[:, -1])
    return ops.reshape(last, (batch, _count(length, block), *ops.shape(last)[1:]))


def before_each(after, state):
    """The states before each block, from those after each, and the first."""
    return ops.concatenate([ops.expand_dims(state, 1), after], axis=1)[:, :-1]


def power_of_two(length):
    """The smallest that is not below a length."""
    return 1 << (length - 1).bit_length()


def blocks(x, size):
    """x [B, T, ...] as [B N, size, ...], with zeros at the end of each row."""
    batch, length, *rest = ops.shape(x)
    zeros = ops.zeros((batch, _count(length, size) * size - length, *rest), x.dtype)
    return ops.reshape(ops.concatenate([x, zeros], axis=1), (-1, size, *rest))


def unblocked(x, batch, length):
    """The opposite of `blocks`."""
    size, *rest = ops.shape(x)[1:]
    return ops.reshape(x, (batch, _count(length, size) * size, *rest))[:, :length]


def _count(length, size):
    return (length + size - 1) // size
