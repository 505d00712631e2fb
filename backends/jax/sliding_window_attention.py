"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

Padding may stand anywhere in a row: behind the real tokens of each row, as most often, it is left
there; else those are first moved together, behind those of the state, where a window is a band,
and the outputs are moved back.
"""

import functools

import jax
import jax.numpy as jnp

from keras_recurrent.backends.jax import _banded_attention, _ring
from keras_recurrent.backends.jax._real_tokens import RealTokens
from keras_recurrent.backends.jax._tokens import PADDING, STARTS, accumulate


def forward(q, k, v, of_queries, of_keys, *, window, dtype):
    """Attention of queries that stand at the end of their keys, if both are of one document.

    q: [B, T, G, R, K], where R heads share a key; k: [B, S, G, K]; v: [B, S, G, V]; numbers of
    documents [B, T] and [B, S]; window: less than S, or None. Returns [B, T, G, R, V] in q's dtype
    and the logarithms of the softmax's sums [B, T, G, R].

    Of document 0 is what is no token, and may hold anything; its output is 0.
    """
    q, k, v = _there(of_queries, q), _there(of_keys, k), _there(of_keys, v)
    documents = of_queries, _banded(of_keys, q, window)
    k, v = (_banded(x, q, window) for x in (k, v))
    output, log_total = _banded_attention.forward(q, k, v, documents, window, dtype)
    return output.astype(q.dtype), log_total


def backward(q, k, v, of_queries, of_keys, log_total, d_output, *, window, dtype):
    """Returns the gradients of q, k and v in `dtype`."""
    q, k, v = _there(of_queries, q), _there(of_keys, k), _there(of_keys, v)
    d_output = _there(of_queries, d_output)
    documents = of_queries, _banded(of_keys, q, window)
    keys, values = (_banded(x, q, window) for x in (k, v))
    d_output = d_output.astype(dtype)
    d_q, *d_banded = _banded_attention.backward(
        d_output, log_total, q, keys, values, documents, window, dtype
    )
    return d_q, *(_unbanded(d, k, q, window) for d in d_banded)


def operation(forward, backward):
    """The operation made of two functions: those of this file, or others with their arguments."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    def attention(window, capacity, q, k, v, initial_state, token_kind):
        return save(window, capacity, q, k, v, initial_state, token_kind)[0]

    def save(window, capacity, q, k, v, initial_state, token_kind):
        def attend(tokens, q, k, v):
            row = _Row(window, q, k, v, initial_state, token_kind, tokens)
            queries, keys, values = row.arranged()
            output, log_total = forward(
                queries, keys, values, *row.documents(), window=row.window, dtype=row.dtype
            )
            state = []
            if capacity is not None:
                end = row.next_position, row.end
                state = [*(_ring.to_ring(x, *end, capacity) for x in (keys, values)), end[0]]
            return row.back(output), state, log_total

        output, state, log_total = _in_front(attend, token_kind, q, k, v)
        results = (output.reshape(*q.shape[:3], v.shape[3]), *state)
        return results, (q, k, v, initial_state, token_kind, log_total)

    def gradients(window, capacity, saved, d_results):
        q, k, v, initial_state, token_kind, log_total = saved

        def attend(tokens, q, k, v, d_output):
            row = _Row(window, q, k, v, initial_state, token_kind, tokens)
            queries, keys, values = row.arranged()
            d_queries, *d_rows = backward(
                queries,
                keys,
                values,
                *row.documents(),
                log_total,
                row.together(_grouped(d_output, k)),
                window=row.window,
                dtype=row.dtype,
            )
            if capacity is not None:
                total = keys.shape[1]
                d_rows = [
                    d + _ring.to_row(d_ring, row.next_position, row.end, total)
                    for d, d_ring in zip(d_rows, d_results[1:3], strict=True)
                ]
            d_state = None
            if initial_state is not None:
                start = jnp.full_like(row.position, row.kept)
                d_state = {
                    name: _ring.to_ring(d[:, : row.kept], row.position, start, row.kept)
                    for name, d in zip(("key", "value"), d_rows, strict=True)
                }
            d_k, d_v = (row.back(d[:, row.kept :]) for d in d_rows)
            d_q = row.back(d_queries)
            return (d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)), d_state

        d_tensors, d_state = _in_front(attend, token_kind, q, k, v, d_results[0])
        d_tensors = [d.reshape(x.shape) for d, x in zip(d_tensors, (q, k, v), strict=True)]
        if d_state is not None:
            d_state = {
                "key": d_state["key"].astype(k.dtype),
                "value": d_state["value"].astype(v.dtype),
                "position": None,
            }
        return *d_tensors, d_state, None

    attention.defvjp(save, gradients)

    @functools.partial(jax.jit, static_argnames=("sliding_window", "capacity"))
    def sliding_window_attention(
        q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
    ):
        """q: [B, T, H, K]; k: [B, T, G, K]; v: [B, T, G, V].

        Returns ([B, T, H, V] in q's dtype, {"key": [B, C, G, K], "value": [B, C, G, V],
        "position": int32 [B]}, keys and values in their dtypes). C is that of the initial state,
        else `capacity`, else `sliding_window` - 1; without any of them the state is an empty dict.
        """
        if initial_state is not None and q.shape[1] == 1:
            return _one_token(q, k, v, sliding_window, initial_state, token_kind)
        if initial_state is not None:
            capacity = initial_state["key"].shape[1]
        elif capacity is None and sliding_window is not None:
            capacity = sliding_window - 1
        output, *state = attention(sliding_window, capacity, q, k, v, initial_state, token_kind)
        return output, dict(zip(("key", "value", "position"), state, strict=False))

    return sliding_window_attention


