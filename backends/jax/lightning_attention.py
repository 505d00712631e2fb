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
    chunked,
    grouped,
    inner_products,
    plan,
    product,
    states,
    transposed,
    unchunked,
    ungrouped,
)
from keras_recurrent.backends.jax._tokens import PADDING, STARTS, accumulate, first_state

CHUNK = 64


def unsupported(q, k, v, log_decay, initial_state=None, token_kind=None):
    return None


def forward(q, k, v, log_decay, initial_state, token_kind):
    if q.shape[1] == 1:
        return _one_token(q, k, v, log_decay, initial_state, token_kind)
    cut, kinds = _cut(q, v, token_kind)

    def group(state, tokens):
        *tokens, kind = tokens
        between, from_start, to_end, total = _decays(log_decay, kind, cut, state.dtype)
        q, k, w = _in_chunks(tokens, kind, cut, state.dtype)
        before, state = states(total, product(transposed(k * to_end), w), state)
        output = product(q * from_start, before) + product(inner_products(q, k) * between, w)
        return state, unchunked(output).astype(v.dtype)

    tokens = (*grouped((q, k, v), cut), kinds)
    final_state, output = jax.lax.scan(group, initial_state, tokens)
    return ungrouped(output, q.shape[1]), final_state


def _one_token(q, k, v, log_decay, state, token_kind):
    cut = plan(q, v, CHUNK)
    *_, decay = _decays(log_decay, token_kind, cut, state.dtype)
    q, k, w = (x[:, :, 0, 0, :, None] for x in _in_chunks((q, k, v), token_kind, cut, state.dtype))
    state = decay[:, :, 0] * state + k * transposed(w)
    return jnp.sum(q * state, axis=2)[:, None].astype(v.dtype), state


def backward(q, k, v, log_decay, initial_state, token_kind, _, d_output, d_final):
    dtype = initial_state.dtype
    # The gradient of q is the same operation, that of k and v is its mirror image in time.
    d_q, _ = forward(d_output, v, k.astype(dtype), log_decay, transposed(initial_state), token_kind)
    cut, kinds = _cut(q, v, token_kind)

    def group(g, tokens):
        *tokens, kind = tokens
        between, from_start, to_end, total = _decays(log_decay, kind, cut, dtype)
        q, k, w, d_output = _in_chunks(tokens, kind, cut, dtype)
        after, g = states(total, product(transposed(q * from_start), d_output), g, reverse=True)
        d_k = product(w, transposed(after)) * to_end
        d_k += product(transposed(inner_products(d_output, w) * between), q)
        d_v = product(k * to_end, after)
        d_v += product(transposed(inner_products(q, k) * between), d_output)
        return g, (unchunked(d_k).astype(tokens[1].dtype), unchunked(d_v).astype(v.dtype))

    tokens = (*grouped((q, k, v, d_output), cut), kinds)
    d_initial, gradients = jax.lax.scan(group, d_final, tokens, reverse=True)
    found = [d_q.astype(q.dtype), *(ungrouped(d, q.shape[1]) for d in gradients)]
    if token_kind is not None:
        padding = (token_kind == PADDING)[:, :, None, None]
        found = [jnp.where(padding, jnp.zeros_like(d), d) for d in found]
    return *found, jnp.zeros_like(log_decay), d_initial, None


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


def _cut(q, v, token_kind):
    """How to cut time, and the kinds of all groups; None where every token goes on."""
    cut, batch, length = plan(q, v, CHUNK), q.shape[0], q.shape[1]
    missing = cut.tokens - length
    if missing and token_kind is None:
        token_kind = jnp.zeros((batch, length), jnp.int8)
    if missing:
        token_kind = jnp.pad(token_kind, [(0, 0), (0, missing)], constant_values=PADDING)
    return cut, *grouped((token_kind,), cut)


def _in_chunks(tensors, kind, cut, dtype):
    """Tensors of a group as [B, H, chunks, C, K], with zeros at padding."""
    tensors = [x.astype(dtype) for x in tensors]
    if kind is not None:
        padding = (kind == PADDING)[:, :, None, None]
        tensors = [jnp.where(padding, 0, x) for x in tensors]
    return [chunked(x, cut) for x in tensors]


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
