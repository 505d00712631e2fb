"""S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t, as in `backends/jax`."""

import tensorflow as tf

from ..constants import CONTINUES, PADDING, STARTS
from ._common import (
    accumulation_dtype,
    applied_decay,
    as_tensors,
    dense_gradient,
    filled,
    kind_masks,
    length_of,
    state_or_zeros,
)
from ._linear_attention import (
    chunked,
    decay_products,
    grouped,
    inner_products,
    plan,
    scan_groups,
    states,
    sum_over_pairs,
    unchunked,
    ungrouped,
    weights_of_pairs,
)

CHUNK = 64


def scalar_decay_attention(q, k, v, log_decay, initial_state=None, token_kind=None):
    """q, k: [B, T, G, K]; v: [B, T, H, V]; log_decay: [B, T, H], or constant, [H].

    Returns ([B, T, H, V] in v's dtype, [B, H, K, V] in float32, or float64 if an argument is
    float64). The gradient of constant decays is 0.

    In the functions below, tensors of a group of chunks are [B * G, heads that share a query and a
    key, chunks, C, K or V]. In queries and keys, the axis for heads has size 1.
    """
    q, k, v, log_decay, initial_state = as_tensors(q, k, v, log_decay, initial_state)
    dtype = accumulation_dtype(q, k, v, log_decay, initial_state)
    cut, sizes = plan(q, v, CHUNK), [q.shape[3], v.shape[3]]
    groups, heads = q.shape[2], v.shape[2]
    share, is_constant = heads // groups, log_decay.shape.rank == 1

    def prepared(tensors, kind):
        """Tensors of a group of chunks, with zeros at padding."""
        _, padding = kind_masks(kind)
        return [split_heads(filled(tf.cast(x, dtype), padding, 0)) for x in tensors]

    def split_heads(x):
        return tf.reshape(
            chunked(x, cut), [-1, x.shape[2] // groups, cut.chunks, cut.size, x.shape[3]]
        )

    def join_heads(x):
        return unchunked(flat(x), groups * x.shape[1], cut)

    def flat(x):
        return tf.reshape(x, [-1, *x.shape[-2:]])

    def unflat(x):
        return tf.reshape(x, [-1, share, cut.chunks, *x.shape[1:]])

    def decays(log_decay, kind):
        """Decays in chunks: from s to u, from the start, to the end, and in total.

        The shapes are [..., C, C], [..., C, 1], [..., C, 1] and [..., 1, 1].
        log_decay: [H], or the logarithms of the tokens' decays.
        """
        log_decay = tf.cast(log_decay, dtype)
        if is_constant:
            return [unflat(x) for x in _powers(log_decay, kind, tf.shape(q)[0], cut)]
        f = chunked(applied_decay(tf.exp(log_decay), *kind_masks(kind)), cut)
        levels, from_start, to_end = decay_products(f)
        between = weights_of_pairs(tf.ones_like(f), tf.ones_like(f), levels)
        return [unflat(x) for x in (between, from_start, to_end, from_start[:, -1:])]

    def states_of_chunks(total, added, first, reverse=False):
        before, last = states(flat(total), flat(added), first, cut, reverse)
        return unflat(before), last

    def inputs_of_groups(q, k, v, log_decay):
        kinds = _padded_kinds(q, token_kind, cut)
        if not is_constant:
            log_decay = grouped(log_decay[..., None], cut)
        return [*(grouped(x, cut) for x in (q, k, v)), kinds, None if is_constant else log_decay]

    def step_token(q, k, v, log_decay, state):
        *_, decay = decays(log_decay if is_constant else log_decay[..., None], token_kind)
        q, k, w = (x[:, :, 0, 0] for x in prepared((q, k, v), token_kind))
        state = tf.reshape(state, [-1, share, *sizes])
        state = decay[:, :, 0] * state + k[..., None] * w[:, :, None]
        output = tf.reduce_sum(q[..., None] * state, axis=2)
        return tf.reshape(output, [-1, 1, *v.shape[2:]]), tf.reshape(state, [-1, heads, *sizes])

    def all_tokens(q, k, v, log_decay, state):
        def step(state, *tokens):
            *inputs, kind, varying = tokens
            q, k, w = prepared(inputs, kind)
            between, from_start, to_end, total = decays(log_decay if is_constant else varying, kind)
            added = tf.matmul(k, w * to_end, transpose_a=True)
            before, state = states_of_chunks(total, added, state)
            output = tf.matmul(q, before) * from_start
            output += tf.matmul(inner_products(q, k) * between, w)
            return state, [join_heads(output)]

        inputs = inputs_of_groups(q, k, v, log_decay)
        state, (output,) = scan_groups(step, flat(state), inputs, cut, [dtype])
        return ungrouped(output, v), tf.reshape(state, [-1, heads, *sizes])

    @tf.custom_gradient
    def run(q, k, v, log_decay, state):
        forward = step_token if q.shape[1] == 1 else all_tokens
        output, final_state = forward(q, k, v, log_decay, state)
        output = tf.cast(output, v.dtype)

        def gradient(d_output, d_final_state):
            def state_before(state, *tokens):
                _, *inputs, kind, varying = tokens
                k, w = prepared(inputs, kind)
                *_, to_end, total = decays(log_decay if is_constant else varying, kind)
                added = tf.matmul(k, w * to_end, transpose_a=True)
                return states_of_chunks(total, added, state)[1], [state]

            def step(g, *tokens):
                *inputs, kind, varying, state, d_output = tokens
                q, k, w, d_output = prepared((*inputs, d_output), kind)
                between, from_start, to_end, total = decays(
                    log_decay if is_constant else varying, kind
                )
                w_out, d_in = w * to_end, d_output * from_start
                added = tf.matmul(k, w_out, transpose_a=True)
                before, _ = states_of_chunks(total, added, state)
                d_added = tf.matmul(q, d_in, transpose_a=True)
                after, g = states_of_chunks(total, d_added, g, reverse=True)

                weights, d_weights = inner_products(q, k), inner_products(d_output, w) * between
                d_v = tf.matmul(k, after) * to_end
                found = []
                if not is_constant:
                    to_later = tf.reduce_sum(tf.matmul(q, before) * d_in, -1, keepdims=True)
                    from_earlier = tf.reduce_sum(d_v * w, -1, keepdims=True)
                    through = total * tf.reduce_sum(before * after, [-2, -1], keepdims=True)
                    pairs = sum_over_pairs(weights * d_weights, to_later, from_earlier)
                    found.append(through + pairs)
                d_v += tf.matmul(weights * between, d_output, transpose_a=True)
                d_weights = _sum_over_heads(d_weights)
                d_q = _sum_over_heads(tf.matmul(d_in, before, transpose_b=True))
                d_k = _sum_over_heads(tf.matmul(w_out, after, transpose_b=True))
                d_q += tf.matmul(d_weights, k)
                d_k += tf.matmul(d_weights, q, transpose_a=True)
                return g, [join_heads(d) for d in (d_q, d_k, d_v, *found)]

            inputs = inputs_of_groups(q, k, v, log_decay)
            _, (before,) = scan_groups(state_before, flat(state), inputs, cut, [dtype])
            inputs.append(tf.transpose(before, [1, 0, 2, 3]))
            inputs.append(grouped(dense_gradient(d_output, output, dtype), cut))
            g = flat(dense_gradient(d_final_state, final_state, dtype))
            given = [q, k, v] if is_constant else [q, k, v, log_decay[..., None]]
            g, found = scan_groups(step, g, inputs, cut, [dtype] * len(given), reverse=True)
            _, padding = kind_masks(token_kind)
            d_q, d_k, d_v, *d_decay = (
                tf.cast(filled(ungrouped(d, x), padding, 0), x.dtype)
                for d, x in zip(found, given, strict=True)
            )
            d_decay = tf.zeros_like(log_decay) if is_constant else d_decay[0][..., 0]
            return d_q, d_k, d_v, d_decay, tf.reshape(g, [-1, heads, *sizes])

        return (output, final_state), gradient

    state = state_or_zeros(initial_state, [tf.shape(q)[0], heads, *sizes], dtype)
    return run(q, k, v, log_decay, state)


def _sum_over_heads(x):
    return x if x.shape[1] == 1 else tf.reduce_sum(x, axis=1, keepdims=True)


def _padded_kinds(q, token_kind, cut):
    """Token kinds in groups [B, groups, tokens], padded; None if all tokens continue."""
    missing = cut.groups * cut.chunks * cut.size - length_of(q)
    if q.shape[1] is not None and not missing:
        return grouped(token_kind, cut)
    if token_kind is None:
        token_kind = tf.fill(tf.shape(q)[:2], tf.constant(CONTINUES, tf.int8))
    filler = tf.constant(PADDING, token_kind.dtype)
    return grouped(tf.pad(token_kind, [[0, 0], [0, missing]], constant_values=filler), cut)


def _powers(log_decay, kind, batch, cut):
    """The `decays` of a constant, [B * H * chunks, ...]: its powers by numbers of real tokens."""
    if kind is None:
        count = tf.range(1, cut.size + 1)[None, None, None, :, None]
        document = tf.zeros_like(count)
    else:
        kind = tf.reshape(kind, [-1, 1, cut.chunks, cut.size, 1])
        count = tf.cumsum(tf.cast(kind != PADDING, tf.int32), axis=-2)
        document = tf.cumsum(tf.cast(kind == STARTS, tf.int32), axis=-2)

    def power(steps, reaches):
        rows, columns = steps.shape[-2:]
        steps = tf.cast(steps, log_decay.dtype)
        # 0 * log_decay would be NaN for a decay of 0.
        logarithm = tf.math.multiply_no_nan(log_decay[:, None, None, None], steps)
        decay = filled(tf.exp(logarithm), ~reaches, 0)
        shape = [batch, log_decay.shape[0], cut.chunks, rows, columns]
        return tf.reshape(tf.broadcast_to(decay, shape), [-1, rows, columns])

    whole, last = count[..., -1:, :], document[..., -1:, :]
    place = tf.range(cut.size)
    earlier = place[:, None] >= place
    steps, documents_apart = (x - tf.linalg.matrix_transpose(x) for x in (count, document))
    return (
        power(tf.abs(steps), earlier & (documents_apart == 0)),
        power(count, document == 0),
        power(whole - count, tf.equal(document, last)),
        power(whole, last == 0),
    )