sliding_window_attention = operation(forward, backward)


def _in_front(attend, token_kind, *tensors):
    """`attend(tokens, *tensors)` with the real tokens before all padding: where they are, if so.

    Else they are moved, which reads and writes everything once more. What `attend` takes and
    returns has its heads side by side on the way: apart, XLA would lay them out by a copy.
    """
    if token_kind is None:
        return attend(None, *tensors)
    there, flat = _LeftThere(token_kind), [_flat(x) for x in tensors]

    def attend_to(tokens):
        given = [
            x.reshape(like.shape)
            for x, like in zip(jax.lax.optimization_barrier(flat), tensors, strict=True)
        ]
        return attend(tokens, *given)

    return jax.lax.cond(
        there.in_front, lambda: attend_to(there), lambda: attend_to(RealTokens(token_kind))
    )


class _LeftThere:
    """`RealTokens` that stand in front."""

    def __init__(self, token_kind):
        real = token_kind != PADDING
        self.count = jnp.sum(real, axis=1, keepdims=True)
        self.in_front = jnp.all(real == (jnp.arange(real.shape[1]) < self.count))
        self.document = jnp.where(real, jnp.cumsum(token_kind == STARTS, axis=1), -1)

    def together(self, x):
        return x

    back = together


class _Row:
    """What was seen before and then the real tokens, side by side."""

    def __init__(self, window, q, k, v, initial_state, token_kind, tokens):
        self.q, self.k, self.v, self.state, self.tokens = q, k, v, initial_state, tokens
        self.dtype = accumulate(q, k, v)
        batch, self.length = q.shape[:2]
        self.kept, self.position = 0, jnp.zeros(batch, jnp.int32)
        if initial_state is not None:
            self.kept, self.position = initial_state["key"].shape[1], initial_state["position"]
        # A window as long as the row is none.
        self.window = window if window and window < self.kept + self.length else None

        count, start = jnp.full(batch, self.length), jnp.full(batch, -1)
        if self.tokens is not None:
            count = self.tokens.count[:, 0]
            nth = jnp.cumsum(token_kind != PADDING, axis=1) - 1
            start = jnp.max(jnp.where(token_kind == STARTS, nth, -1), axis=1)
        self.end = self.kept + count
        self.next_position = jnp.where(start < 0, self.position + count, count - start)
        self.next_position = self.next_position.astype(jnp.int32)

    def arranged(self):
        keys, values = self.together(self.k), self.together(self.v)
        if self.state is not None:
            end = jnp.full_like(self.position, self.kept)
            keys, values = (
                jnp.concatenate(
                    [_ring.to_row(ring, self.position, end, self.kept).astype(x.dtype), x], axis=1
                )
                for ring, x in ((self.state["key"], keys), (self.state["value"], values))
            )
        return self.together(_grouped(self.q, self.k)), keys, values

    def together(self, x):
        return x if self.tokens is None else self.tokens.together(_flat(x)).reshape(x.shape)

    def back(self, x):
        """Heads side by side: [B, T, ...] as [B, T, D]."""
        return _flat(x) if self.tokens is None else self.tokens.back(_flat(x))

    def documents(self):
        """Numbers of queries and of keys; 0 goes on from the state, -1 is a place without token."""
        of_queries = jnp.zeros((self.k.shape[0], self.length), jnp.int32)
        if self.tokens is not None:
            of_queries = self.tokens.document
        age = self.kept - 1 - jnp.arange(self.kept)
        before = jnp.where(age < self.position[:, None], 0, -1)
        of_keys = jnp.concatenate([before, of_queries], axis=1)
        # Numbers from 1 on, so that the zeros that fill up a band are no document.
        return of_queries + 1, of_keys + 1


