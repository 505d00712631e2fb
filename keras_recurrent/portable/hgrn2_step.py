"""A decoding step of HGRN2, from its three projections.  Qin et al. 2024, arXiv:2404.07904."""

from keras import ops

from keras_recurrent.backends.constants import SQUARES_GROUP
from keras_recurrent.portable._common import (
    applied_decay,
    fill_where,
    group_squares,
    sum_dtype,
    token_masks,
)
from keras_recurrent.portable._linear_attention import step


def hgrn2_step(q, f, v, memory, lower_bound=None, norm_scale=None, token_kind=None):
    """q, f: [B, H K]; v: [B, H V]; memory: [B, H, K, V]. norm_scale: [H V].

    Returns ([B, H V], sums of squares [B, H, U], the next memory).
    """
    query, *token = operands(q, f, v, memory, lower_bound, token_kind)
    memory, output = step(ops.cast(memory, query.dtype), query, *token)
    squares = group_squares(output, SQUARES_GROUP)
    output = ops.reshape(output, v.shape)
    if norm_scale is not None:
        output = output * ops.cast(norm_scale, output.dtype)
    return ops.cast(output, v.dtype), squares, memory


def operands(q, f, v, memory, lower_bound, token_kind):
    """Returns the query, the key, the value and the decay of the memory, by heads."""
    dtype = sum_dtype(q, f, v, memory, lower_bound)
    batch, heads, keys, values = memory.shape
    query, logits, value = (ops.cast(x, dtype) for x in (q, f, v))
    query = query * ops.sigmoid(query) * keys**-0.5
    decay, key = ops.sigmoid(logits), ops.sigmoid(-logits)
    if lower_bound is not None:
        bounds = ops.exp(ops.cast(lower_bound, dtype))
        decay, key = bounds[0] + bounds[1] * decay, bounds[1] * key
        # Rounded β and 1 - β do not add up to 1; β may be NaN.
        decay = ops.where((key <= 0.5) & ~ops.isnan(decay), 1 - key, decay)
    query, key, decay = (ops.reshape(x, (batch, heads, keys)) for x in (query, key, decay))
    value = ops.reshape(value, (batch, heads, values))
    starts, padding = token_masks(None if token_kind is None else token_kind[:, None], 3)
    query, key, value = (fill_where(padding, 0.0, x) for x in (query, key, value))
    return query, key, value, applied_decay(decay, starts, padding)
