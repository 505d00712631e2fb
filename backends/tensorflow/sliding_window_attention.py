"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

Padding may be anywhere in a sequence. The real tokens are first moved to the front, after the
cached ones, where a window is a band of the logits; the outputs are moved back.
"""

import tensorflow as tf

from ..constants import PADDING, STARTS
from . import _banded_attention, _circular_buffer
from ._attention_inputs import AttentionInputs
from ._common import as_tensors, length_of, recompute


def sliding_window_attention(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
):
    """q: [B, T, H, K]; k: [B, T, G, K]; v: [B, T, G, V]."""
    q, k, v = as_tensors(q, k, v)
    if initial_state is None:
        if capacity is None and sliding_window is not None:
            capacity = sliding_window - 1
        # Empty buffers.
        key, value = (x[:, :0] for x in (k, v))
        position = tf.zeros([tf.shape(q)[0]], tf.int32)
    else:
        key, value, position = as_tensors(
            *(initial_state[name] for name in ("key", "value", "position"))
        )
        capacity = length_of(key)
    inputs = AttentionInputs(q, k, v, key, position, token_kind, sliding_window)
    attend = _one_token if q.shape[1] == 1 and initial_state is not None else _attend
    output, *buffers = attend(inputs, 0 if capacity is None else capacity, q, k, v, key, value)
    if capacity is None:
        return output, {}
    return output, {"key": buffers[0], "value": buffers[1], "position": inputs.next_position}


def _attend(inputs, capacity, *tensors):
    def attend(q, k, v, key, value):
        keys, values = inputs.concat_cached(k, key), inputs.concat_cached(v, value)
        arguments = (inputs.grouped(q), inputs.banded(keys), inputs.banded(values))
        output = _banded_attention.attend(*arguments, inputs.documents, inputs.window)
        buffers = (
            _circular_buffer.from_sequence(x, inputs.next_position, inputs.end, capacity)
            for x in (keys, values)
        )
        return inputs.ungrouped(output, q.dtype), *buffers

    return recompute(attend, *tensors)


def _one_token(inputs, capacity, q, k, v, key, value):
    """A decoding step: reads the circular buffer without reordering it, and writes one slot."""
    kind, dtype = inputs.token_kind, inputs.dtype
    real, position = tf.ones_like(inputs.position, tf.bool), inputs.position
    if kind is not None:
        real = kind[:, 0] != PADDING
        position = tf.where(kind[:, 0] == STARTS, 0, position)
        q, k, v = (tf.where(real[:, None, None, None], x, 0) for x in (q, k, v))
    age = _circular_buffer.ages(position, capacity)
    filled = age < position[:, None]
    keys, values = (
        tf.where(filled[:, :, None, None], tf.cast(buffer, x.dtype), 0)
        for buffer, x in ((key, k), (value, v))
    )

    visible = filled & (age < inputs.window - 1) if inputs.window else filled
    grouped = tf.reshape(tf.cast(q, dtype), [inputs.batch, inputs.groups, -1, q.shape[3]])
    own_key, own_value = (tf.cast(x, dtype)[:, 0, :, None] for x in (k, v))
    logits = tf.einsum("bgrk,bsgk->bgrs", grouped, tf.cast(keys, dtype))
    logits = tf.where(visible[:, None, None], logits, dtype.min)
    own_logit = tf.reduce_sum(grouped * own_key, axis=-1, keepdims=True)
    weights = _banded_attention.softmax(tf.concat([logits, own_logit], axis=-1))
    output = tf.einsum("bgrs,bsgv->bgrv", weights[..., :-1], tf.cast(values, dtype))
    output += weights[..., -1:] * own_value
    output = tf.reshape(output, [inputs.batch, 1, q.shape[2], v.shape[3]])
    output = tf.where(real[:, None, None, None], output, 0)

    slot = position % tf.maximum(capacity, 1)
    written = (tf.range(capacity) == slot[:, None]) & real[:, None]
    buffers = (
        tf.where(written[:, :, None, None], x, buffer) for x, buffer in ((k, keys), (v, values))
    )
    return tf.cast(output, q.dtype), *buffers
