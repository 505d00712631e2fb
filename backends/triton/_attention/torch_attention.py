"""Softmax attention on torch: one custom operator arranges keys and values and launches kernels.

As in `backends/torch`, the keys and values of a sequence are those of the state, then those of the
real tokens, so that each query sees one range of them. Queries and outputs, which are larger where
heads share keys, are not moved.
"""

import torch

from ...kernel import Kernel
from ...torch import sliding_window_attention as plain
from ...torch._attention_inputs import AttentionInputs, attend, fake_gradients, fake_results, schema
from ...torch._common import register_gradient
from ...torch._sharding import is_sharded
from .._runtime.torch_operators import allocate, contiguous, device_guard
from . import banded_attention, circular_buffer


@Kernel
def sliding_window_attention(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
):
    """Sliding window attention; DTensors and single tokens with a state go to `backends/torch`."""
    if (initial_state is not None and q.shape[1] == 1) or is_sharded(q):
        return plain.sliding_window_attention(
            q, k, v, sliding_window, initial_state, token_kind, capacity
        )
    return attend(_operator, q, k, v, sliding_window, initial_state, token_kind, capacity)


def _arrange(*arguments):
    """`AttentionInputs`, their keys and values, and the range of them that each query sees."""
    arrangement = AttentionInputs(*arguments)
    keys, values = arrangement.keys_and_values()
    window = arrangement.window or keys.shape[1]
    first_key, last_key = arrangement.key_ranges() or (None, None)
    visible = banded_attention.VisibleKeys(arrangement.token_kind, first_key, last_key, window)
    return arrangement, keys, values, visible


@torch.library.custom_op(
    "keras_recurrent::triton_sliding_window_attention",
    mutates_args=(),
    schema=schema(7),
)
def _forward(q, k, v, key, value, position, token_kind, window, capacity):
    q, k, v, token_kind = contiguous(q, k, v, token_kind)
    arrangement, keys, values, visible = _arrange(q, k, v, key, value, position, token_kind, window)
    with device_guard(q):
        output, *residuals = banded_attention.forward(q, keys, values, visible)
        position = arrangement.next_position.int()
        buffers = [x.new_empty(x.shape[0], 0, *x.shape[2:]) for x in (keys, values)]
        if capacity:
            buffers = circular_buffer.fill_buffers(
                keys, values, position, arrangement.end.int(), capacity
            )
    return output, *buffers, position, *(_empty_for_none(q, residuals))


@_forward.register_fake
def _(q, k, v, key, value, position, token_kind, window, capacity):
    _, *residuals = banded_attention.results(q, k, v)
    residuals = (array if array is None else allocate(array, q) for array in residuals)
    return *fake_results(q, k, v, capacity), *_empty_for_none(q, residuals)


@torch.library.custom_op(
    "keras_recurrent::triton_sliding_window_attention_backward",
    mutates_args=(),
    schema=schema(
        5,
        "Tensor output, Tensor rest, Tensor origin, Tensor total, "
        "Tensor d_output, Tensor? d_key, Tensor? d_value",
    ),
)
def _backward(
    q, k, v, key, value, position, token_kind, output, rest, origin, total, *others
):  # fmt: skip
    d_output, d_key, d_value, window, capacity = others
    if d_key is not None or d_value is not None:
        d_key, d_value = (
            x.new_zeros(x.shape[0], capacity, *x.shape[2:]) if d is None else d
            for d, x in ((d_key, k), (d_value, v))
        )
    q, k, v, token_kind, d_output, *d_buffers = contiguous(
        q, k, v, token_kind, d_output, d_key, d_value
    )
    arrangement, keys, values, visible = _arrange(q, k, v, key, value, position, token_kind, window)
    ends = None, None
    if d_key is not None:
        ends = arrangement.next_position.int(), arrangement.end.int()
    residuals = [x if x.numel() else None for x in (rest, origin, total)]
    with device_guard(q):
        d_q, *d_rows = banded_attention.backward(
            d_output, d_buffers, output, residuals, q, keys, values, visible, *ends
        )
    return d_q, *arrangement.gradients(d_rows)


def _empty_for_none(q, tensors):
    """Replaces None by an empty tensor: an operator returns only tensors."""
    return [q.new_empty(0) if x is None else x for x in tensors]


@_backward.register_fake
def _(q, k, v, key, *_):
    return fake_gradients(q, k, v, key)


_operator = register_gradient(
    "sliding_window_attention",
    _forward,
    _backward,
    keep_output=True,
    options=2,
    residuals=("B T H V", "B T H", "B T H"),
    undifferentiated=2,
    integers=1,
    materializes=False,
    shards=False,
)
