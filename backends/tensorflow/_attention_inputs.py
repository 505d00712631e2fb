"""Keys, values and queries of attention, with real tokens first and padding last."""

import tensorflow as tf

from ..constants import STARTS
from . import _circular_buffer
from ._common import accumulation_dtype, length_of
from ._real_tokens import RealTokens


class AttentionInputs:
    """The cached tokens, followed by the real tokens of each sequence."""

    def __init__(self, q, k, v, key, position, token_kind, window):
        self.q, self.groups, self.position = q, k.shape[2], position
        self.dtype = accumulation_dtype(q, k, v)
        self.batch, self.length, self.cached = tf.shape(q)[0], length_of(q), length_of(key)
        self.token_kind = token_kind
        self.begin = tf.fill([self.batch], self.cached)
        # A window of at least the sequence length excludes no key.
        total = self.cached + self.length
        self.window = None if isinstance(total, int) and (window or total) >= total else window
        count, start = tf.fill([self.batch], self.length), tf.fill([self.batch], -1)
        of_queries = tf.zeros([self.batch, self.length], tf.int32)
        self.tokens = None if token_kind is None else RealTokens(token_kind)
        if self.tokens is not None:
            count, of_queries = self.tokens.count[:, 0], self.tokens.document
            start = tf.reduce_max(tf.where(token_kind == STARTS, self.tokens.target, -1), axis=1)
        self.end = self.cached + count
        self.next_position = tf.where(start < 0, position + count, count - start)
        age = self.cached - 1 - tf.range(self.cached)
        of_state = tf.where(age < position[:, None], 0, -1)
        # Documents are numbered from 1, so that the zeros that pad a band belong to none.
        of_keys = tf.concat([of_state, of_queries], axis=1) + 1
        self.documents = (of_queries + 1, self._band(of_keys))

    def to_front(self, x):
        """[B, T, ...] with the real tokens first, then zeros."""
        return x if self.tokens is None else self.tokens.to_front(x)

    def put_back(self, x):
        """The inverse of `to_front`."""
        return x if self.tokens is None else self.tokens.put_back(x)

    def concat_cached(self, x, buffer):
        """The cached tokens, then those of x, [B, cached + T, G, ...]."""
        before = _circular_buffer.to_sequence(buffer, self.position, self.begin, self.cached)
        return tf.concat([tf.cast(before, x.dtype), self.to_front(x)], axis=1)

    def grouped(self, x):
        """[B, T, H, K] with the real tokens first, as [B, G, T, H / G, K]."""
        x = tf.cast(self.to_front(x), self.dtype)
        heads = x.shape[2] // self.groups
        x = tf.reshape(x, [self.batch, self.length, self.groups, heads, x.shape[3]])
        return tf.transpose(x, [0, 2, 1, 3, 4])

    def ungrouped(self, x, dtype):
        """The inverse of `grouped`."""
        x = tf.transpose(x, [0, 2, 1, 3, 4])
        x = tf.reshape(x, [self.batch, self.length, self.q.shape[2], x.shape[4]])
        return tf.cast(self.put_back(x), dtype)

    def banded(self, x):
        """[B, S, G, K] as [B, G, S, K].

        With a window, cut or padded so that `window` - 1 keys precede that of the first query.
        """
        return tf.transpose(self._band(tf.cast(x, self.dtype)), [0, 2, 1, 3])

    def _band(self, x):
        if self.window is None:
            return x
        missing = tf.maximum(self.window - 1 - self.cached, 0)
        x = tf.pad(x, [[0, 0], [missing, 0]] + [[0, 0]] * (len(x.shape) - 2))
        return x[:, tf.maximum(self.cached - self.window + 1, 0) :]
