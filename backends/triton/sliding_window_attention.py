"""o_t = sum_s softmax_s(q_t · k_s) v_s over a window of keys.  De et al. 2024, arXiv:2402.19427.

The keys and values of a row are arranged as in `backends/torch`: those of the state, then the real
tokens. There each query sees a range of them. Queries, which are more where heads share keys, and
outputs stay where they are. A step of generation reads the ring as it lies, as in `backends/torch`.
"""

import torch
from torch import Tensor

from keras_recurrent.backends.torch import sliding_window_attention as plain
from keras_recurrent.backends.torch._row import Row, attend, fake_gradients, fake_results
from keras_recurrent.backends.triton import _banded_attention, _linear_attention, _ring
from keras_recurrent.backends.triton._common import contiguous, on_device_of


def unsupported(
    q, k, v, sliding_window=None, initial_state=None, token_kind=None, capacity=None
) -> str | None:
    """Why this kernel refuses these arguments; None if it accepts them."""
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


def _arranged(*arguments):
    """A row, its keys and values, and which of them queries see."""
    row = Row(*arguments)
    keys, values = row.keys_and_values()
    window = row.window or keys.shape[1]
    first, last = row.seen() or (None, None)
    return row, keys, values, _banded_attention.Sight(row.token_kind, first, last, window)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, token_kind = contiguous(q, k, v, token_kind)
    row, keys, values, sight = _arranged(q, k, v, key, value, position, token_kind, window)
    with on_device_of(q):
        output, log_total = _banded_attention.forward(q, keys, values, sight)
        position = row.next_position.int()
        rings = _ring.to_rings(keys, values, position, row.end.int(), capacity)
    return output, *rings, position, log_total


@_forward.register_fake
def _(q, k, v, key, value, position, token_kind, window, capacity):
    log_total = q.new_empty(q.shape[:3], dtype=torch.float32)
    return *fake_results(q, k, v, capacity), log_total


@torch.library.custom_op(
    "keras_recurrent::triton_sliding_window_attention_backward", mutates_args=()
)
def _backward(
    d_output: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    output: Tensor,
    log_total: Tensor,
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
    row, keys, values, sight = _arranged(q, k, v, key, value, position, token_kind, window)
    with on_device_of(q):
        d_q, *d_rows = _banded_attention.backward(
            d_output,
            d_rings,
            output,
            log_total,
            q,
            keys,
            values,
            sight,
            row.next_position.int(),
            row.end.int(),
        )
    return d_q, *row.gradients(d_rows)


@_backward.register_fake
def _(d_output, d_key, d_value, output, log_total, q, k, v, key, value, position, kind, window):
    return fake_gradients(q, k, v, key)


def _save(ctx, inputs, output):
    *tensors, ctx.window, _ = inputs
    ctx.mark_non_differentiable(*output[-2:])
    ctx.save_for_backward(output[0], output[-1], *tensors)


def _gradients(ctx, d_output, d_key, d_value, *_):
    saved = ctx.saved_tensors  # once: a checkpoint recomputes what is asked for again
    *found, d_key, d_value = _backward(d_output, d_key, d_value, *saved, ctx.window)
    given = saved[5] is not None
    return *found, *((d_key, d_value) if given else (None, None)), None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
