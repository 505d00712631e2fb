"""Keys, values and queries of attention, with real tokens first and padding last."""

import jax
import jax.numpy as jnp

from ..constants import PADDING, STARTS
from . import _circular_buffer
from ._common import accumulation_dtype
from ._real_tokens import RealTokens


def attend_real_tokens_first(attend, token_kind, *tensors):
    """Calls `attend(tokens, *tensors)`, where `tokens` moves real tokens before all padding.

    If padding is already last, as in most batches, nothing is moved, because moving reads and
    writes every tensor once more. The tensors enter the branches with heads and channels in one
    axis; with an axis for heads, XLA would choose another layout for them and copy them.
    """
    if token_kind is None:
        return attend(None, *tensors)
    first, flat = _RealTokensFirst(token_kind), [flatten_heads(x) for x in tensors]

    def attend_to(tokens):
        given = zip(jax.lax.optimization_barrier(flat), tensors, strict=True)
        return attend(tokens, *(x.reshape(like.shape) for x, like in given))

    return jax.lax.cond(
        first.always, lambda: attend_to(first), lambda: attend_to(RealTokens(token_kind))
    )


class _RealTokensFirst:
    """`RealTokens` for sequences with padding at the end, where nothing has to be moved."""

    def __init__(self, token_kind):
        real = token_kind != PADDING
        self.count = jnp.sum(real, axis=1, keepdims=True)
        self.always = jnp.all(real == (jnp.arange(real.shape[1]) < self.count))
        self.document = jnp.where(real, jnp.cumsum(token_kind == STARTS, axis=1), -1)

    def to_front(self, x):
        return x

    put_back = to_front


class AttentionInputs:
    """The cached tokens, followed by the real tokens of each sequence."""

    def __init__(self, q, k, v, initial_state, token_kind, tokens, window):
        self.q, self.k, self.v, self.state, self.tokens = q, k, v, initial_state, tokens
        self.dtype = accumulation_dtype(q, k, v)
        batch, self.length = q.shape[:2]
        self.cached, self.position = 0, jnp.zeros(batch, jnp.int32)
        if initial_state is not None:
            self.cached, self.position = initial_state["key"].shape[1], initial_state["position"]
        # A window of at least the sequence length excludes no key.
        self.window = window if window and window < self.cached + self.length else None

        count, start = jnp.full(batch, self.length), jnp.full(batch, -1)
        if self.tokens is not None:
            count = self.tokens.count[:, 0]
            nth = jnp.cumsum(token_kind != PADDING, axis=1) - 1
            start = jnp.max(jnp.where(token_kind == STARTS, nth, -1), axis=1)
        self.end = self.cached + count
        self.next_position = jnp.where(start < 0, self.position + count, count - start)
        self.next_position = self.next_position.astype(jnp.int32)

    def arrange(self):
        """The queries, keys and values, cached ones first."""
        keys, values = self._after_cached("key", self.k), self._after_cached("value", self.v)
        return self.to_front(grouped(self.q, self.k)), keys, values

    def _after_cached(self, name, x):
        """The cached tokens, followed by those of x."""
        x = self.to_front(x)
        if self.state is None:
            return x
        end = jnp.full_like(self.position, self.cached)
        before = _circular_buffer.to_sequence(self.state[name], self.position, end, self.cached)
        return jnp.concatenate([before.astype(x.dtype), x], axis=1)

    def to_front(self, x):
        """[B, T, ...] with the real tokens first."""
        if self.tokens is None:
            return x
        return self.tokens.to_front(flatten_heads(x)).reshape(x.shape)

    def put_back(self, x):
        """The inverse, and the transpose, of `to_front`; with the heads in one axis, [B, T, D]."""
        return flatten_heads(x) if self.tokens is None else self.tokens.put_back(flatten_heads(x))

    def options(self):
        """Static properties of the sequence, as keyword arguments of both passes."""
        one_document = self.tokens is None and not self.cached
        return {"window": self.window, "dtype": self.dtype, "one_document": one_document}

    def documents(self):
        """Document numbers of queries and of keys, 0 where there is no token."""
        of_queries = jnp.zeros((self.k.shape[0], self.length), jnp.int32)
        if self.tokens is not None:
            of_queries = self.tokens.document
        age = self.cached - 1 - jnp.arange(self.cached)
        of_state = jnp.where(age < self.position[:, None], 0, -1)
        of_keys = jnp.concatenate([of_state, of_queries], axis=1)
        return of_queries + 1, of_keys + 1


def grouped(x, k):
    """[B, T, H, ...] as [B, T, G, H / G, ...]."""
    return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[3])


def flatten_heads(x):
    """[B, T, ...] as [B, T, D]."""
    return x.reshape(*x.shape[:2], -1)
