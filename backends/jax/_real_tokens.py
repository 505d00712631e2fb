"""Moves the real tokens of each sequence to its front and back, for operations on neighbors."""

import jax.numpy as jnp

from ..constants import PADDING, STARTS
from ._common import take


class RealTokens:
    """Positions [B, T] of the real tokens before and after they are moved to the front.

    `to_front` and `put_back` are each other's transpose: the gradient of one is the other.
    """

    def __init__(self, token_kind):
        real = token_kind != PADDING
        length = real.shape[1]
        index = jnp.arange(length)
        self.real = real
        self.count = jnp.sum(real, axis=1, keepdims=True)
        self._filled = index < self.count
        self._source = jnp.argsort(jnp.where(real, index, length + index), axis=1)
        self._target = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
        kind = jnp.take_along_axis(token_kind, self._source, axis=1)
        # The number of starts so far identifies the document of a token.
        self.document = jnp.cumsum(kind == STARTS, axis=1)

    def to_front(self, x):
        """x [B, T, D] with the real tokens first, then zeros."""
        return take(x, self._source, self._filled)

    def put_back(self, y):
        """The inverse of `to_front`, with zeros at padding."""
        return take(y, self._target, self.real)
