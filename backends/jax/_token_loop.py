"""Gated linear attention token by token, for heads so small that chunks cost more on CPUs.

A token of all sequences and heads is one step of a loop. Sequences and heads are the last axis, and
sums over a head are written out, so that XLA vectorizes each step. For the same reason each term of
a sum slices its row from the token itself: where a fused loop uses one value at several indices,
XLA loads the index of the token for each element, and does not vectorize.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from ._common import applied_decay, filled, kind_masks


def gated_linear_attention(q, k, v, log_f, initial_state, token_kind):
    """Computes the operation of this name, with an initial state of the accumulation dtype."""
    starts, padding = kind_masks(token_kind)
    q, values, log_f = (x.astype(initial_state.dtype) for x in (q, v, log_f))
    k = _tied_keys(log_f) if k is None else k.astype(initial_state.dtype)
    q, k, values = (filled(x, padding, 0) for x in (q, k, values))
    f = applied_decay(jnp.exp(log_f), starts, padding)
    output, state = _outputs(initial_state, q, k, values, f)
    return output.astype(v.dtype), state


@jax.custom_jvp
def _tied_keys(log_f):
    """Returns 1 - f, the keys if `k` is None."""
    return -jnp.expm1(log_f)


# JAX would compute f as (f - 1) + 1, which loses the digits of small decays.
_tied_keys.defjvps(lambda d, _, log_f: -d * jnp.exp(log_f))


@jax.custom_vjp
def _outputs(state, q, k, v, f):
    """Returns the output [B, T, H, V] and the state after the tokens.

    q, k, f: [B, T, H, K]; v: [B, T, H, V]; state: [B, H, K, V], of one dtype.
    """
    q_t, k_t, v_t, f_t = _tokens_first(q, k, v, f)

    def step(t, loop):
        state, output = loop
        state = _next(state, t, k_t, v_t, f_t)
        return state, _put(output, t, _sum(_rows(q_t, t), state))

    last, output = jax.lax.fori_loop(0, len(q_t), step, (_heads_last(state), jnp.zeros_like(v_t)))
    return _tokens_second(output, q), _heads_first(last, state)


def _gradients(arguments, d_results):
    """Returns the gradients of the initial state, q, k, v and f.

    With the gradient G_t = q_t do_t^T + f_{t+1} G_{t+1} of S_t they are

        dq = S do,  dk = G v,  dv = G^T k,  df = Σ_v G S_{t-1}
    """
    (state, q, k, v, f), (d_output, d_last) = arguments, d_results
    q_t, k_t, v_t, f_t, d_output = _tokens_first(q, k, v, f, d_output)
    length, first = len(q_t), _heads_last(state)

    def forward(t, loop):
        state, states, d_q = loop
        state = _next(state, t, k_t, v_t, f_t)
        d_q = _put(d_q, t, _sum(_rows(d_output, t), state.swapaxes(0, 1)))
        return state, _put(states, t + 1, state), d_q

    states = jnp.zeros((length + 1, *first.shape), first.dtype).at[0].set(first)
    _, states, d_q = jax.lax.fori_loop(0, length, forward, (first, states, jnp.zeros_like(q_t)))
    f_next = jnp.concatenate([f_t[1:], jnp.ones_like(f_t[:1])])

    def backward(i, loop):
        g, d_k, d_v, d_f = loop
        t = length - 1 - i
        g = _next(g, t, q_t, d_output, f_next)
        d_k = _put(d_k, t, _sum(_rows(v_t, t), g.swapaxes(0, 1)))
        d_v = _put(d_v, t, _sum(_rows(k_t, t), g))
        d_f = _put(d_f, t, _sum(_rows(states.swapaxes(1, 2), t), g.swapaxes(0, 1)))
        return g, d_k, d_v, d_f

    start = _heads_last(d_last), *map(jnp.zeros_like, (k_t, v_t, f_t))
    g, *found = jax.lax.fori_loop(0, length, backward, start)
    d_state = _heads_first(f_t[0][:, None] * g, state)
    return d_state, *(_tokens_second(d, q) for d in (d_q, *found))


_outputs.defvjp(lambda *arguments: (_outputs(*arguments), arguments), _gradients)


def _next(state, t, k, v, f):
    k, v, f = (_token(x, t) for x in (k, v, f))
    return f[:, None] * state + k[:, None] * v


def _token(x, t):
    return jax.lax.dynamic_index_in_dim(x, t, keepdims=False, allow_negative_indices=False)


def _rows(x, t):
    """The rows of a token, each sliced from x: [T, K, ...]."""
    return [_token(x[:, i], t) for i in range(x.shape[1])]


def _sum(rows, state):
    """The sum of the rows of `state`, each multiplied by one of `rows`."""
    return functools.reduce(operator.add, (row * state[i] for i, row in enumerate(rows)))


def _put(x, t, token):
    return jax.lax.dynamic_update_index_in_dim(x, token, t, axis=0, allow_negative_indices=False)


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
