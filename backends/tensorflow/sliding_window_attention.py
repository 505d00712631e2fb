"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

Padding may be anywhere in a row. The real tokens are first moved to the front, behind those in the
state, where a window is a band of the logits; the outputs are put back.
"""

import tensorflow as tf

from ..constants import PADDING, STARTS
from . import _banded_attention, _ring
from ._common import as_tensors, dense_gradient, length_of
from ._row import Row


def sliding_window_attention(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
):
    """q: [B, T, H, K]; k: [B, T, G, K]; v: [B, T, G, V].

    Returns ([B, T, H, V] in q's dtype, {"key": [B, C, G, K], "value": [B, C, G, V], "position":
    int32 [B]}, keys and values in their dtypes). C is that of the initial state, else `capacity`,
    else `sliding_window` - 1; without any of them the state is an empty dict.
    """
    q, k, v = as_tensors(q, k, v)
    if initial_state is None:
        if capacity is None and sliding_window is not None:
            capacity = sliding_window - 1
        # A ring without slots.
        key, value = (x[:, :0] for x in (k, v))
        position = tf.zeros([tf.shape(q)[0]], tf.int32)
    else:
        key, value, position = as_tensors(
            *(initial_state[name] for name in ("key", "value", "position"))
        )
        capacity = length_of(key)
    row = Row(q, k, v, key, position, token_kind, sliding_window)
    attend = _one_token if q.shape[1] == 1 and initial_state is not None else _attend
    output, *rings = attend(row, 0 if capacity is None else capacity, q, k, v, key, value)
    if capacity is None:
        return output, {}
    return output, {"key": rings[0], "value": rings[1], "position": row.next_position}


def _attend(row, capacity, q, k, v, key, value):
    @tf.custom_gradient
    def run(q, k, v, key, value):
        keys, values = row.after_state(k, key), row.after_state(v, value)
        arguments = (row.grouped(q), row.banded(keys), row.banded(values))
        output = _banded_attention.forward(*arguments, row.documents, row.window)
        output = row.ungrouped(output, q.dtype)
        rings = [_ring.to_ring(x, row.next_position, row.end, capacity) for x in (keys, values)]

        def gradient(d_output, *d_rings):
            keys, values = row.after_state(k, key), row.after_state(v, value)
            d_q, *d_rows = _banded_attention.backward(
                row.grouped(dense_gradient(d_output, output, row.dtype)),
                row.grouped(q),
                row.banded(keys),
                row.banded(values),
                row.documents,
                row.window,
            )
            gradients, of_state = [], []
            for d, ring, d_ring, x in zip(d_rows, rings, d_rings, (k, v), strict=True):
                d = row.unbanded(d)
                d_ring = dense_gradient(d_ring, ring, row.dtype)
                d += _ring.to_row(d_ring, row.next_position, row.end, length_of(d))
                gradients.append(tf.cast(row.put_back(d[:, row.kept :]), x.dtype))
                d_state = _ring.to_ring(d[:, : row.kept], row.position, row.begin, row.kept)
                of_state.append(tf.cast(d_state, x.dtype))
            return [row.ungrouped(d_q, q.dtype), *gradients, *of_state]

        return (output, *rings), gradient

    return run(q, k, v, key, value)


def _one_token(row, capacity, q, k, v, key, value):
    """A step of generation: the ring is read without reordering it, and one slot is written."""
    kind, dtype = row.token_kind, row.dtype
    real, position = tf.ones_like(row.position, tf.bool), row.position
    if kind is not None:
        real = kind[:, 0] != PADDING
        position = tf.where(kind[:, 0] == STARTS, 0, position)
        q, k, v = (tf.where(real[:, None, None, None], x, 0) for x in (q, k, v))
    age = _ring.ages(position, capacity)
    filled = age < position[:, None]
    keys, values = (
        tf.where(filled[:, :, None, None], tf.cast(ring, x.dtype), 0)
        for ring, x in ((key, k), (value, v))
    )

    visible = filled & (age < row.window - 1) if row.window else filled
    grouped = tf.reshape(tf.cast(q, dtype), [row.batch, row.groups, -1, q.shape[3]])
    own_key, own_value = (tf.cast(x, dtype)[:, 0, :, None] for x in (k, v))
    logits = tf.einsum("bgrk,bsgk->bgrs", grouped, tf.cast(keys, dtype))
    logits = tf.where(visible[:, None, None], logits, dtype.min)
    own_logit = tf.reduce_sum(grouped * own_key, axis=-1, keepdims=True)
    weights = _banded_attention.softmax(tf.concat([logits, own_logit], axis=-1))
    output = tf.einsum("bgrs,bsgv->bgrv", weights[..., :-1], tf.cast(values, dtype))
    output += weights[..., -1:] * own_value
    output = tf.reshape(output, [row.batch, 1, q.shape[2], v.shape[3]])
    output = tf.where(real[:, None, None, None], output, 0)

    slot = position % tf.maximum(capacity, 1)
    written = (tf.range(capacity) == slot[:, None]) & real[:, None]
    rings = (tf.where(written[:, :, None, None], x, ring) for x, ring in ((k, keys), (v, values)))
    return tf.cast(output, q.dtype), *rings
