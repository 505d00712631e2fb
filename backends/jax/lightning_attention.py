"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2405.17381 (Lightning Attention), and 2023, arXiv:2307.14995
(TransNormerLLM): inside a chunk (Q K^T * M) V with M_us = decay^(u - s), across chunks Q (K^T V).
Padding does not tick the decay: M and its like are powers of it by the number of real tokens
between two places, and 0 where a document begins between them.
"""

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._gradient import with_gradient
from keras_recurrent.backends.jax._linear_attention import (
    before_groups,
    chunked,
    inner_products,
    over_groups,
    plan,
    product,
    states,
    transposed,
    unchunked,
)
from keras_recurrent.backends.jax._tokens import (
    PADDING,
    STARTS,
    accumulate,
    drop_padding,
    first_state,
)

CHUNK = 64


def forward(q, k, v, log_decay, initial_state, token_kind):
    if q.shape[1] == 1:
        return _one_token(q, k, v, log_decay, initial_state, token_kind)
    cut = plan(q, v, CHUNK)

    def group(state, _, tokens, __):
        *tokens, kind = tokens
        between, from_start, to_end, total = _decays(log_decay, kind, cut, state.dtype)
        q, k, w = _in_chunks(tokens, kind, cut, state.dtype)
        before, state = states(total, product(transposed(k * to_end), w), state)
        output = product(q * from_start, before) + product(inner_products(q, k) * between, w)
        return state, unchunked(output).astype(v.dtype)

    tensors = q, k, v, _kinds(token_kind, q, cut)
    final_state, output = over_groups(group, initial_state, tensors, jnp.zeros_like(v), cut)
    return output, final_state


def _one_token(q, k, v, log_decay, state, token_kind):
    cut = plan(q, v, CHUNK)
    *_, decay = _decays(log_decay, token_kind, cut, state.dtype)
    q, k, w = (x[:, :, 0, 0, :, None] for x in _in_chunks((q, k, v), token_kind, cut, state.dtype))
    state = decay[:, :, 0] * state + k * transposed(w)
    return jnp.sum(q * state, axis=2)[:, None].astype(v.dtype), state


def backward(q, k, v, log_decay, initial_state, token_kind, _, d_output, d_final):
    dtype, cut = initial_state.dtype, plan(q, v, CHUNK)
    tensors = q, k, v, _kinds(token_kind, q, cut)

    def after(state, tokens):
        _, k, v, kind = tokens
        *_, to_end, total = _decays(log_decay, kind, cut, dtype)
        k, w = _in_chunks((k, v), kind, cut, dtype)
        return states(total, product(transposed(k * to_end), w), state)[1]

    before = before_groups(after, initial_state, tensors, cut)

    def group(g, group, tokens, held):
        *tokens, kind = tokens
        between, from_start, to_end, total = _decays(log_decay, kind, cut, dtype)
        q, k, w, d_output = _in_chunks((*tokens, held[2]), kind, cut, dtype)
        q_in, k_out = q * from_start, k * to_end
        state = jax.lax.dynamic_index_in_dim(before, group, keepdims=False)
        earlier, _ = states(total, product(transposed(k_out), w), state)
        later, g = states(total, product(transposed(q_in), d_output), g, reverse=True)

        weights, d_weights = inner_products(q, k) * between, inner_products(d_output, w) * between
        d_q = product(d_output, transposed(earlier)) * from_start + product(d_weights, k)
        d_k = product(w, transposed(later)) * to_end + product(transposed(d_weights), q)
        d_v = product(k_out, later) + product(transposed(weights), d_output)
        found = [unchunked(d).astype(x.dtype) for d, x in zip((d_q, d_k, d_v), held, strict=True)]
        return g, tuple(drop_padding(kind, *found))

    # d_v takes the place of d_output, which nobody needs any more.
    outputs = jnp.zeros_like(q), jnp.zeros_like(k), d_output
    d_initial, gradients = over_groups(group, d_final, tensors, outputs, cut, reverse=True)
    return *gradients, jnp.zeros_like(log_decay), d_initial, None


def operation(forward, backward):
    """The operation made of two functions: those of this file, or others with their arguments."""
    run = with_gradient(forward, backward, with_output=False)

    @jax.jit
    def lightning_attention(q, k, v, log_decay, initial_state=None, token_kind=None):
        """q, k: [B, T, H, K]; v: [B, T, H, V]; log_decay: [H], a constant, whose gradient is 0.

        Returns ([B, T, H, V] in v's dtype, [B, H, K, V] in float32).
        """
        dtype = accumulate(q, k, v, log_decay)
        batch, _, *sizes = q.shape
        initial_state = first_state(initial_state, (batch, *sizes, v.shape[3]), dtype)
        return run(q, k, v, log_decay, initial_state, token_kind)

    return lightning_attention


lightning_attention = operation(forward, backward)


def _kinds(token_kind, q, cut):
    """The kinds of all tokens and of the tail; None where every token goes on."""
    missing = cut.tokens - q.shape[1]
    if missing and token_kind is None:
        token_kind = jnp.zeros(q.shape[:2], jnp.int8)
    if missing:
        token_kind = jnp.pad(token_kind, [(0, 0), (0, missing)], constant_values=PADDING)
    return token_kind


def _in_chunks(tensors, kind, cut, dtype):
    """Tensors of a group as [B, H, chunks, C, K], with zeros at padding."""
    return [chunked(x, cut) for x in drop_padding(kind, *(x.astype(dtype) for x in tensors))]


def _decays(log_decay, kind, cut, dtype):
    """The decays of a group: from s to u, from the start of the chunk, to its end, and over it.

    [B, H, chunks, C, C], twice [B, H, chunks, C, 1] and [B, H, chunks, 1, 1].
    """
    log_decay = log_decay.astype(dtype)[:, None, None, None]
    if kind is None:
        count = jnp.arange(1, cut.size + 1)[:, None]
        document = jnp.zeros_like(count)
    else:
        kind = kind.reshape(-1, 1, cut.chunks, cut.size, 1)
        count = jnp.cumsum(kind != PADDING, axis=-2)
        document = jnp.cumsum(kind == STARTS, axis=-2)

    def decay(ticks, reaches):
        # Not 0 * log_decay, which is not a number if the decay is 0.
        logarithm = jnp.where(ticks == 0, 0, ticks.astype(dtype) * log_decay)
        return jnp.where(reaches, jnp.exp(logarithm), 0)

    whole, last = count[..., -1:, :], document[..., -1:, :]
    place = jnp.arange(cut.size)
    earlier = place[:, None] >= place
    return (
        decay(jnp.abs(count - transposed(count)), earlier & (document == transposed(document))),
        decay(count, document == 0),
        decay(whole - count, document == last),
        decay(whole, last == 0),
    )
