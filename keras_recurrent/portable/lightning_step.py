"""A decoding step of `scalar_decay_attention`, or of lightning attention: arXiv:2405.17381."""

from keras import ops

from keras_recurrent.backends.constants import SQUARES_GROUP
from keras_recurrent.portable._common import (
    applied_decay,
    fill_where,
    group_squares,
    sum_dtype,
    token_masks,
)
from keras_recurrent.portable._heads import prepare_heads
from keras_recurrent.portable._linear_attention import step


def lightning_step(
    q,
    k,
    v,
    memory,
    log_decay,
    position=None,
    q_scale=None,
    k_scale=None,
    frequencies=None,
    norm_scale=None,
    output_gate=None,
    token_kind=None,
    epsilon=None,
    query_scale=None,
):
    """q, k: [B, G, K]; v: [B, G, V]; memory: [B, H, K, V]; log_decay: [H] or [B, H].

    The number G of heads may differ between q, k and v; each divides H.
    Returns (y [B, H, V], sums of squares [B, H, U], the next memory).
    """
    dtype = sum_dtype(q, k, v, memory, log_decay, q_scale, k_scale)
    starts, padding = token_masks(None if token_kind is None else token_kind[:, None], 3)
    if position is not None:
        position = fill_where(None if starts is None else starts[..., 0], 0, position[:, None])
    query = prepare_heads(ops.cast(q, dtype), position, frequencies, q_scale, epsilon)
    key = prepare_heads(ops.cast(k, dtype), position, frequencies, k_scale, epsilon)
    if query_scale is not None:
        query = query * query_scale
    query, key, value = (fill_where(padding, 0.0, x) for x in (query, key, ops.cast(v, dtype)))
    heads = memory.shape[1]
    query, key, value = (
        x if x.shape[1] == heads else ops.repeat(x, heads // x.shape[1], axis=1)
        for x in (query, key, value)
    )
    decay = ops.reshape(ops.exp(ops.cast(log_decay, dtype)), (-1, heads, 1))
    decay = applied_decay(decay, starts, padding)
    memory, output = step(ops.cast(memory, dtype), query, key, value, decay)
    squares = group_squares(output, SQUARES_GROUP)
    if norm_scale is not None:
        output = output * ops.reshape(ops.cast(norm_scale, dtype), output.shape[1:])
    if output_gate is not None:
        output = output * ops.sigmoid(ops.cast(output_gate, dtype))
    return ops.cast(output, v.dtype), squares, memory
