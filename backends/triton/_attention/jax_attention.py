"""Softmax attention on JAX: launches for keys and values that plain JAX has arranged.

The keys of a sequence are the state's tokens, then the real tokens, then padding. A query sees keys
of the document whose number is its segment. `forward` and `backward` have the parameters of those
in `backends/jax`.
"""

import jax
import jax.numpy as jnp

from ...constants import CONTINUES, PADDING
from ...jax import _shards
from ...jax import sliding_window_attention as plain
from . import banded_attention

_QUERY, _KEY, _VALUE, _OUTPUT = "B T G R K", "B T G K", "B T G V", "B T G R V"
_ARGUMENTS = (_QUERY, "B S G K", "B S G V", "B T", "B S")
_RESIDUALS = (_OUTPUT, _OUTPUT, "B T G R", "B T G R")  # output, rest, origin, total


def forward(q, k, v, query_segments, key_segments, **options):
    """Returns the output and the residuals: all arrays of `banded_attention.forward`."""
    arrays = banded_attention.results(_merge_heads(q), k, v)
    results = [names for names, array in zip(_RESIDUALS, arrays, strict=True) if array is not None]

    def launch(q, k, v, query_segments, key_segments):
        k, v, visible = _visible(q, k, v, query_segments, key_segments, **options)
        computed = banded_attention.forward(_merge_heads(q), k, v, visible)
        return tuple(x.reshape(*q.shape[:4], *x.shape[3:]) for x in computed if x is not None)

    residuals = iter(
        _distributed(launch, k, _ARGUMENTS, results)(q, k, v, query_segments, key_segments)
    )
    residuals = [None if array is None else next(residuals) for array in arrays]
    return residuals[0], residuals


def backward(q, k, v, query_segments, key_segments, residuals, d_output, *, dtype, **options):
    def launch(q, k, v, query_segments, key_segments, *residuals_and_gradient):
        k, v, visible = _visible(q, k, v, query_segments, key_segments, **options)
        *flat, d_output = (None if x is None else _merge_heads(x) for x in residuals_and_gradient)
        output, *sums = flat
        d_q, d_k, d_v = banded_attention.backward(
            d_output, (None, None), output, sums, _merge_heads(q), k, v, visible
        )
        return d_q.reshape(q.shape).astype(dtype), d_k.astype(dtype), d_v.astype(dtype)

    run = _distributed(
        launch, k, (*_ARGUMENTS, *_RESIDUALS, _OUTPUT), (_QUERY, "B S G K", "B S G V")
    )
    return run(q, k, v, query_segments, key_segments, *residuals, d_output)


def _distributed(launch, k, arguments, results):
    """The function on shards and under `jax.vmap`; query heads of a single key head are split."""
    channels = ("R",) if k.shape[2] == 1 else ("G",)
    return _shards.distributed(launch, arguments, results, channels)


def _merge_heads(x):
    """[B, T, G, R, ...] as [B, T, H, ...]."""
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _visible(q, k, v, query_segments, key_segments, *, window, one_document, **_):
    """k, v and the keys that each query sees: its document's keys in the window, up to its own.

    Keys and values without a token may hold anything, and are replaced by 0: products multiply
    invisible keys by 0.
    """
    length, total = q.shape[1], k.shape[1]
    if one_document:
        return k, v, banded_attention.VisibleKeys(None, None, None, window or total)
    k, v = (jnp.where((key_segments > 0)[:, :, None, None], x, 0) for x in (k, v))
    position = jnp.arange(total)
    begins = jnp.diff(key_segments, axis=1, prepend=-1) != 0
    document_begin = jax.lax.cummax(jnp.where(begins, position, 0), axis=1)
    # Padding sees the last real token's keys: first and last keys never decrease along a sequence.
    count = jnp.sum(query_segments > 0, axis=1, keepdims=True)
    last = total - length + jnp.minimum(jnp.arange(length), count - 1)
    first = jnp.take_along_axis(document_begin, jnp.maximum(last, 0), axis=1)
    if window is not None:
        first = jnp.maximum(first, last - window + 1)
    kind = jnp.where(query_segments > 0, CONTINUES, PADDING).astype(jnp.int8)
    first, last = first.astype(jnp.int32), last.astype(jnp.int32)
    return k, v, banded_attention.VisibleKeys(kind, first, last, window or total)


sliding_window_attention = plain.sliding_window_attention.replace_passes(forward, backward)
