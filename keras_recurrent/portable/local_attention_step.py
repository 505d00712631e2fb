"""A decoding step of sliding-window attention.  De et al. 2024, arXiv:2402.19427."""

import math

from keras import ops

from keras_recurrent.portable._common import fill_where, matmul, sum_dtype, token_masks
from keras_recurrent.portable._heads import prepare_heads
from keras_recurrent.portable.sliding_window_attention import MASKED_LOGIT


def local_attention_step(
    q,
    k,
    v,
    key,
    value,
    position,
    frequencies=None,
    q_scale=None,
    k_scale=None,
    output_gate=None,
    token_kind=None,
    sliding_window=None,
    epsilon=None,
    query_scale=None,
    logit_scaling=None,
):
    """q: [B, H, K]; k: [B, G, K]; v: [B, G, V]; key, value: [B, C, G, ...]; position: [B].

    Returns (y [B, H, V], the next key and value).
    """
    dtype = sum_dtype(q, k, v, key, value)
    starts, padding = token_masks(None if token_kind is None else token_kind[:, None], 2)
    position = fill_where(starts, 0, position[:, None])
    mask = None if padding is None else padding[..., None]
    q, k, v = (fill_where(mask, 0, x) for x in (q, k, v))
    query = prepare_heads(ops.cast(q, dtype), position, frequencies, q_scale, epsilon)
    query = query * (q.shape[2] ** -0.5 if query_scale is None else query_scale)
    if logit_scaling is not None:
        growth = ops.log(ops.cast(position, dtype) + logit_scaling)
        query = query * (growth / math.log(math.floor(logit_scaling)))[..., None]
    token_key = prepare_heads(ops.cast(k, dtype), position, frequencies, k_scale, epsilon)
    q, k = ops.cast(query, q.dtype), ops.cast(token_key, k.dtype)
    slots = max(key.shape[1], 1)
    slot = ops.arange(0, key.shape[1], dtype="int32")[None]
    written = ops.mod(position, slots)  # slot of this token
    # Remainders of negative integers differ between the runtimes of exported models.
    distance = ops.mod(written + slots - 1 - slot, slots) + 1  # of the token in each slot
    visible = distance <= position
    if sliding_window is not None:
        visible &= distance < sliding_window
    always = ops.ones((*ops.shape(position)[:1], 1), "bool")
    visible = ops.concatenate([visible, always], axis=1)
    new_slot = ops.equal(slot, written)
    if padding is not None:
        new_slot &= ~padding
    caches = [
        _update_cache(cache, ops.expand_dims(x, 1), starts, new_slot)
        for cache, x in ((key, k), (value, v))
    ]
    (keys, key), (values, value) = caches
    output = _attend(ops.cast(q, dtype), ops.cast(keys, dtype), ops.cast(values, dtype), visible)
    if output_gate is not None:
        output = output * ops.sigmoid(ops.cast(output_gate, dtype))
    return ops.cast(output, q.dtype), key, value


def _update_cache(cache, x, starts, new_slot):
    """Returns the earlier tokens and this one, [B, C+1, G, ...], and the next cache."""
    mask = None if starts is None else starts[..., None, None]
    cache = fill_where(mask, 0, ops.cast(cache, x.dtype))
    after = ops.where(new_slot[..., None, None], x, cache)
    return ops.concatenate([cache, x], axis=1), after


def _attend(q, k, v, visible):
    """q: [B, H, K]; k, v: [B, S, G, K or V]; visible: [B, S]. Returns [B, H, V]."""
    batch, heads, size = ops.shape(q)
    q = ops.reshape(q, (batch, k.shape[2], heads // k.shape[2], size))
    logits = matmul(q, ops.transpose(k, (0, 2, 3, 1)))
    masked = ops.cast(MASKED_LOGIT, logits.dtype)
    weights = ops.softmax(ops.where(visible[:, None, None], logits, masked), axis=-1)
    output = matmul(weights, ops.transpose(v, (0, 2, 1, 3)))
    return ops.reshape(output, (batch, heads, v.shape[3]))
