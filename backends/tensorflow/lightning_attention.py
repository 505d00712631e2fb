"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t, as in `backends/jax`."""

import tensorflow as tf

from ..constants import CONTINUES, PADDING, STARTS
from ._common import (
    accumulation_dtype,
    as_tensors,
    dense_gradient,
    filled,
    kind_masks,
    length_of,
    state_or_zeros,
)
from ._linear_attention import (
    chunked,
    grouped,
    inner_products,
    plan,
    scan_groups,
    states,
    unchunked,
    ungrouped,
)

CHUNK = 64


def lightning_attention(q, k, v, log_decay, initial_state=None, token_kind=None):
    """q, k: [B, T, H, K]; v: [B, T, H, V]; log_decay: [H], a constant, whose gradient is 0.

    Returns ([B, T, H, V] in v's dtype, [B, H, K, V] in float32, or float64 if an argument is
    float64).
    """
    q, k, v, log_decay, initial_state = as_tensors(q, k, v, log_decay, initial_state)
    dtype = accumulation_dtype(q, k, v, log_decay, initial_state)
    cut, heads = plan(q, v, CHUNK), q.shape[2]
    kinds = _padded_kinds(q, token_kind, cut)
    logarithm = tf.cast(log_decay, dtype)

    def chunk_group(tensors, kind):
        """Tensors of a group as [B * H * chunks, C, K], with zeros at padding."""
        _, padding = kind_masks(kind)
        return [chunked(filled(tf.cast(x, dtype), padding, 0), cut) for x in tensors]

    def decays(kind, q):
        batch = tf.shape(q)[0] // (heads * cut.chunks)
        return _decays(logarithm, kind, batch, cut)

    def step_token(q, k, v, state):
        *_, decay = _decays(logarithm, token_kind, tf.shape(q)[0], cut)
        q, k, w = (
            tf.reshape(x, [-1, heads, x.shape[2]]) for x in chunk_group((q, k, v), token_kind)
        )
        decay = tf.reshape(decay, [-1, heads, 1, 1])
        state = decay * state + k[..., None] * w[:, :, None]
        return tf.reduce_sum(q[..., None] * state, axis=2)[:, None], state

    def all_tokens(q, k, v, state):
        """The output, in the dtype of states, and the last of the states [B, H, K, V]."""

        def step(state, *tokens):
            *inputs, kind = tokens
            q, k, w = chunk_group(inputs, kind)
            between, from_start, to_end, total = decays(kind, q)
            added = tf.matmul(k * to_end, w, transpose_a=True)
            before, state = states(total, added, state, cut)
            output = tf.matmul(q * from_start, before)
            output += tf.matmul(inner_products(q, k) * between, w)
            return state, [unchunked(output, heads, cut)]

        sizes = state.shape[2:]
        inputs = [*(grouped(x, cut) for x in (q, k, v)), kinds]
        state = tf.reshape(state, [-1, *sizes])
        state, (output,) = scan_groups(step, state, inputs, cut, [dtype])
        return ungrouped(output, v), tf.reshape(state, [-1, heads, *sizes])

    @tf.custom_gradient
    def run(q, k, v, log_decay, state):
        output, final_state = (step_token if q.shape[1] == 1 else all_tokens)(q, k, v, state)
        output = tf.cast(output, v.dtype)

        def gradient(d_output, d_final_state):
            d_output = dense_gradient(d_output, output, dtype)
            # The gradient of q is this operation on other tensors, those of k and v are the same
            # in reverse.
            d_q, _ = all_tokens(d_output, v, k, tf.linalg.matrix_transpose(state))

            def step(g, *tokens):
                *inputs, kind = tokens
                q, k, w, d_output = chunk_group(inputs, kind)
                between, from_start, to_end, total = decays(kind, q)
                added = tf.matmul(q * from_start, d_output, transpose_a=True)
                after, g = states(total, added, g, cut, reverse=True)
                d_k = tf.matmul(w, after, transpose_b=True) * to_end
                d_k += tf.matmul(inner_products(d_output, w) * between, q, transpose_a=True)
                d_v = tf.matmul(k * to_end, after)
                d_v += tf.matmul(inner_products(q, k) * between, d_output, transpose_a=True)
                return g, [unchunked(d, heads, cut) for d in (d_k, d_v)]

            sizes = final_state.shape[2:]
            g = tf.reshape(dense_gradient(d_final_state, final_state, dtype), [-1, *sizes])
            inputs = [*(grouped(x, cut) for x in (q, k, v, d_output)), kinds]
            g, (d_k, d_v) = scan_groups(step, g, inputs, cut, [dtype, dtype], reverse=True)
            _, padding = kind_masks(token_kind)
            d_q, d_k, d_v = (
                tf.cast(filled(d, padding, 0), x.dtype)
                for d, x in zip((d_q, ungrouped(d_k, k), ungrouped(d_v, v)), (q, k, v), strict=True)
            )
            return d_q, d_k, d_v, tf.zeros_like(log_decay), tf.reshape(g, [-1, heads, *sizes])

        return (output, final_state), gradient

    state = state_or_zeros(initial_state, [tf.shape(q)[0], *q.shape[2:], v.shape[3]], dtype)
    return run(q, k, v, log_decay, state)


def _padded_kinds(q, token_kind, cut):
    """Token kinds in groups [B, groups, tokens], padded; None if all tokens continue."""
    missing = cut.groups * cut.chunks * cut.size - length_of(q)
    if q.shape[1] is not None and not missing:
        return grouped(token_kind, cut)
    if token_kind is None:
        token_kind = tf.fill(tf.shape(q)[:2], tf.constant(CONTINUES, tf.int8))
    filler = tf.constant(PADDING, token_kind.dtype)
    return grouped(tf.pad(token_kind, [[0, 0], [0, missing]], constant_values=filler), cut)


def _decays(log_decay, kind, batch, cut):
    """The decays of a group: from s to u, from the start of a chunk, to its end, and in total.

    [B * H * chunks, C, C], twice [B * H * chunks, C, 1] and [B * H * chunks, 1, 1].
    """
    if kind is None:
        count = tf.range(1, cut.size + 1)[None, None, None, :, None]
        document = tf.zeros_like(count)
    else:
        kind = tf.reshape(kind, [-1, 1, cut.chunks, cut.size, 1])
        count = tf.cumsum(tf.cast(kind != PADDING, tf.int32), axis=-2)
        document = tf.cumsum(tf.cast(kind == STARTS, tf.int32), axis=-2)

    def decay(steps, reaches):
        rows, columns = steps.shape[-2:]
        steps = tf.cast(steps, log_decay.dtype)
        # Not 0 * log_decay: that is NaN if the decay is 0.
        logarithm = tf.math.multiply_no_nan(log_decay[:, None, None, None], steps)
        decay = filled(tf.exp(logarithm), ~reaches, 0)
        shape = [batch, log_decay.shape[0], cut.chunks, rows, columns]
        return tf.reshape(tf.broadcast_to(decay, shape), [-1, rows, columns])

    whole, last = count[..., -1:, :], document[..., -1:, :]
    place = tf.range(cut.size)
    earlier = place[:, None] >= place
    steps, documents_apart = (x - tf.linalg.matrix_transpose(x) for x in (count, document))
    return (
        decay(tf.abs(steps), earlier & (documents_apart == 0)),
        decay(count, document == 0),
        decay(whole - count, tf.equal(document, last)),
        decay(whole, last == 0),
    )
