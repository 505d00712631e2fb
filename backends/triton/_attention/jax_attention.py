"""Softmax attention in programs of JAX: the launches, for a row that plain JAX has arranged.

Real tokens are in front of all padding, behind the tokens of the state, and numbers of documents
say which keys a query may see. `forward` and `backward` have the parameters of those in
`backends/jax`.
"""

import jax
import jax.numpy as jnp

from ...constants import GOES_ON, PADDING
from ...jax import _shards
from ...jax import sliding_window_attention as plain
from . import banded_attention

_QUERY, _KEY, _VALUE, _OUTPUT = "b t g r k", "b t g k", "b t g v", "b t g r v"
_GIVEN = (_QUERY, "b s g k", "b s g v", "b t", "b s")
_KEPT = (_OUTPUT, _OUTPUT, "b t g r", "b t g r")  # output, rest, origin, total


def forward(q, k, v, of_queries, of_keys, **options):
    """Keeps for the backward what `banded_attention.forward` returns."""
    arrays = banded_attention.results(_flat(q), k, v)
    results = [names for names, array in zip(_KEPT, arrays, strict=True) if array is not None]

    def launch(q, k, v, of_queries, of_keys):
        k, v, visible = _visible(q, k, v, of_queries, of_keys, **options)
        found = banded_attention.forward(_flat(q), k, v, visible)
        return tuple(x.reshape(*q.shape[:4], *x.shape[3:]) for x in found if x is not None)

    kept = iter(_distributed(launch, k, _GIVEN, results)(q, k, v, of_queries, of_keys))
    kept = [None if array is None else next(kept) for array in arrays]
    return kept[0], kept


def backward(q, k, v, of_queries, of_keys, kept, d_output, *, dtype, **options):
    def launch(q, k, v, of_queries, of_keys, *kept_and_gradient):
        k, v, visible = _visible(q, k, v, of_queries, of_keys, **options)
        *flat, d_output = (None if x is None else _flat(x) for x in kept_and_gradient)
        output, *sums = flat
        d_q, d_k, d_v = banded_attention.backward(
            d_output, (None, None), output, sums, _flat(q), k, v, visible
        )
        return d_q.reshape(q.shape).astype(dtype), d_k.astype(dtype), d_v.astype(dtype)

    run = _distributed(launch, k, (*_GIVEN, *_KEPT, _OUTPUT), (_QUERY, "b s g k", "b s g v"))
    return run(q, k, v, of_queries, of_keys, *kept, d_output)


def _distributed(launch, k, arguments, results):
    """On shards and under `jax.vmap`; heads that share one of keys are split among themselves."""
    channels = "r" if k.shape[2] == 1 else "g"
    return _shards.distributed(launch, arguments, results, channels)


def _flat(x):
    """[B, T, G, R, ...] as [B, T, H, ...]."""
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _visible(q, k, v, of_queries, of_keys, *, window, one_document, **_):
    """k, v, and which of them each query sees: those of its document in the window, up to its own.

    Keys and values without a token, which may be anything, are 0: what is not seen counts 0 times.
    """
    length, total = q.shape[1], k.shape[1]
    if one_document:
        return k, v, banded_attention.VisibleKeys(None, None, None, window or total)
    k, v = (jnp.where((of_keys > 0)[:, :, None, None], x, 0) for x in (k, v))
    place = jnp.arange(total)
    begins = jnp.diff(of_keys, axis=1, prepend=-1) != 0
    document_begin = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    # Padding sees what the last real token sees: first and last keys never fall along a row.
    count = jnp.sum(of_queries > 0, axis=1, keepdims=True)
    last = total - length + jnp.minimum(jnp.arange(length), count - 1)
    first = jnp.take_along_axis(document_begin, jnp.maximum(last, 0), axis=1)
    if window is not None:
        first = jnp.maximum(first, last - window + 1)
    kind = jnp.where(of_queries > 0, GOES_ON, PADDING).astype(jnp.int8)
    first, last = first.astype(jnp.int32), last.astype(jnp.int32)
    return k, v, banded_attention.VisibleKeys(kind, first, last, window or total)


attention = plain.operation(forward, backward)
