"""Moves the real tokens of each sequence to its front and back, for operations on neighbors."""

import tensorflow as tf

from ._common import apply_linear, kind_masks, length_of, scatter, take


class RealTokens:
    """Permutation that moves the real tokens of each sequence before its padding.

    Attributes:
        count: [B, 1], the number of real tokens.
        target: [B, T], the target index of token t.
        starts: [B, T], the number of documents started up to token t.
        document: [B, T], the number of documents started up to the token moved to index t.
    """

    def __init__(self, token_kind):
        starts, padding = kind_masks(token_kind)
        length = length_of(token_kind)
        index = tf.range(length)
        self._real = ~padding
        counted = tf.cumsum(tf.cast(self._real, tf.int32), axis=1)
        self.count = counted[:, -1:]
        # Padding is moved after the real tokens, so that this is a permutation.
        self.target = tf.where(padding, self.count + index - counted, counted - 1)
        # The inverse permutation: the token moved to each index.
        self._order = scatter(tf.broadcast_to(index, tf.shape(counted)), self.target, length)
        self._filled = index < self.count
        self.starts = tf.cumsum(tf.cast(starts, tf.int32), axis=1)
        self.document = tf.gather(self.starts, self._order, batch_dims=1)

    def to_front(self, x):
        """x [B, T, ...] with the real tokens first, then zeros."""
        return apply_linear(self._to_front, self._put_back, x)

    def put_back(self, x):
        """The inverse and the transpose of `to_front`, with zeros at padding."""
        return apply_linear(self._put_back, self._to_front, x)

    def _to_front(self, x):
        return take(x, self._order, self._filled)

    def _put_back(self, x):
        return take(x, self.target, self._real)
