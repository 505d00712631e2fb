"""h_t = a_t * h_{t-1} + x_t as a tree: what the recurrences of this folder stand on."""

import jax
import jax.numpy as jnp

# Tokens that one node of the tree joins. More make a flatter tree, but XLA fuses the steps of a
# node and computes its first ones again for each output, which costs RADIX^2 / 2.
RADIX = 8


def scan(a, x, initial, reverse=False):
    """All the states of the recurrence. a, x: [B, T, D]; initial: [B, D]; returns [B, T, D].

    From the last token to the first when `reverse`. Only products of decays are formed, never
    their quotients, so that any decay, 0 included, is safe.
    """
    batch, length, channels = x.shape
    if length <= RADIX:
        return _steps(a, x, initial, reverse, axis=1)

    nodes = -(-length // RADIX)
    tail = ((0, 0), (0, nodes * RADIX - length), (0, 0))
    # A tail of a = 1, x = 0 hands the state on as it is.
    a = jnp.pad(a, tail, constant_values=1).reshape(batch, nodes, RADIX, channels)
    x = jnp.pad(x, tail).reshape(batch, nodes, RADIX, channels)

    decay, total = jnp.ones_like(a[:, :, 0]), jnp.zeros_like(x[:, :, 0])
    for j in _order(RADIX, reverse):
        decay, total = a[:, :, j] * decay, a[:, :, j] * total + x[:, :, j]
    after = scan(decay, total, initial, reverse)
    before = shift(after, initial, reverse)
    return _steps(a, x, before, reverse, axis=2).reshape(batch, -1, channels)[:, :length]


def shift(h, first, reverse=False):
    """What stood before each h_t: [B, T, D], `first` before the first of them."""
    if reverse:
        return jnp.concatenate([h[:, 1:], first[:, None]], axis=1)
    return jnp.concatenate([first[:, None], h[:, :-1]], axis=1)


def gradient(a, d_output, d_final):
    """g_t = d_output_t + a_{t+1} g_{t+1}, the gradient of x_t, and of what stood before h_1."""
    next_a = shift(a, jnp.ones_like(a[:, 0]), reverse=True)
    g = scan(next_a, d_output, d_final, reverse=True)
    return g, a[:, 0] * g[:, 0]


def _steps(a, x, h, reverse, axis):
    states = []
    for j in _order(x.shape[axis], reverse):
        h = jax.lax.index_in_dim(a, j, axis, False) * h + jax.lax.index_in_dim(x, j, axis, False)
        states.append(h)
    return jnp.stack(states[::-1] if reverse else states, axis)


def _order(length, reverse):
    return range(length - 1, -1, -1) if reverse else range(length)
