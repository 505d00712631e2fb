"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}, per channel.  De et al. 2024, arXiv:2402.19427, §2.3.

Taps skip padding, and padding may stand anywhere: so tokens go by their place among the real ones
of their row. The tokens of the state have the places -W+1 to -1 and belong to document 0; padding
takes the places that are left. A small kernel notes who is where. A program walks along places
with the last W inputs at hand, and the backward with the gradients of the next W outputs. For the
gradient of an activation it starts W - 1 places before its own, and filters the inputs again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from keras_recurrent.backends.torch._common import fresh, register_gradient
from keras_recurrent.backends.triton import _search
from keras_recurrent.backends.triton._common import (
    Tiling,
    contiguous,
    on_device_of,
    refusal,
)
from keras_recurrent.backends.triton._math import sigmoid

_MAX_WIDTH = 16
_PLACES_BLOCK = 4096
_STEPS = 8  # how often a thread walks along its rows, in the backward, beside those of others
TILINGS = (
    Tiling(64, 8, 4, 4),
    Tiling(64, 8, 8, 4),
    Tiling(64, 16, 4, 4, 128),
    Tiling(64, 16, 8, 4, 128),
    Tiling(64, 4, 8, 2),
)
BACKWARD_TILINGS = (
    Tiling(64, 8, 4, 4, 128),
    Tiling(64, 8, 2, 4, 128),
    Tiling(64, 4, 4, 2, 128),
    Tiling(64, 16, 4, 8, 128),
    Tiling(64, 8, 4, 4, 168),
)


def unsupported(
    x, kernel, bias=None, initial_state=None, token_kind=None, activation=None
) -> str | None:
    """Why this kernel refuses these arguments; None if it accepts them."""
    if kernel.shape[0] > _MAX_WIDTH:
        return f"holds up to {_MAX_WIDTH} taps, got a kernel of {kernel.shape[0]}"
    return refusal(x, kernel, bias, initial_state, token_kind)


def causal_conv1d(x, kernel, bias=None, initial_state=None, token_kind=None, activation=None):
    """x: [B, T, D]; kernel: [W, D]; bias: [D]; activation: None or "silu".

    Returns ([B, T, D] in x's dtype, [B, W - 1, D] in float32).
    """
    return _forward(x, kernel, bias, initial_state, token_kind, activation)


@triton.jit
def _places_kernel(token_kind, token, document, count, documents, T, BLOCK: tl.constexpr):
    """Of one row: token and document [B, T], by place; how many are real, and documents [B]."""
    b = tl.program_id(0)
    num_real = 0
    num_restarts = 0
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        kind = tl.load(token_kind + b * T + t, t < T, other=2)
        real = (kind != 2).to(tl.int32)
        restart = (kind == 1).to(tl.int32)
        num_real_t = num_real + tl.cumsum(real, 0)
        place = tl.where(kind != 2, num_real_t - 1, T - 1 - (t - num_real_t))
        tl.store(token + b * T + place, t, t < T)
        tl.store(document + b * T + place, num_restarts + tl.cumsum(restart, 0), t < T)
        num_real += tl.sum(real, 0)
        num_restarts += tl.sum(restart, 0)
    tl.store(count + b, num_real)
    tl.store(documents + b, num_restarts)


@triton.jit
def _who(place, row, T, token, document):
    """The token and the document at a place of a row."""
    t, own = place, place * 0
    if token is not None:
        there = (place >= 0) & (place < T)
        t = tl.load(token + row + place, there, other=0)
        own = tl.load(document + row + place, there, other=0)
    return t, own


@triton.jit
def _row_sizes(b, T, count, documents):
    """How many real tokens there are, and the number of the last document."""
    num_real, last_document = T, 0
    if count is not None:
        num_real, last_document = tl.load(count + b), tl.load(documents + b)
    return num_real, last_document


