"""Grouped-query attention with a cache: groups of query heads share a key and a value head.

Ainslie et al. 2023, arXiv:2305.13245, figure 2. Query head n uses group n // (N / G).
"""

from keras import ops


def fold_queries(query, groups):
    """[B, T, N, K] → [B, T · N / G, G, K]: the heads of a group become queries of one head.

    Any attention kernel then reads keys and values once per group, without repeating them.
    """
    batch, length, heads, size = ops.shape(query)
    query = ops.reshape(query, (batch, length, groups, heads // groups, size))
    query = ops.transpose(query, (0, 1, 3, 2, 4))
    return ops.reshape(query, (batch, length * (heads // groups), groups, size))


def fold_mask(mask, repeats):
    """[B, T, S] → [B, T · repeats, S], like the queries; [B, 1, S] applies to all queries."""
    if mask is None or mask.shape[1] == 1:
        return mask
    return ops.repeat(mask, repeats, axis=1)


def unfold_outputs(output, heads):
    """[B, T · N / G, G, V] → [B, T, N, V], the inverse of `fold_queries`."""
    batch, rows, groups, size = ops.shape(output)
    repeats = heads // groups
    output = ops.reshape(output, (batch, rows // repeats, repeats, groups, size))
    output = ops.transpose(output, (0, 1, 3, 2, 4))
    return ops.reshape(output, (batch, rows // repeats, heads, size))


def attention_scores(query, key):
    """q · k for each query head: [B, T, N, K], [B, S, G, K] → [B, N, T, S]."""
    batch, length, heads, size = ops.shape(query)
    groups = key.shape[2]
    query = ops.reshape(query, (batch, length, groups, heads // groups, size))
    scores = ops.einsum("btgrk,bsgk->bgrts", query, key)
    return ops.reshape(scores, (batch, heads, length, ops.shape(key)[1]))


def mix_values(weights, value):
    """Σ weight · v for each query head: [B, N, T, S], [B, S, G, V] → [B, T, N, V]."""
    batch, heads, length, positions = ops.shape(weights)
    groups = value.shape[2]
    weights = ops.reshape(weights, (batch, groups, heads // groups, length, positions))
    output = ops.einsum("bgrts,bsgv->btgrv", weights, value)
    return ops.reshape(output, (batch, length, heads, value.shape[3]))


def update_cache(cache, index, project):
    """Writes new keys and values to a cache [B, 2, S, G, K]; returns keys, values and the cache.

    Args:
        cache: the array. None: returns the new keys and values.
        index: the position to write to. None: the cache is not changed.
        project: a function without arguments that returns the new keys and values, [B, T, G, K].
    """
    if cache is None:
        if index is not None:
            raise ValueError(f"`cache_update_index` is {index}, but there is no `cache`.")
        return *project(), None
    key, value = cache[:, 0], cache[:, 1]
    if index is not None:
        new_key, new_value = project()
        start = (0, index, 0, 0)
        key = ops.slice_update(key, start, ops.cast(new_key, key.dtype))
        value = ops.slice_update(value, start, ops.cast(new_value, value.dtype))
        cache = ops.stack((key, value), axis=1)
    return key, value, cache
