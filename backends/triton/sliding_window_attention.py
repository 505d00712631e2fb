"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

As in `backends/torch`, a row of keys and values has those of the state first, then those of the
real tokens, so that each query sees one range of it. Queries and outputs, which are larger where
heads share keys, are not moved. One token of generation reads the ring in place, by the
implementation in `backends/torch`.
"""

import torch
from torch import Tensor

from keras_recurrent.backends.torch import sliding_window_attention as plain
from keras_recurrent.backends.torch._autograd import register_autograd
from keras_recurrent.backends.torch._row import Row, attend, fake_gradients, fake_results
from keras_recurrent.backends.triton import _banded_attention, _linear_attention, _ring
from keras_recurrent.backends.triton._common import contiguous, on_device_of


def unsupported(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
) -> str | None:
    """Why this implementation refuses these arguments; None if it accepts them."""
    state = (initial_state or {}).values()
    return _linear_attention.refusal(q, k, v, token_kind, *state)


def sliding_window_attention(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
):
    """q: [B, T, H, K]; k: [B, T, G, K]; v: [B, T, G, V].

    Returns ([B, T, H, V] in q's dtype, {"key": [B, C, G, K], "value": [B, C, G, V], "position":
    int32 [B]}, keys and values in their dtypes). C is that of the initial state, else `capacity`,
    else `sliding_window` - 1; without any of them the state is an empty dict.
    """
    if initial_state is not None and q.shape[1] == 1:
        return plain.sliding_window_attention(
            q, k, v, sliding_window, initial_state, token_kind, capacity
        )
    return attend(_forward, q, k, v, sliding_window, initial_state, token_kind, capacity)


def _arrange(*arguments):
    """A `Row`, its keys and values, and which of them its queries see."""
    row = Row(*arguments)
    keys, values = row.keys_and_values()
    window = row.window or keys.shape[1]
    first_key, last_key = row.seen() or (None, None)
    visible = _banded_attention.VisibleKeys(row.token_kind, first_key, last_key, window)
    return row, keys, values, visible


@torch.library.custom_op("keras_recurrent::triton_sliding_window_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    position: Tensor | None,
    token_kind: Tensor | None,
    window: int | None,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, token_kind = contiguous(q, k, v, token_kind)
    row, keys, values, visible = _arrange(q, k, v, key, value, position, token_kind, window)
    with on_device_of(q):
        output, kept = _banded_attention.forward(q, keys, values, visible)
        position = row.next_position.int()
        rings = _ring.to_rings(keys, values, position, row.end.int(), capacity)
    return output, *rings, position, *kept


@_forward.register_fake
def _(q, k, v, key, value, position, token_kind, window, capacity):
    return *fake_results(q, k, v, capacity), *_banded_attention.new_kept(q, k, v)


@torch.library.custom_op(
    "keras_recurrent::triton_sliding_window_attention_backward", mutates_args=()
)
def _backward(
    d_output: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    output: Tensor,
    rest: Tensor,
    origin: Tensor,
    total: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    position: Tensor | None,
    token_kind: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, token_kind, d_output, *d_rings = contiguous(
        q, k, v, token_kind, d_output, d_key, d_value
    )
    row, keys, values, visible = _arrange(q, k, v, key, value, position, token_kind, window)
    with on_device_of(q):
        d_q, *d_rows = _banded_attention.backward(
            d_output,
            d_rings,
            output,
            (rest, origin, total),
            q,
            keys,
            values,
            visible,
            row.next_position.int(),
            row.end.int(),
        )
    return d_q, *row.gradients(d_rows)


@_backward.register_fake
def _(d_output, d_key, d_value, output, rest, origin, total, q, k, v, key, *options):
    return fake_gradients(q, k, v, key)


def _save(ctx, inputs, output):
    *tensors, ctx.window, _ = inputs
    _, _, _, position, *kept = output
    ctx.mark_non_differentiable(position, *kept)
    ctx.save_for_backward(output[0], *kept, *tensors)


def _gradients(ctx, d_output, d_key, d_value, *_):
    saved = ctx.saved_tensors  # read once: each time, a checkpoint recomputes it
    d_q, d_k, d_v, *d_state = _backward(d_output, d_key, d_value, *saved, ctx.window)
    if saved[7] is None:  # no initial state
        d_state = None, None
    return d_q, d_k, d_v, *d_state, None, None, None, None


register_autograd(_forward, _gradients, _save, _backward)
