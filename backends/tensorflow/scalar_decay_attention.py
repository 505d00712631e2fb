"""S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t, as in `backends/jax`."""

import tensorflow as tf

from ..constants import CONTINUES, PADDING, STARTS
from ._common import (
    accumulation_dtype,
    applied_decay,
    as_tensors,
    filled,
    kind_masks,
    length_of,
    state_or_zeros,
)
from ._linear_attention import (
    chunked,
    compute,
    decay_products,
    inner_products,
    plan,
    states,
    sum_over_pairs,
    unchunked,
    weights_of_pairs,
)

CHUNK = 64


def scalar_decay_attention(q, k, v, log_decay, initial_state=None, token_kind=None):
    """q, k: [B, T, G, K]; v: [B, T, H, V]; log_decay: [B, T, H], or constant, [H].

    The gradient of constant decays is 0.

    In the functions below, tensors of a group of chunks are [B * G, heads that share a query and a
    key, chunks, C, K or V]. In queries and keys, the axis for heads has size 1.
    """
    q, k, v, log_decay, initial_state = as_tensors(q, k, v, log_decay, initial_state)
    dtype = accumulation_dtype(q, k, v, log_decay, initial_state)
    cut, groups, heads = plan(q, v, CHUNK), q.shape[2], v.shape[2]
    share, is_constant = heads // groups, log_decay.shape.rank == 1

    def split_heads(x):
        return tf.reshape(
            chunked(x, cut), [-1, x.shape[2] // groups, cut.chunks, cut.size, x.shape[3]]
        )

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

        def products(log_decay):
            f = chunked(applied_decay(tf.exp(log_decay), *kind_masks(kind)), cut)
            levels, from_start, to_end = decay_products(f)
            between = weights_of_pairs(tf.ones_like(f), tf.ones_like(f), levels)
            return between, from_start, to_end, from_start[:, -1:]

        @tf.custom_gradient
        def run(log_decay):
            def gradient(*d_products):
                terms = [x * d for x, d in zip(products(log_decay), d_products, strict=True)]
                pairs, to_later, from_earlier, through = terms
                d_chunks = through + sum_over_pairs(pairs, to_later, from_earlier)
                return filled(unchunked(d_chunks, heads, cut), kind_masks(kind)[1], 0)

            return products(log_decay), gradient

        return [unflat(x) for x in run(log_decay)]

    def group(state, token_kind, q, k, v, log_decay=log_decay):
        _, padding = kind_masks(token_kind)
        tensors = (filled(tf.cast(x, dtype), padding, 0) for x in (q, k, v))
        between, from_start, to_end, total = decays(log_decay, token_kind)
        q, k, w = map(split_heads, tensors)
        added = tf.matmul(k, w * to_end, transpose_a=True)
        before, state = states(flat(total), flat(added), state, cut)
        output = tf.matmul(q, unflat(before)) * from_start
        output += tf.matmul(inner_products(q, k) * between, w)
        return unchunked(flat(output), heads, cut), state

    state = state_or_zeros(initial_state, [tf.shape(q)[0], heads, q.shape[3], v.shape[3]], dtype)
    if is_constant:
        v, varying = _connected(v, log_decay), {}
    else:
        varying = {"log_decay": log_decay[..., None]}
    kinds = _padded_kinds(q, token_kind, cut)
    return compute(group, cut, state, kinds, q=q, k=k, v=v, **varying)


@tf.custom_gradient
def _connected(x, constant):
    """x, as a function of a constant, whose gradient is then 0 and not None."""
    return tf.identity(x), lambda d_x: (d_x, tf.zeros_like(constant))


def _padded_kinds(q, token_kind, cut):
    """Token kinds padded to full groups; None if nothing is padded and all tokens continue."""
    missing = cut.groups * cut.chunks * cut.size - length_of(q)
    if q.shape[1] is not None and not missing:
        return token_kind
    if token_kind is None:
        token_kind = tf.fill(tf.shape(q)[:2], tf.constant(CONTINUES, tf.int8))
    filler = tf.constant(PADDING, token_kind.dtype)
    return tf.pad(token_kind, [[0, 0], [0, missing]], constant_values=filler)


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
