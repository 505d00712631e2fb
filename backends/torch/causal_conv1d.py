"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}, per channel.  De et al. 2024, arXiv:2402.19427, §2.3.

Padding may stand anywhere, so the real tokens of each row first move together, behind the W - 1
of the state, which leaves padding last; then every tap is a shifted slice, and counts only where
it lies in the same document. The gradient goes back through the same slices; what the activation
was applied to is computed again.
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


def causal_conv1d(x, kernel, bias=None, initial_state=None, token_kind=None, activation=None):
    """x: [B, T, D]; kernel: [W, D]; bias: [D]; activation: None or "silu".

    Returns ([B, T, D] in x's dtype, [B, W - 1, D] in float32, or float64 if an argument is
    float64).
    """
    return _forward(x, kernel, bias, initial_state, token_kind, activation)


class _Packing(NamedTuple):
    """How the tokens of each row move; place W - 1 is the first one after the state."""

    place: Tensor  # [B, T]: token t moves to place W - 1 + place[t], padding behind the others
    order: Tensor  # [B, T]: the inverse permutation
    empty: Tensor  # [B, T, 1]: whether padding moved to place W - 1 + t
    document: Tensor  # [B, W - 1 + T, 1]: the number of restarts up to a place
    last: Tensor  # [B, W - 1, 1]: the places of the final state
    outdated: Tensor  # [B, W - 1, 1]: whether they lie before the last restart


def _pack(token_kind, taps):
    if token_kind is None:
        return None
    restart, padding = kind_masks(token_kind)
    batch, length = token_kind.shape
    token = torch.arange(length, device=token_kind.device).view(1, -1, 1)
    real = torch.cumsum(~padding, dim=1)
    number = real[:, -1:]
    place = torch.where(padding, number + token - real, real - 1)
    order = torch.empty_like(place).scatter_(1, place, token.expand_as(place))
    restarts = torch.cumsum(restart, dim=1)
    before = restarts.new_zeros(batch, taps, 1)
    document = torch.cat((before, restarts.gather(1, order)), dim=1)
    last = number + torch.arange(taps, device=token_kind.device).view(1, -1, 1)
    return _Packing(
        place=place.squeeze(-1),
        order=order.squeeze(-1),
        empty=token >= number,
        document=document,
        last=last,
        outdated=document.gather(1, last) != restarts[:, -1:],
    )


def _move(tensor, index):
    """tensor[b, index[b, t]], [B, T, D]: whole rows at once, unlike torch.gather."""
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


def _inputs(x, initial_state, packing, taps, dtype):
    """[B, W - 1 + T, D]: the state, then the real tokens, then zeros."""
    state = state_or_zeros(initial_state, (x.shape[0], taps, x.shape[2]), x, dtype)
    if packing is not None:
        x = _move(x, packing.order).masked_fill_(packing.empty, 0)
    return torch.cat((state, x.to(dtype)), dim=1)


def _filter(inputs, weights, bias, packing, rows, out=None):
    """Some rows of the convolution, before any activation."""
    taps = weights.shape[0] - 1
    z = torch.mul(inputs[:, _shift(rows, taps)], weights[taps], out=out)
    for tap in range(taps):
        z.addcmul_(_cut(inputs[:, _shift(rows, tap)], packing, rows, tap, taps), weights[tap])
    return z if bias is None else z.add_(bias)


@torch.library.custom_op("keras_recurrent::causal_conv1d", mutates_args=())
def _forward(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(x, kernel, bias, initial_state)
    length, taps = x.shape[1], kernel.shape[0] - 1
    packing = _pack(token_kind, taps)
    inputs = _inputs(x, initial_state, packing, taps, dtype)
    weights = kernel.to(dtype)

    y = inputs.new_empty(x.shape)
    for rows in row_blocks(x):
        y_b = _filter(inputs, weights, bias, packing, rows, out=y[:, rows])
        if activation == "silu":
            torch.nn.functional.silu(y_b, inplace=True)
    y = y.to(x.dtype)
    if packing is None:
        return y, fresh(inputs[:, length:], dtype)
    final_state = inputs.gather(1, packing.last.expand(-1, -1, x.shape[2]))
    return _move(y, packing.place), final_state.masked_fill_(packing.outdated, 0)


@_forward.register_fake
def _(x, kernel, bias, initial_state, token_kind, activation):
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
    activation: str | None,
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
        d_inputs.scatter_(1, last, d_state.masked_fill(packing.outdated, 0))

    d_weights = torch.zeros_like(weights)
    d_bias = weights.new_zeros(x.shape[2])
    for rows in row_blocks(x):
        dz_b = dy[:, rows].to(dtype)
        if activation == "silu":
            z_b = _filter(inputs, weights, bias, packing, rows)
            dz_b = torch.ops.aten.silu_backward(dz_b, z_b)
        d_bias += dz_b.sum((0, 1))
        for tap in range(taps + 1):
            cut, tapped = _cut(dz_b, packing, rows, tap, taps), _shift(rows, tap)
            d_inputs[:, tapped].addcmul_(cut, weights[tap])
            d_weights[tap] += (cut * inputs[:, tapped]).sum((0, 1))

    dx = d_inputs[:, taps:]
    dx = fresh(dx, x.dtype) if packing is None else _move(dx.to(x.dtype), packing.place)
    return (
        dx,
        d_weights.to(kernel.dtype),
        d_bias if bias is None else d_bias.to(bias.dtype),
        fresh(d_inputs[:, :taps], dtype),
    )


@_backward.register_fake
def _(dy, d_state, x, kernel, bias, initial_state, token_kind, activation):
    dtype = accumulation_dtype(x, kernel, bias, initial_state)
    return (
        x.new_empty(x.shape),
        kernel.new_empty(kernel.shape),
        kernel.new_empty(x.shape[2:], dtype=dtype if bias is None else bias.dtype),
        d_state.new_empty(d_state.shape),
    )


register_gradient(_forward, _backward, keep_output=False, options=1)
