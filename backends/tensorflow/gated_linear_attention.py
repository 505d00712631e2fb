"""S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t, as in `backends/jax`."""

import tensorflow as tf

from ._common import (
    accumulation_dtype,
    applied_decay,
    as_tensors,
    dense_gradient,
    filled,
    kind_masks,
    state_or_zeros,
)
from ._linear_attention import (
    chunked,
    decay_products,
    grouped,
    halves,
    inner_products,
    joined,
    plan,
    product,
    scan_groups,
    states,
    unchunked,
    ungrouped,
    weights_of_pairs,
)

# Numbers of tokens in a chunk: as many as a head has channels, within these limits. The work on
# pairs of tokens grows with the chunk, that on states with the head.
CHUNK = 64
SMALLEST_CHUNK = 8


def gated_linear_attention(q, k, v, log_f, initial_state=None, token_kind=None):
    """q, k, log_f: [B, T, H, K]; v: [B, T, H, V]; log_f <= 0; k None: 1 - exp(log_f).

    Returns ([B, T, H, V] in v's dtype, [B, H, K, V] in float32, or float64 if an argument is
    float64).
    """
    q, k, v, log_f, initial_state = as_tensors(q, k, v, log_f, initial_state)
    dtype = accumulation_dtype(q, k, v, log_f, initial_state)
    (heads, key_size), value_size = q.shape[2:], v.shape[3]
    widest = 1 << (max(key_size, value_size) - 1).bit_length()
    cut = plan(q, v, min(CHUNK, max(SMALLEST_CHUNK, widest)))

    def prepared(q, k, v, log_f, token_kind):
        """q, k, v and f of a group; at padding 0, 0, 0 and 1; f is 0 at a start."""
        starts, padding = kind_masks(token_kind)
        q, v, log_f = (tf.cast(x, dtype) for x in (q, v, log_f))
        k = -tf.math.expm1(log_f) if k is None else tf.cast(k, dtype)
        f = applied_decay(tf.exp(log_f), starts, padding)
        return *(filled(x, padding, 0) for x in (q, k, v)), f

    def chunk_group(*tokens):
        return [chunked(x, cut) for x in prepared(*tokens)]

    def groups(q, k, v, log_f):
        return [grouped(x, cut) for x in (q, k, v, log_f, token_kind)]

    def flat(state):
        return tf.reshape(state, [-1, key_size, value_size])

    def unflat(state):
        return tf.reshape(state, [-1, heads, key_size, value_size])

    def step_token(q, k, v, log_f, state):
        q, k, w, f = (x[:, 0, :, :, None] for x in prepared(q, k, v, log_f, token_kind))
        state = f * state + k * tf.linalg.matrix_transpose(w)
        return tf.cast(tf.reduce_sum(q * state, axis=2)[:, None], v.dtype), state

    def all_tokens(q, k, v, log_f, state):
        def step(state, *tokens):
            q, k, w, f = chunk_group(*tokens)
            levels, from_start, to_end = decay_products(f)
            added = tf.matmul(k * to_end, w, transpose_a=True)
            before, state = states(_total(from_start), added, state, cut)
            output = tf.matmul(q * from_start, before) + tf.matmul(
                weights_of_pairs(q, k, levels), w
            )
            return state, [tf.cast(unchunked(output, heads, cut), v.dtype)]

        state, (output,) = scan_groups(step, flat(state), groups(q, k, v, log_f), cut, [v.dtype])
        return ungrouped(output, v), unflat(state)

    @tf.custom_gradient
    def run(state, q, v, log_f, *keys):
        k = keys[0] if keys else None
        forward = step_token if q.shape[1] == 1 else all_tokens
        output, final_state = forward(q, k, v, log_f, state)

        def gradient(d_output, d_final_state):
            inputs = groups(q, k, v, log_f)

            def state_before(state, *tokens):
                _, k, w, f = chunk_group(*tokens)
                _, from_start, to_end = decay_products(f)
                added = tf.matmul(k * to_end, w, transpose_a=True)
                return states(_total(from_start), added, state, cut)[1], [state]

            def step(g, *tokens):
                *inputs, state, d_output = tokens
                _, padding = kind_masks(inputs[4])
                d_output = chunked(filled(d_output, padding, 0), cut)
                *found, g = _group_gradient(cut, state, d_output, g, *chunk_group(*inputs))
                d_q, d_k, d_v, d_log_f = (unchunked(d, heads, cut) for d in found)
                if not keys:
                    d_log_f -= d_k * tf.exp(tf.cast(inputs[3], dtype))
                found = [d_q, d_v, d_log_f, *([d_k] if keys else [])]
                return g, [
                    tf.cast(filled(d, padding, 0), x.dtype)
                    for d, x in zip(found, (q, v, log_f, *keys), strict=True)
                ]

            _, (before,) = scan_groups(state_before, flat(state), inputs, cut, [dtype])
            inputs.append(tf.transpose(before, [1, 0, 2, 3]))
            inputs.append(grouped(dense_gradient(d_output, output, dtype), cut))
            g = flat(dense_gradient(d_final_state, final_state, dtype))
            dtypes = [x.dtype for x in (q, v, log_f, *keys)]
            g, found = scan_groups(step, g, inputs, cut, dtypes, reverse=True)
            found = [ungrouped(d, x) for d, x in zip(found, (q, v, log_f, *keys), strict=True)]
            return unflat(g), *found

        return (output, final_state), gradient

    state_shape = [tf.shape(q)[0], heads, key_size, value_size]
    keys = [] if k is None else [k]
    return run(state_or_zeros(initial_state, state_shape, dtype), q, v, log_f, *keys)


