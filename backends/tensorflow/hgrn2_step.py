"""A token of HGRN2's recurrence, from its three linear maps.  Qin et al. 2024, arXiv:2404.07904."""

import tensorflow as tf

from ..constants import PADDING, STARTS
from ._common import accumulation_dtype, sigmoids


def hgrn2_step(q, f, v, memory, lower_bound=None, token_kind=None):
    """q, f: [B, H K]; v: [B, H V]; memory: [B, H, K, V]. Returns ([B, H V], the next memory)."""
    dtype = accumulation_dtype(q, f, v, memory, lower_bound)
    heads, keys, values = memory.shape[1:]
    query, logits, value = (tf.cast(x, dtype) for x in (q, f, v))
    query = query * sigmoids(query)[0] * keys**-0.5
    remembers, forgets = sigmoids(logits)
    if lower_bound is not None:
        bound, rest = tf.unstack(tf.exp(tf.cast(lower_bound, dtype)))
        remembers, forgets = bound + rest * remembers, rest * forgets
        # Rounded, β and 1 - β do not add up to 1; β may be NaN.
        near_1 = (forgets <= 0.5) & ~tf.math.is_nan(remembers)
        remembers = tf.where(near_1, 1 - forgets, remembers)
    query, remembers, forgets = (
        tf.reshape(x, (-1, heads, keys)) for x in (query, remembers, forgets)
    )
    value = tf.reshape(value, (-1, heads, values))
    if token_kind is not None:
        kind = token_kind[:, None, None]
        padding, starts = kind == PADDING, kind == STARTS
        forgets, value = (tf.where(padding, tf.zeros_like(x), x) for x in (forgets, value))
        remembers = tf.where(padding, tf.ones_like(remembers), remembers)
        remembers = tf.where(starts, tf.zeros_like(remembers), remembers)
    memory = remembers[..., None] * tf.cast(memory, dtype) + forgets[..., None] * value[:, :, None]
    output = tf.reduce_sum(query[..., None] * memory, axis=2)
    return tf.cast(tf.reshape(output, (-1, heads * values)), v.dtype), memory