@triton.jit
def _parameters(kernel, bias, d, D, W: tl.constexpr):
    """The filter's weights, that of the current token first, and the bias."""
    weights = ()
    for k in tl.static_range(W):
        weights = weights + (tl.load(kernel + (W - 1 - k) * D + d, d < D, other=0.0),)
    offset = tl.zeros(d.shape, tl.float32)
    if bias is not None:
        offset = tl.load(bias + d, d < D, other=0.0).to(tl.float32)
    return weights, offset


@triton.jit
def _input(x, first, state, place, at, num_real, d, D, W: tl.constexpr):
    """What stands at a place: 0 before the state, and behind the last real token."""
    real = (place >= 0) & (place < num_real)
    value = tl.load(x + at, real & (d < D), other=0.0).to(tl.float32)
    if first is not None:
        before = (place < 0) & (place > -W) & (d < D)
        value += tl.load(first + state + (place + W - 1) * D, before, other=0.0)
    return value


@triton.jit
def _filtered(values, owners, weights, offset, token, W: tl.constexpr):
    """The filter on the last W of some places, without what is of another document."""
    total = offset
    for k in tl.static_range(W):
        tap = values[-1 - k]
        if token is not None:
            tap = tl.where(owners[-1 - k] == owners[-1], tap, 0.0)
        total += weights[k].to(tl.float32) * tap
    return total


