"""S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t, as in `backends/jax`."""

import tensorflow as tf

from ._common import (
    accumulation_dtype,
    applied_decay,
    as_tensors,
    filled,
    kind_masks,
    state_or_zeros,
)
from ._linear_attention import (
    chunked,
    compute,
    decay_products,
    plan,
    states,
    step,
    unchunked,
    weights_of_pairs,
)

# Numbers of tokens in a chunk: as many as a head has channels, within these limits. The work on
# pairs of tokens grows with the chunk, that on states with the head.
CHUNK = 64
SMALLEST_CHUNK = 8


def gated_linear_attention(q, k, v, log_f, initial_state=None, token_kind=None):
    """q, k, log_f: [B, T, H, K]; v: [B, T, H, V]; log_f <= 0; k None: 1 - exp(log_f)."""
    q, k, v, log_f, initial_state = as_tensors(q, k, v, log_f, initial_state)
    dtype = accumulation_dtype(q, k, v, log_f, initial_state)
    (heads, key_size), value_size = q.shape[2:], v.shape[3]
    widest = 1 << (max(key_size, value_size) - 1).bit_length()
    cut = plan(q, v, min(CHUNK, max(SMALLEST_CHUNK, widest)))

    def group(state, token_kind, q, v, log_f, k=None):
        """At padding q, k and v are 0 and f is 1; at a start f is 0."""
        starts, padding = kind_masks(token_kind)
        q, w, log_f = (tf.cast(x, dtype) for x in (q, v, log_f))
        k = -tf.math.expm1(log_f) if k is None else tf.cast(k, dtype)
        q, k, w = (filled(x, padding, 0) for x in (q, k, w))
        f = applied_decay(tf.exp(log_f), starts, padding)
        if cut.size == 1:
            return step(q, k, w, f, state)
        q, k, w, f = (chunked(x, cut) for x in (q, k, w, f))
        levels, from_start, to_end = decay_products(f)
        added = tf.matmul(k * to_end, w, transpose_a=True)
        before, state = states(from_start[:, -1, :, None], added, state, cut)
        output = tf.matmul(q * from_start, before) + tf.matmul(weights_of_pairs(q, k, levels), w)
        return unchunked(output, heads, cut), state

    state = state_or_zeros(initial_state, [tf.shape(q)[0], heads, key_size, value_size], dtype)
    return compute(group, cut, state, token_kind, q=q, v=v, log_f=log_f, k=k)
