"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

Padding may stand anywhere in a row: the real tokens of a row are first moved together, behind
those of the state, where a window is a band, and the outputs are moved back.
"""

import tensorflow as tf

from keras_recurrent.backends.tensorflow import _banded_attention, _ring
from keras_recurrent.backends.tensorflow._common import (
    PADDING,
    STARTS,
    accumulation_dtype,
    as_tensors,
    dense,
    length_of,
)


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
        # A ring without slots, from which nothing is seen.
        key, value = (x[:, :0] for x in (k, v))
        position = tf.zeros([tf.shape(q)[0]], tf.int32)
    else:
        key, value, position = as_tensors(
            *(initial_state[name] for name in ("key", "value", "position"))
        )
        capacity = length_of(key)
    row = _Row(q, k, v, key, position, token_kind, sliding_window)
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
        output, log_total = _banded_attention.forward(*arguments, row.documents, row.window)
        output = row.ungrouped(output, q.dtype)
        rings = [_ring.to_ring(x, row.next_position, row.end, capacity) for x in (keys, values)]

        def gradient(d_output, *d_rings):
            keys, values = row.after_state(k, key), row.after_state(v, value)
            d_q, *d_rows = _banded_attention.backward(
                row.grouped(dense(d_output, output, row.dtype)),
                log_total,
                row.grouped(q),
                row.banded(keys),
                row.banded(values),
                row.documents,
                row.window,
            )
            gradients, of_state = [], []
            for d, ring, d_ring, x in zip(d_rows, rings, d_rings, (k, v), strict=True):
                d = row.unbanded(d)
                d_ring = dense(d_ring, ring, row.dtype)
                d += _ring.to_row(d_ring, row.next_position, row.end, length_of(d))
                gradients.append(tf.cast(row.back(d[:, row.kept :]), x.dtype))
                before = _ring.to_ring(d[:, : row.kept], row.position, row.begin, row.kept)
                of_state.append(tf.cast(before, x.dtype))
            return [row.ungrouped(d_q, q.dtype), *gradients, *of_state]

        return (output, *rings), gradient

    return run(q, k, v, key, value)


class _Row:
    """What was seen before and then the real tokens, side by side."""

    def __init__(self, q, k, v, key, position, token_kind, window):
        self.q, self.groups, self.position = q, k.shape[2], position
        self.dtype = accumulation_dtype(q, k, v)
        self.batch, self.length, self.kept = tf.shape(q)[0], length_of(q), length_of(key)
        self.token_kind = token_kind
        self.begin = tf.fill([self.batch], self.kept)
        # A window as long as the row is none.
        total = self.kept + self.length
        self.window = None if isinstance(total, int) and (window or total) >= total else window
        count, start = tf.fill([self.batch], self.length), tf.fill([self.batch], -1)
        of_queries = tf.zeros([self.batch, self.length], tf.int32)
        if token_kind is not None:
            self._arrange(token_kind)
            count, start, of_queries = self.count, self.start, self.of_queries
        self.end = self.kept + count
        self.next_position = tf.where(start < 0, position + count, count - start)
        age = self.kept - 1 - tf.range(self.kept)
        before = tf.where(age < position[:, None], 0, -1)
        # Numbers from 1 on, so that the zeros that fill up a band are no document.
        of_keys = tf.concat([before, of_queries], axis=1) + 1
        self.documents = (of_queries + 1, self._band(of_keys))

    def _arrange(self, token_kind):
        self.real, restart = token_kind != PADDING, token_kind == STARTS
        place = tf.range(self.length)
        nth = tf.cumsum(tf.cast(self.real, tf.int32), axis=1) - 1
        self.count = nth[:, -1] + 1
        # Padding goes behind the real tokens, so that each has a place of its own.
        self.place = tf.where(self.real, nth, self.count[:, None] + place - 1 - nth)
        row = tf.broadcast_to(tf.range(self.batch)[:, None], tf.shape(nth))
        self.order = tf.scatter_nd(
            tf.stack([row, self.place], axis=-1),
            tf.broadcast_to(place, tf.shape(nth)),
            tf.shape(nth),
        )
        self.in_front = place < self.count[:, None]
        self.start = tf.reduce_max(tf.where(restart, nth, -1), axis=1)
        restarts = tf.cumsum(tf.cast(restart, tf.int32), axis=1)
        self.of_queries = tf.gather(restarts, self.order, batch_dims=1)

    def together(self, x):
        """[B, T, ...] with its real tokens first, then zeros."""
        return x if self.token_kind is None else _ring.take(x, self.order, self.in_front)

    def back(self, x):
        """The opposite, and the transpose, of `together`."""
        return x if self.token_kind is None else _ring.take(x, self.place, self.real)

    def after_state(self, x, ring):
        """[B, kept + T, G, ...]."""
        before = _ring.to_row(ring, self.position, self.begin, self.kept)
        return tf.concat([tf.cast(before, x.dtype), self.together(x)], axis=1)

    def grouped(self, x):
        """[B, T, H, K] together, as [B, G, T, H / G, K]."""
        x = tf.cast(self.together(x), self.dtype)
        heads = x.shape[2] // self.groups
        x = tf.reshape(x, [self.batch, self.length, self.groups, heads, x.shape[3]])
        return tf.transpose(x, [0, 2, 1, 3, 4])

    def ungrouped(self, x, dtype):
        """The opposite."""
        x = tf.transpose(x, [0, 2, 1, 3, 4])
        x = tf.reshape(x, [self.batch, self.length, self.q.shape[2], x.shape[4]])
        return tf.cast(self.back(x), dtype)

    def banded(self, x):
        """[B, S, G, K] as [B, G, S, K], with `window` - 1 places before the first query."""
        return tf.transpose(self._band(tf.cast(x, self.dtype)), [0, 2, 1, 3])

    def _band(self, x):
        if self.window is None:
            return x
        missing = tf.maximum(self.window - 1 - self.kept, 0)
        x = tf.pad(x, [[0, 0], [missing, 0]] + [[0, 0]] * (len(x.shape) - 2))
        return x[:, tf.maximum(self.kept - self.window + 1, 0) :]

    def unbanded(self, x):
        """The transpose of `banded`."""
        x = tf.transpose(x, [0, 2, 1, 3])
        if self.window is None:
            return x
        missing = tf.maximum(self.kept - self.window + 1, 0)
        x = tf.pad(x, [[0, 0], [missing, 0], [0, 0], [0, 0]])
        return x[:, tf.maximum(self.window - 1 - self.kept, 0) :]


def _one_token(row, capacity, q, k, v, key, value):
    """A step of generation: the ring is read as it lies, and one slot written."""
    kind, dtype = row.token_kind, row.dtype
    real, at = tf.ones_like(row.position, tf.bool), row.position
    if kind is not None:
        real = kind[:, 0] != PADDING
        at = tf.where(kind[:, 0] == STARTS, 0, at)
        q, k, v = (tf.where(real[:, None, None, None], x, 0) for x in (q, k, v))
    age = _ring.ages(at, capacity)
    filled = age < at[:, None]
    keys, values = (
        tf.where(filled[:, :, None, None], tf.cast(ring, x.dtype), 0)
        for ring, x in ((key, k), (value, v))
    )

    seen = filled & (age < row.window - 1) if row.window else filled
    grouped = tf.reshape(tf.cast(q, dtype), [row.batch, row.groups, -1, q.shape[3]])
    own_key, own_value = (tf.cast(x, dtype)[:, 0, :, None] for x in (k, v))
    logits = tf.einsum("bgrk,bsgk->bgrs", grouped, tf.cast(keys, dtype))
    logits = tf.where(seen[:, None, None], logits, dtype.min)
    own_logit = tf.reduce_sum(grouped * own_key, axis=-1, keepdims=True)
    weights = tf.nn.softmax(tf.concat([logits, own_logit], axis=-1))
    output = tf.einsum("bgrs,bsgv->bgrv", weights[..., :-1], tf.cast(values, dtype))
    output += weights[..., -1:] * own_value
    output = tf.reshape(output, [row.batch, 1, q.shape[2], v.shape[3]])
    output = tf.where(real[:, None, None, None], output, 0)

    slot = at % tf.maximum(capacity, 1)
    here = (tf.range(capacity) == slot[:, None]) & real[:, None]
    rings = (tf.where(here[:, :, None, None], x, ring) for x, ring in ((k, keys), (v, values)))
    return tf.cast(output, q.dtype), *rings
