"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

Padding may be anywhere in a sequence. The real tokens are first moved to the front, after the
cached ones, where a window is a band of the logits; the outputs are moved back.
"""

import torch

from ..constants import PADDING, STARTS
from . import _banded_attention, _circular_buffer
from ._attention_inputs import AttentionInputs, attend, fake_gradients, fake_results, schema
from ._common import accumulation_dtype, is_one_token, register_gradient


def sliding_window_attention(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
):
    """q: [B, T, H, K]; k: [B, T, G, K]; v: [B, T, G, V]."""
    if initial_state is not None and is_one_token(q, k, v, *initial_state.values()):
        return _step(q, k, v, sliding_window, initial_state, token_kind)
    return attend(_operator, q, k, v, sliding_window, initial_state, token_kind, capacity)


def _step(q, k, v, sliding_window, state, token_kind):
    output, key, value, position = _one_token(
        *(q, k, v, state["key"], state["value"], state["position"], token_kind, sliding_window)
    )
    return output, {"key": key, "value": value, "position": position}


@torch.library.custom_op(
    "keras_recurrent::sliding_window_attention",
    mutates_args=(),
    schema=schema(4),
)
def _forward(q, k, v, key, value, position, token_kind, window, capacity):
    if key is not None and q.shape[1] == 1:
        return _one_token(q, k, v, key, value, position, token_kind, window)
    inputs = AttentionInputs(q, k, v, key, value, position, token_kind, window)
    keys, values = inputs.keys_and_values()
    output = _banded_attention.forward(
        inputs.grouped(q),
        inputs.head_major(keys),
        inputs.head_major(values),
        inputs.documents(),
        inputs.window,
    )
    output = inputs.put_back(output.transpose(1, 2).flatten(2, 3)).contiguous()
    buffers = (
        _circular_buffer.from_sequence(x, inputs.next_position, inputs.end, capacity)
        for x in (keys, values)
    )
    return output.to(q.dtype), *buffers, inputs.next_position.int()


@_forward.register_fake
def _(q, k, v, key, value, position, token_kind, window, capacity):
    return fake_results(q, k, v, capacity)


@torch.library.custom_op(
    "keras_recurrent::sliding_window_attention_backward",
    mutates_args=(),
    schema=schema(5, "Tensor? output, Tensor d_output, Tensor d_key, Tensor d_value"),
)
def _backward(
    q, k, v, key, value, position, token_kind, output, d_output, d_key, d_value, window, capacity
):
    inputs = AttentionInputs(q, k, v, key, value, position, token_kind, window)
    keys, values = inputs.keys_and_values()
    d_q, *d_sequences = _banded_attention.backward(
        inputs.grouped(d_output),
        inputs.grouped(q),
        inputs.head_major(keys),
        inputs.head_major(values),
        inputs.documents(),
        inputs.window,
    )
    d_q = inputs.put_back(d_q.transpose(1, 2).flatten(2, 3)).contiguous().to(q.dtype)
    d_sequences = [
        d_sequence.transpose(1, 2)
        + _circular_buffer.to_sequence(d_buffer, inputs.next_position, inputs.end, keys.shape[1])
        for d_sequence, d_buffer in zip(d_sequences, (d_key, d_value), strict=True)
    ]
    return d_q, *inputs.gradients(d_sequences)


@_backward.register_fake
def _(q, k, v, key, *_):
    return fake_gradients(q, k, v, key)


_operator = register_gradient(
    "sliding_window_attention",
    _forward,
    _backward,
    keep_output=False,
    options=2,
    undifferentiated=2,
    integers=1,
)


def _one_token(q, k, v, key, value, position, token_kind, window):
    """A decoding step: reads the circular buffer without reordering it, and writes one slot."""
    dtype = accumulation_dtype(q, k, v, key, value)
    batch, _, heads, _ = q.shape
    groups, capacity = k.shape[2], key.shape[1]
    position = position.long()
    real = torch.ones_like(position, dtype=torch.bool)
    if token_kind is not None:
        real = token_kind[:, 0] != PADDING
        position = position.masked_fill(token_kind[:, 0] == STARTS, 0)
        q, k, v = (x.masked_fill(~real[:, None, None, None], 0) for x in (q, k, v))
    age = _circular_buffer.ages(position, capacity)
    filled = age < position[:, None]
    keys, values = (
        buffer.masked_fill(~filled[:, :, None, None], 0).to(x.dtype)
        for buffer, x in ((key, k), (value, v))
    )

    visible = filled if window is None else filled & (age < window - 1)
    grouped = q.reshape(batch, groups, heads // groups, -1).to(dtype)
    own_key, own_value = k.transpose(1, 2).to(dtype), v.transpose(1, 2).to(dtype)
    logits = grouped @ keys.permute(0, 2, 3, 1).to(dtype)
    logits.masked_fill_(~visible[:, None, None], float("-inf"))
    logits = torch.cat((logits, grouped @ own_key.transpose(2, 3)), dim=-1)
    weights = logits.softmax(-1)
    output = weights[..., :capacity] @ values.transpose(1, 2).to(dtype)
    output = output + weights[..., capacity:] * own_value

    if capacity:
        slot = (position % capacity)[:, None, None, None]
        for buffer, x in ((keys, k), (values, v)):
            index = slot.expand_as(x)
            old = buffer.gather(1, index)
            buffer.scatter_(1, index, torch.where(real[:, None, None, None], x, old))
    output = output.view(batch, 1, heads, -1).to(q.dtype)
    return output, keys, values, (position + real).int()
