"""The recurrence out_t = a_t * out_{t-1} + x_t and its adjoint, computed as a tree over time."""

import jax
import jax.numpy as jnp

# Tokens that one node of the tree combines. More make a flatter tree, but XLA fuses the steps of
# a node and recomputes its first ones for each output, which costs RADIX^2 / 2.
RADIX = 8


def scan(a, x, state, reverse=False):
    """out_t = a_t * out_{t-1} + x_t (t+1 for t-1 if `reverse`), starting from `state`.

    a, x: [B, T, D]; state: [B, D], all of one dtype. Decays are only multiplied, never divided by
    one another, so that any decay, 0 included, is safe.
    """
    batch, length, channels = x.shape
    if length <= RADIX:
        return _steps(a, x, state, reverse, axis=1)

    nodes = -(-length // RADIX)
    tail = ((0, 0), (0, nodes * RADIX - length), (0, 0))
    # A tail of a = 1, x = 0 leaves the state unchanged.
    a = jnp.pad(a, tail, constant_values=1).reshape(batch, nodes, RADIX, channels)
    x = jnp.pad(x, tail).reshape(batch, nodes, RADIX, channels)

    decays, totals = jnp.ones_like(a[:, :, 0]), jnp.zeros_like(x[:, :, 0])
    for j in _order(RADIX, reverse):
        decays, totals = a[:, :, j] * decays, a[:, :, j] * totals + x[:, :, j]
    ends = scan(decays, totals, state, reverse)
    entering = following(ends, state) if reverse else previous(ends, state)
    return _steps(a, x, entering, reverse, axis=2).reshape(batch, -1, channels)[:, :length]


def adjoint_scan(a, d_out, d_state):
    """The gradients g_t = d_out_t + a_{t+1} * g_{t+1} of x_t, and that of the initial state.

    g_T = d_out_T + d_state.
    """
    g = scan(following(a, jnp.ones_like(a[:, 0])), d_out, d_state, reverse=True)
    return g, a[:, 0] * g[:, 0]


def previous(tensor, first):
    """tensor_{t-1}, with `first` before the first token."""
    return jnp.concatenate([first[:, None], tensor[:, :-1]], axis=1)


def following(tensor, last):
    """tensor_{t+1}, with `last` after the last token."""
    return jnp.concatenate([tensor[:, 1:], last[:, None]], axis=1)


def _steps(a, x, state, reverse, axis):
    """Computes the recurrence step by step along an axis."""
    out = []
    for j in _order(x.shape[axis], reverse):
        a_j, x_j = (jax.lax.index_in_dim(t, j, axis, False) for t in (a, x))
        state = a_j * state + x_j
        out.append(state)
    return jnp.stack(out[::-1] if reverse else out, axis)


def _order(length, reverse):
    return range(length - 1, -1, -1) if reverse else range(length)
