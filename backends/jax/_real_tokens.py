"""The real tokens of each row moved together and back, for operations that look at neighbours."""

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax._tokens import PADDING, STARTS


class RealTokens:
    """Where the real tokens of rows [B, T] stand once they are moved to the front.

    `together` and `back` are each other's transpose: the gradient of one is the other.
    """

    def __init__(self, token_kind):
        real = token_kind != PADDING
        length = real.shape[1]
        place = jnp.arange(length)
        self.real = real
        self.count = jnp.sum(real, axis=1, keepdims=True)
        self._in_front = place < self.count
        self._source = jnp.argsort(jnp.where(real, place, length + place), axis=1)
        self._target = jnp.maximum(jnp.cumsum(real, axis=1) - 1, 0)
        kind = jnp.take_along_axis(token_kind, self._source, axis=1)
        # Counts the starts so far: tokens of one document share a number.
        self.document = jnp.cumsum(kind == STARTS, axis=1)

    def together(self, x):
        """x: [B, T, D], its real tokens first, then zeros."""
        return jnp.where(self._in_front[:, :, None], rows(x, self._source), 0)

    def back(self, y):
        """The opposite of `together`: zeros at padding."""
        return jnp.where(self.real[:, :, None], rows(y, self._target), 0)


def rows(x, index):
    """x: [B, T, D], index: [B, S]; returns [B, S, D]."""
    return jax.vmap(lambda row, i: row[i])(x, index)