@triton.jit
def _forward_kernel(
    x,
    kernel,
    bias,
    first,
    token,
    document,
    count,
    documents,
    y,
    last,
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    FINE: tl.constexpr = x.dtype.element_ty == tl.float32
    b = tl.program_id(2)
    row = b * T
    d = (tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    inside = d < D
    x += row.to(tl.int64) * D
    y += row.to(tl.int64) * D
    state = b * (W - 1) * D + d
    num_real, last_document = _row_sizes(b, T, count, documents)
    tile_begin = tl.program_id(1) * (GROUPS * ROWS) - (W - 1)
    begin = tile_begin + tl.arange(0, GROUPS)[:, None] * ROWS

    weights, offset = _parameters(kernel, bias, d, D, W)

    values = ()
    tokens = ()
    owners = ()
    for j in tl.static_range(ROWS + W - 1):
        place = begin + j - (W - 1)
        t, own = _who(place, row, T, token, document)
        at = t.to(tl.int64) * D + d
        values = values + (_input(x, first, state, place, at, num_real, d, D, W),)
        tokens = tokens + (t,)
        owners = owners + (own,)
    # The compiler moves no load ahead of a store: all loads come first.
    for j in tl.static_range(ROWS):
        place = begin + j
        total = _filtered(values[j : j + W], owners[j : j + W], weights, offset, token, W)
        if SILU:
            total *= sigmoid(total, FINE)[0]
        at = tokens[j + W - 1].to(tl.int64) * D + d
        tl.store(y + at, total, (place >= 0) & (place < T) & inside)
        if tile_begin + GROUPS * ROWS > num_real - (W - 1):
            slot = place - num_real + W - 1
            kept = (slot >= 0) & (slot < W - 1) & inside
            value = tl.where(owners[j + W - 1] == last_document, values[j + W - 1], 0.0)
            tl.store(last + state + slot * D, value, kept)


@triton.jit
def _backward_kernel(
    dy,
    d_last,
    x,
    kernel,
    bias,
    first,
    token,
    document,
    count,
    documents,
    dx,
    d_parameters,
    d_first,
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """A group goes through STEPS times ROWS places, of which the first and last are of others too.

    A program leaves one sum over its own places for each parameter.

    d_parameters: [programs, B, W + 1, D], the last for the bias.
    """
    FINE: tl.constexpr = x.dtype.element_ty == tl.float32
    AHEAD: tl.constexpr = W - 1 if SILU else 0
    OWN: tl.constexpr = STEPS * ROWS - AHEAD - (W - 1)  # places whose inputs get their gradients
    b = tl.program_id(2)
    row = b * T
    d = (tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    inside = d < D
    x += row.to(tl.int64) * D
    dy += row.to(tl.int64) * D
    dx += row.to(tl.int64) * D
    state = b * (W - 1) * D + d
    num_real, last_document = _row_sizes(b, T, count, documents)

    weights, offset = _parameters(kernel, bias, d, D, W)
    sums = ()
    for _ in tl.static_range(W):
        sums = sums + (tl.zeros((GROUPS, BLOCK_D), tl.float32),)
    d_bias = tl.zeros((GROUPS, BLOCK_D), tl.float32)

    begin = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]) * OWN - (W - 1)
    end = (tl.program_id(1) + 1) * (GROUPS * OWN) - (W - 1)
    values = ()
    gradients = ()
    tokens = ()
    owners = ()
    for _ in tl.static_range(W - 1):
        values = values + (tl.zeros((GROUPS, BLOCK_D), tl.float32),)
        gradients = gradients + (tl.zeros((GROUPS, BLOCK_D), tl.float32),)
        tokens = tokens + (begin * 0,)
        owners = owners + (begin * 0,)
    for step in range(STEPS):
        for j in tl.static_range(ROWS):
            i = step * ROWS + j
            place = begin + i - AHEAD
            t, own = _who(place, row, T, token, document)
            at = t.to(tl.int64) * D + d
            values = values + (_input(x, first, state, place, at, num_real, d, D, W),)
            tokens = tokens + (t,)
            owners = owners + (own,)
            met = (i >= AHEAD) & (place >= 0) & (place < num_real) & inside
            gradient = tl.load(dy + at, met, other=0.0).to(tl.float32)
            if SILU:
                z = _filtered(values, owners, weights, offset, token, W)
                s, rest = sigmoid(z, FINE)
                gradient *= s * (1.0 + z * rest)
            gradients = gradients + (gradient,)
        # The compiler moves no load ahead of a store: all loads of a step come first.
        for j in tl.static_range(ROWS):
            i = step * ROWS + j - (W - 1)
            place = begin + i - AHEAD
            at = tokens[j].to(tl.int64) * D + d
            value = tl.where(i >= AHEAD, values[j], 0.0)
            d_value = tl.zeros((GROUPS, BLOCK_D), tl.float32)
            if end > num_real - (W - 1):
                slot = place - num_real + W - 1
                kept = (slot >= 0) & (slot < W - 1) & (owners[j] == last_document) & inside
                d_value = tl.load(d_last + state + slot * D, kept, other=0.0)
            added = ()
            for k in tl.static_range(W):
                gradient = gradients[j + k]
                if token is not None:
                    gradient = tl.where(owners[j + k] == owners[j], gradient, 0.0)
                d_value += weights[k].to(tl.float32) * gradient
                added = added + (sums[k] + value * gradient,)
            sums = added
            d_bias += gradients[j]
            own_place = (i >= AHEAD) & inside
            tl.store(dx + at, d_value, own_place & (place >= 0) & (place < T))
            if tl.program_id(1) == 0:
                tl.store(d_first + state + (place + W - 1) * D, d_value, own_place & (place < 0))
        values, gradients = values[ROWS:], gradients[ROWS:]
        tokens, owners = tokens[ROWS:], owners[ROWS:]

    at = (tl.program_id(1) * tl.num_programs(2) + b).to(tl.int64) * (W + 1)
    for k in tl.static_range(W):
        tl.store(d_parameters + (at + W - 1 - k) * D + d, tl.sum(sums[k], 0)[None, :], inside)
    tl.store(d_parameters + (at + W) * D + d, tl.sum(d_bias, 0)[None, :], inside)


def _places(token_kind):
    """What `_places_kernel` finds; Nones where every token goes on."""
    if token_kind is None:
        return (None,) * 4
    batch, length = token_kind.shape
    by_place = (token_kind.new_empty((batch, length), dtype=torch.int32) for _ in range(2))
    by_row = (token_kind.new_empty(batch, dtype=torch.int32) for _ in range(2))
    found = (*by_place, *by_row)
    block = min(_PLACES_BLOCK, triton.next_power_of_2(length))
    _places_kernel[(batch,)](token_kind.contiguous(), *found, length, BLOCK=block)
    return found


@torch.library.custom_op("keras_recurrent::triton_causal_conv1d", mutates_args=())
def _forward(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    batch, length, width = x.shape
    taps = kernel.shape[0]
    silu = activation == "silu"
    tensors = contiguous(x, kernel, bias, initial_state)
    y = x.new_empty(x.shape)
    last = x.new_empty((batch, taps - 1, width), dtype=torch.float32)

    def launch(tile):
        tile = tile.fitted(length + taps - 1, width)
        tiles = triton.cdiv(length + taps - 1, tile.tokens)
        _forward_kernel[(triton.cdiv(width, tile.BLOCK_D), tiles, batch)](
            *tensors,
            *places,
            y,
            last,
            length,
            width,
            W=taps,
            SILU=silu,
            **tile._asdict(),
        )

    sizes = {"batch": batch, "length": length, "width": width, "taps": taps, "silu": silu}
    with on_device_of(x):
        places = _places(token_kind)
        _search.run("causal_conv1d", TILINGS, launch, (*tensors, token_kind), sizes)
    return y, last


@_forward.register_fake
def _(x, kernel, bias, initial_state, token_kind, activation):
    state_shape = (x.shape[0], kernel.shape[0] - 1, x.shape[2])
    return x.new_empty(x.shape), x.new_empty(state_shape, dtype=torch.float32)


@torch.library.custom_op("keras_recurrent::triton_causal_conv1d_backward", mutates_args=())
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
    batch, length, width = x.shape
    taps = kernel.shape[0]
    silu = activation == "silu"
    shared = (taps - 1) * (2 if silu else 1)  # places of other groups that a group goes through
    tensors = contiguous(dy, d_state, x, kernel, bias, initial_state)
    dx = x.new_empty(x.shape)
    d_initial = d_state.new_empty(d_state.shape)

    def launch(tile):
        tile = tile.fitted(length + taps - 1, width)
        steps = min(_STEPS, triton.next_power_of_2(triton.cdiv(length + taps - 1, tile.tokens)))
        steps += triton.cdiv(shared, tile.ROWS)
        own = tile.GROUPS * (steps * tile.ROWS - shared)
        programs = triton.cdiv(length + taps - 1, own)
        d_parameters = x.new_empty((programs * batch, taps + 1, width), dtype=torch.float32)
        _backward_kernel[(triton.cdiv(width, tile.BLOCK_D), programs, batch)](
            *tensors,
            *places,
            dx,
            d_parameters,
            d_initial,
            length,
            width,
            W=taps,
            SILU=silu,
            STEPS=steps,
            **tile._asdict(),
        )
        return d_parameters.sum(0)

    sizes = {"batch": batch, "length": length, "width": width, "taps": taps, "silu": silu}
    with on_device_of(x):
        places = _places(token_kind)
        d_parameters = _search.run(
            "causal_conv1d backward", BACKWARD_TILINGS, launch, (*tensors, token_kind), sizes
        )
    d_kernel = fresh(d_parameters[:taps], kernel.dtype)
    d_bias = fresh(d_parameters[taps], x.dtype if bias is None else bias.dtype)
    return dx, d_kernel, d_bias, d_initial


@_backward.register_fake
def _(dy, d_state, x, kernel, bias, initial_state, token_kind, activation):
    return (
        x.new_empty(x.shape),
        kernel.new_empty(kernel.shape),
        kernel.new_empty(x.shape[2:], dtype=x.dtype if bias is None else bias.dtype),
        d_state.new_empty(d_state.shape),
    )


register_gradient(_forward, _backward, keep_output=False, options=1)