def _there(documents, x):
    """x [B, N, ...] with zeros where there is no token."""
    return jnp.where((documents > 0).reshape(*documents.shape, *[1] * (x.ndim - 2)), x, 0)


def _banded(x, q, window):
    """x [B, S, ...] with `window` - 1 places before the first query, if there is a window."""
    if window is None:
        return x
    missing = window - 1 - (x.shape[1] - q.shape[1])
    if missing < 0:
        return x[:, -missing:]
    return jnp.pad(x, [(0, 0), (missing, 0)] + [(0, 0)] * (x.ndim - 2))


def _unbanded(d, x, q, window):
    """The transpose of `_banded`."""
    if window is None:
        return d
    missing = window - 1 - (x.shape[1] - q.shape[1])
    if missing >= 0:
        return d[:, missing:]
    return jnp.pad(d, [(0, 0), (-missing, 0)] + [(0, 0)] * (d.ndim - 2))


def _one_token(q, k, v, window, state, token_kind):
    """A step of generation: the ring is read as it lies, and one slot written."""
    dtype = accumulate(q, k, v)
    kind = jnp.zeros(q.shape[0], jnp.int8) if token_kind is None else token_kind[:, 0]
    real = (kind != PADDING)[:, None, None, None]
    q, k, v = (jnp.where(real, x, 0) for x in (q, k, v))
    position = jnp.where(kind == STARTS, 0, state["position"])
    capacity = state["key"].shape[1]
    age = _ring.ages(position, capacity) if capacity else jnp.zeros((q.shape[0], 0), jnp.int32)
    filled = (age < position[:, None])[:, :, None, None]
    keys, values = (jnp.where(filled, state[name], 0) for name in ("key", "value"))

    product = _banded_attention.product_of(q, k, v, dtype)
    grouped = _grouped(q, k)[:, 0]
    seen = age < (jnp.minimum(position[:, None], window - 1) if window else position[:, None])
    logits = jnp.where(seen[:, None, None], product("bgrk,bsgk->bgrs", grouped, keys), -jnp.inf)
    logits = jnp.concatenate([logits, product("bgrk,bsgk->bgrs", grouped, k)], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)
    output = product("bgrs,bsgv->bgrv", weights[..., :capacity], values)
    output = output + weights[..., capacity:] * v[:, 0, :, None].astype(dtype)
    output = output.reshape(q.shape[0], 1, q.shape[2], v.shape[3])
    output = jnp.where(real, output, 0).astype(q.dtype)

    if capacity:
        here = (jnp.arange(capacity) == position[:, None] % capacity)[:, :, None, None] & real
        keys, values = jnp.where(here, k, keys), jnp.where(here, v, values)
    position = position + (kind != PADDING).astype(jnp.int32)
    return output, {"key": keys, "value": values, "position": position}


def _grouped(x, k):
    """[B, T, H, ...] as [B, T, G, H / G, ...]."""
    return x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[3])


def _flat(x):
    return x.reshape(*x.shape[:2], -1)
