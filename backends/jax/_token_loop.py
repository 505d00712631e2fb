"""Linear attention token by token, for heads so small that chunks cost more on CPUs.

A token of all sequences and heads is one step of a loop. Sequences and heads are the last axis, and
sums over a head are written out, so that XLA vectorizes each step.
"""

import functools
import operator

import jax
import jax.numpy as jnp


def outputs(state, q, k, v, f):
    """Returns the output [B, T, H, V] and the state after the tokens.

    q, k, f: [B, T, H, K]; v: [B, T, H, V]; state: [B, H, K, V], of one dtype.
    """

    def step(state, token):
        q, k, v, f = token
        state = _next(state, k, v, f)
        return state, _sum(q[:, None] * state)

    last, output = jax.lax.scan(step, _heads_last(state), _tokens_first(q, k, v, f))
    return _tokens_second(output, q), _heads_first(last, state)


def state_after(state, _, k, v, f):
    """Returns the state after the tokens."""

    def step(state, token):
        return _next(state, *token), None

    return _heads_first(jax.lax.scan(step, _heads_last(state), _tokens_first(k, v, f))[0], state)


def gradients(state, d_output, d_last, q, k, v, f):
    """Returns the gradients of q, k, v, log f and the state before the tokens.

    With the gradient G_t = q_t do_t^T + f_{t+1} G_{t+1} of S_t they are

        dq = S do,  dk = G v,  dv = G^T k,  dlog f = f Σ_v G S_{t-1}
    """

    def forward(state, token):
        k, v, f, d_output = token
        after = _next(state, k, v, f)
        return after, (state, _sum(jnp.swapaxes(after, 0, 1) * d_output[:, None]))

    def backward(g, token):
        q, k, v, f, d_output, state = token
        g += q[:, None] * d_output
        d_k, decayed = (_sum(jnp.swapaxes(g * x, 0, 1)) for x in (v, state))
        return f[:, None] * g, (d_k, _sum(g * k[:, None]), f * decayed)

    q_t, *k_v_f, d_output = _tokens_first(q, k, v, f, d_output)
    _, (before, d_q) = jax.lax.scan(forward, _heads_last(state), (*k_v_f, d_output))
    tokens = q_t, *k_v_f, d_output, before
    g, found = jax.lax.scan(backward, _heads_last(d_last), tokens, reverse=True)
    return *(_tokens_second(d, q) for d in (d_q, *found)), _heads_first(g, state)


def _next(state, k, v, f):
    return f[:, None] * state + k[:, None] * v


def _sum(x):
    return functools.reduce(operator.add, x)


def _tokens_first(*tensors):
    """[B, T, H, K] as [T, K, B * H]."""
    return tuple(x.transpose(1, 3, 0, 2).reshape(x.shape[1], x.shape[3], -1) for x in tensors)


def _tokens_second(x, like):
    """The inverse of `_tokens_first`, for the sequences and heads of `like`.

    The barrier separates it from the computations that follow, which XLA does not vectorize in a
    transposition.
    """
    x = x.reshape(*x.shape[:2], like.shape[0], like.shape[2]).transpose(2, 0, 3, 1)
    return jax.lax.optimization_barrier(x)


def _heads_last(state):
    """[B, H, K, V] as [K, V, B * H]."""
    return state.transpose(2, 3, 0, 1).reshape(*state.shape[2:], -1)


def _heads_first(state, like):
    """The inverse of `_heads_last`."""
    return state.reshape(*state.shape[:2], *like.shape[:2]).transpose(2, 3, 0, 1)
