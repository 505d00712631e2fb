"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}, channel by channel.  De et al. 2024, arXiv:2402.19427, §2.3.

Padding may stand anywhere, so the real tokens of each row are first moved together, behind the W-1 of the state; then
every tap is a shifted slice, which counts only where it lies in the same document. The gradient is the mirror
image: the same slices, shifted the other way.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from keras_recurrent.backends.torch._common import (
    accumulation_dtype,
    fresh,
    kind_masks,
    register_gradient,
    row_blocks,
    state_or_zeros,
)


def unsupported(x, kernel, bias=None, initial_state=None, token_kind=None) -> str | None:
    """Why this kernel refuses these arguments; None if it accepts them."""
    return None


def causal_conv1d(x, kernel, bias=None, initial_state=None, token_kind=None):
    """x: [B, T, D]; kernel: [W, D]; bias: [D]. Returns ([B, T, D] in x's dtype, [B, W - 1, D])."""
    return _forward(x, kernel, bias, initial_state, token_kind)


class _Packing(NamedTuple):
    """Where the real tokens of each row go when they move together. A place counts the state's slots, too."""

    order: Tensor  # [B, T]: the token that moves to place W - 1 + t; real ones come first
    moved: Tensor  # [B, T]: where token t went, less W - 1; padding shares the place of the token before it
    padding: Tensor  # [B, T, 1]: of token t
    empty: Tensor  # [B, T, 1]: whether padding lies at place W - 1 + t
    document: Tensor  # [B, W - 1 + T, 1]: the number of restarts up to a place
    last: Tensor  # [B, W - 1, 1]: the places of the final state


def _pack(token_kind, taps):
    if token_kind is None:
        return None
    restart, padding = kind_masks(token_kind)
    batch, length = token_kind.shape
    order = torch.argsort(padding.squeeze(-1).to(torch.int8), dim=1, stable=True)
    count = torch.cumsum(~padding, dim=1)
    number = count[:, -1:]
    place = torch.arange(length + taps, device=token_kind.device).unsqueeze(-1)
    document = torch.cumsum(restart, dim=1).gather(1, order.unsqueeze(-1))
    return _Packing(
        order=order,
        moved=(count - 1).clamp_(min=0).squeeze(-1),
        padding=padding,
        empty=place[:length] >= number,
        document=torch.cat((document.new_zeros(batch, taps, 1), document), dim=1),
        last=number + place[:taps],
    )


def _move(tensor, index):
    """[B, T, D]: row index[b, t] of tensor[b]. Whole rows, hence faster than an element-wise gather."""
    batch, length, width = tensor.shape
    index = index + length * torch.arange(batch, device=index.device).unsqueeze(1)
    return tensor.reshape(-1, width).index_select(0, index.flatten()).view(batch, -1, width)


def _shift(rows, tap):
    return slice(rows.start + tap, rows.stop + tap)


def _cut(tensor, packing, rows, tap, taps):
    """Zeroes the rows whose tap would reach across a restart."""
    if packing is None or tap == taps:
        return tensor
    document = packing.document
    return tensor.masked_fill(document[:, _shift(rows, tap)] != document[:, _shift(rows, taps)], 0)


def _cut_state(state, packing):
    """Zeroes the slots of the final state that lie before the last restart."""
    document = packing.document
    return state.masked_fill(document.gather(1, packing.last) != document.amax(1, keepdim=True), 0)


def _inputs(x, initial_state, packing, taps, dtype):
    """[B, W - 1 + T, D]: the state, then the real tokens, then zeros."""
    state = state_or_zeros(initial_state, (x.shape[0], taps, x.shape[2]), x, dtype)
    if packing is not None:
        x = _move(x, packing.order).masked_fill_(packing.empty, 0)
    return torch.cat((state, x.to(dtype)), dim=1)


@torch.library.custom_op("keras_recurrent::causal_conv1d", mutates_args=())
def _forward(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(x, kernel, bias, initial_state)
    length, taps = x.shape[1], kernel.shape[0] - 1
    packing = _pack(token_kind, taps)
    inputs = _inputs(x, initial_state, packing, taps, dtype)
    weights = kernel.to(dtype)

    y = torch.empty_like(inputs[:, taps:])
    for rows in row_blocks(x):
        y_b = torch.mul(inputs[:, _shift(rows, taps)], weights[taps], out=y[:, rows])
        for tap in range(taps):
            tapped = _cut(inputs[:, _shift(rows, tap)], packing, rows, tap, taps)
            y_b.addcmul_(tapped, weights[tap])
        if bias is not None:
            y_b.add_(bias)
    y = y.to(x.dtype)
    if packing is None:
        return y, fresh(inputs[:, length:], dtype)
    final_state = inputs.gather(1, packing.last.expand(-1, -1, x.shape[2]))
    return _move(y, packing.moved), _cut_state(final_state, packing)


@_forward.register_fake
def _(x, kernel, bias, initial_state, token_kind):
    dtype = accumulation_dtype(x, kernel, bias, initial_state)
    batch, _, width = x.shape
    return x.new_empty(x.shape), x.new_empty((batch, kernel.shape[0] - 1, width), dtype=dtype)


@torch.library.custom_op("keras_recurrent::causal_conv1d_backward", mutates_args=())
def _backward(
    dy: Tensor,
    d_state: Tensor,
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(x, kernel, bias, initial_state)
    length, taps = x.shape[1], kernel.shape[0] - 1
    packing = _pack(token_kind, taps)
    inputs = _inputs(x, initial_state, packing, taps, dtype)
    weights = kernel.to(dtype)
    d_inputs = torch.zeros_like(inputs)
    if packing is None:
        d_inputs[:, length:] = d_state
    else:
        dy = _move(dy, packing.order).masked_fill_(packing.empty, 0)
        last = packing.last.expand_as(d_state)
        d_inputs.scatter_(1, last, _cut_state(d_state, packing))

    d_weights = torch.zeros_like(weights)
    d_bias = weights.new_zeros(x.shape[2])
    for rows in row_blocks(x):
        dy_b = dy[:, rows].to(dtype)
        d_bias += dy_b.sum((0, 1))
        for tap in range(taps + 1):
            cut, tapped = _cut(dy_b, packing, rows, tap, taps), _shift(rows, tap)
            d_inputs[:, tapped].addcmul_(cut, weights[tap])
            d_weights[tap] += (cut * inputs[:, tapped]).sum((0, 1))

    dx = d_inputs[:, taps:]
    if packing is None:
        dx = fresh(dx, x.dtype)
    else:
        dx = _move(dx.to(x.dtype), packing.moved).masked_fill_(packing.padding, 0)
    return (
        dx,
        d_weights.to(kernel.dtype),
        d_bias if bias is None else d_bias.to(bias.dtype),
        fresh(d_inputs[:, :taps], dtype),
    )


@_backward.register_fake
def _(dy, d_state, x, kernel, bias, initial_state, token_kind):
    dtype = accumulation_dtype(x, kernel, bias, initial_state)
    return (
        x.new_empty(x.shape),
        kernel.new_empty(kernel.shape),
        kernel.new_empty(x.shape[2:], dtype=dtype if bias is None else bias.dtype),
        d_state.new_empty(d_state.shape),
    )


register_gradient(_forward, _backward, keep_output=False)