# Below, tensors are [B * H * chunks, C, K or V].


def _total(from_start):
    """The product of a chunk's decays, [..., K, 1], for its state [..., K, V]."""
    return from_start[:, -1, :, None]


def _group_gradient(cut, state, d_output, g, q, k, v, f):
    """Gradients of q, k, v, log f and the state before a group; g: that of the state after it.

    The gradient of log f_t is, in each channel, the sum of q_u f_{s+1} ... f_u k_s da_us over all
    pairs s < t <= u, of which f_t is a factor. The pairs on both sides of a boundary add to each f
    between the boundary and u a sum over later u, and to each f between s and the boundary a sum
    over earlier s. Nothing is subtracted, so the result is as exact as the gradients of q and k.
    """
    levels, from_start, to_end = decay_products(f)
    total, q_in, k_out = _total(from_start), q * from_start, k * to_end
    before, _ = states(total, tf.matmul(k_out, v, transpose_a=True), state, cut)
    d_added = tf.matmul(q_in, d_output, transpose_a=True)
    after, d_state = states(total, d_added, g, cut, reverse=True)

    d_v = tf.matmul(weights_of_pairs(q, k, levels), d_output, transpose_a=True) + tf.matmul(
        k_out, after
    )
    d_q = tf.matmul(d_output, before, transpose_b=True) * from_start
    d_k = tf.matmul(v, after, transpose_b=True) * to_end
    # Terms of the gradient of log f: `crossing` applies to every token of a block, q d_q to its
    # token and those before it in the block, k d_k to those after it.
    crossing = tf.reduce_sum(total * before * after, axis=-1)[:, None]

    d_weights = inner_products(d_output, v)[:, None]
    for from_boundary, to_boundary in reversed(levels):
        half = from_boundary.shape[2]
        (k_left, _), (_, q_right) = halves(k, half), halves(q, half)
        (d_k_left, d_k_right), (d_q_left, d_q_right) = halves(d_k, half), halves(d_q, half)
        beyond = [tf.reduce_sum(x, axis=2) for x in (q_right * d_q_right, k_left * d_k_left)]
        beyond = tf.stack(beyond, axis=2)
        crossing = tf.reshape(crossing[:, :, None] + beyond, [-1, *_twice(crossing)])
        d_between = d_weights[:, :, half:, :half]
        d_q_right += product(d_between, k_left * to_boundary) * from_boundary
        d_k_left += product(d_between, q_right * from_boundary, transpose_a=True) * to_boundary
        d_q, d_k = joined(d_q_left, d_q_right), joined(d_k_left, d_k_right)
        inside = [d_weights[:, :, :half, :half], d_weights[:, :, half:, half:]]
        d_weights = tf.reshape(tf.stack(inside, axis=2), [-1, 2 * d_weights.shape[1], half, half])

    d_log_f = q * d_q + crossing
    d_own = d_weights[:, :, 0]  # weights of a token and itself have no decay
    return d_q + d_own * k, d_k + d_own * q, d_v, d_log_f, d_state


def _twice(blocks):
    return 2 * blocks.shape[1], blocks.shape[2]
