"""h_t = exp(log_a_t) * h_{t-1} + x_t.  De et al. 2024, arXiv:2402.19427, eq. 4.

The backward goes from the last token to the first, with the state c_t = a_t g_t:

    g_t = dh_t + c_{t+1},  dx_t = g_t,  dlog_a_t = c_t h_{t-1}
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from keras_recurrent.backends.torch._common import register_gradient
from keras_recurrent.backends.triton import _search
from keras_recurrent.backends.triton._chain import (
    carry_between,
    enter_next,
    output_before,
    place,
    read_kind,
)
from keras_recurrent.backends.triton._common import (
    Tiling,
    Tilings,
    contiguous,
    on_device_of,
    refusal,
)
from keras_recurrent.backends.triton._math import decay as decay_of

# What a thread reads must stay in the cache until it is read again, but where few chains leave room
# in it, long tiles are fewer in a chain.
TILINGS = Tilings(
    (Tiling(64, 16, 4, 4), Tiling(64, 8, 4, 2), Tiling(64, 32, 4, 8), Tiling(64, 16, 8, 4)),
    (Tiling(32, 64, 4, 8), Tiling(64, 32, 8, 8), Tiling(32, 64, 8, 8), Tiling(32, 32, 8, 4)),
)


def unsupported(x, log_a, initial_state=None, token_kind=None) -> str | None:
    """Why this kernel refuses these arguments; None if it accepts them."""
    return refusal(x, log_a, initial_state, token_kind)


def linear_scan(x, log_a, initial_state=None, token_kind=None):
    """x, log_a: [B, T, D], log_a <= 0. Returns ([B, T, D] in x's dtype, [B, D] in float32)."""
    return _forward(x, log_a, initial_state, token_kind)


@triton.jit
def _decay(log_a, kind):
    """exp(log_a), 0 where the token starts afresh, 1 where it is padding."""
    FINE: tl.constexpr = log_a.dtype == tl.float32
    log_a = log_a.to(tl.float32)
    if kind is None:
        a, _ = decay_of(log_a, FINE)
    else:
        a, _ = decay_of(tl.where(kind == 2, 0.0, log_a), FINE)
        a = tl.where(kind == 1, 0.0, a)
    return a


@triton.jit
def _read(x, log_a, token_kind, row, d, there, inside, D):
    """x_t and a_t, the identity for a token that is padding or not there."""
    x_t = tl.load(x + row * D + d, there & inside, other=0.0).to(tl.float32)
    log_a_t = tl.load(log_a + row * D + d, there & inside, other=0.0)
    kind = read_kind(token_kind, row, there)
    if kind is not None:
        x_t = tl.where(kind == 2, 0.0, x_t)
    return x_t, _decay(log_a_t, kind)


@triton.jit
def _forward_kernel(
    x,
    log_a,
    first,
    token_kind,
    h,
    last,
    carry,
    B,
    T,
    D,
    tiles,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile, b, d = place(B, D, BLOCK_D)
    inside = (d < D)[None, :]
    start = tile * (GROUPS * ROWS)
    token = b.to(tl.int64) * T + start
    x += token * D
    log_a += token * D
    h += token * D
    if token_kind is not None:
        token_kind += token

    group = tl.arange(0, GROUPS)[:, None]
    decay = tl.full((GROUPS, BLOCK_D), 1.0, tl.float32)
    total = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    for j in tl.static_range(ROWS):
        row = group * ROWS + j
        there = start + row < T
        x_t, a = _read(x, log_a, token_kind, row, d[None, :], there, inside, D)
        decay *= a
        total = a * total + x_t

    group, state = enter_next(decay, total, first, last, carry, B, D, tile, tiles, b, d, GROUPS)
    for j in tl.static_range(ROWS):
        row = group * ROWS + j
        there = start + row < T
        x_t, a = _read(x, log_a, token_kind, row, d[None, :], there, inside, D)
        state = a * state + x_t
        tl.store(h + row * D + d[None, :], state, there & inside)


@triton.jit
def _backward_kernel(
    dh,
    log_a,
    h,
    first,
    token_kind,
    d_last,
    dx,
    d_log_a,
    d_first,
    carry,
    B,
    T,
    D,
    tiles,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile, b, d = place(B, D, BLOCK_D)
    inside = (d < D)[None, :]
    start = T - 1 - tile * (GROUPS * ROWS)
    token = b.to(tl.int64) * T + start
    dh += token * D
    log_a += token * D
    h += token * D
    dx += token * D
    d_log_a += token * D
    if token_kind is not None:
        token_kind += token

    group = tl.arange(0, GROUPS)[:, None]
    decay = tl.full((GROUPS, BLOCK_D), 1.0, tl.float32)
    total = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    for j in tl.static_range(ROWS):
        row = -(group * ROWS + j)
        there = start + row >= 0
        at = row * D + d[None, :]
        log_a_t = tl.load(log_a + at, there & inside, other=0.0)
        dh_t = tl.load(dh + at, there & inside, other=0.0).to(tl.float32)
        kind = read_kind(token_kind, row, there)
        a = _decay(log_a_t, kind)
        decay *= a
        total = a * (total + dh_t)

    group, c = enter_next(decay, total, d_last, d_first, carry, B, D, tile, tiles, b, d, GROUPS)
    for j in tl.static_range(ROWS):
        row = -(group * ROWS + j)
        there = start + row >= 0
        at = row * D + d[None, :]
        log_a_t = tl.load(log_a + at, there & inside, other=0.0)
        dh_t = tl.load(dh + at, there & inside, other=0.0).to(tl.float32)
        before = output_before(h, first, start, row, b, d[None, :], inside, D)
        kind = read_kind(token_kind, row, there)
        g = dh_t + c
        c = _decay(log_a_t, kind) * g
        d_log_a_t = c * before
        if kind is not None:
            g = tl.where(kind == 2, 0.0, g)
            d_log_a_t = tl.where(kind == 0, d_log_a_t, 0.0)
        tl.store(dx + at, g, there & inside)
        tl.store(d_log_a + at, d_log_a_t, there & inside)


@torch.library.custom_op("keras_recurrent::triton_linear_scan", mutates_args=())
def _forward(
    x: Tensor, log_a: Tensor, initial_state: Tensor | None, token_kind: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, length, width = x.shape
    tensors = contiguous(x, log_a, initial_state, token_kind)
    h = x.new_empty(x.shape)
    last = x.new_empty((batch, width), dtype=torch.float32)

    def launch(tile):
        tile = tile.fitted(length, width)
        tiles = triton.cdiv(length, tile.tokens)
        _forward_kernel[(tiles * batch * triton.cdiv(width, tile.BLOCK_D),)](
            *tensors,
            h,
            last,
            carry_between(tiles, batch, width, x),
            batch,
            length,
            width,
            tiles,
            **tile._asdict(),
        )

    sizes = {"batch": batch, "length": length, "width": width}
    with on_device_of(x):
        _search.run("linear_scan", TILINGS.of(batch, width), launch, tensors, sizes)
    return h, last


@_forward.register_fake
def _(x, log_a, initial_state, token_kind):
    return x.new_empty(x.shape), x.new_empty((x.shape[0], x.shape[2]), dtype=torch.float32)


@torch.library.custom_op("keras_recurrent::triton_linear_scan_backward", mutates_args=())
def _backward(
    dh: Tensor,
    d_state: Tensor,
    h: Tensor,
    log_a: Tensor,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, width = h.shape
    tensors = contiguous(dh, log_a, h, initial_state, token_kind, d_state)
    dx, d_log_a = h.new_empty(h.shape), log_a.new_empty(log_a.shape)
    d_initial = d_state.new_empty(d_state.shape)

    def launch(tile):
        tile = tile.fitted(length, width)
        tiles = triton.cdiv(length, tile.tokens)
        _backward_kernel[(tiles * batch * triton.cdiv(width, tile.BLOCK_D),)](
            *tensors,
            dx,
            d_log_a,
            d_initial,
            carry_between(tiles, batch, width, h),
            batch,
            length,
            width,
            tiles,
            **tile._asdict(),
        )

    sizes = {"batch": batch, "length": length, "width": width}
    with on_device_of(h):
        _search.run("linear_scan backward", TILINGS.of(batch, width), launch, tensors, sizes)
    return dx, d_log_a, d_initial


@_backward.register_fake
def _(dh, d_state, h, log_a, initial_state, token_kind):
    return (
        h.new_empty(h.shape),
        log_a.new_empty(log_a.shape),
        d_state.new_empty(d_state.shape),
    )


register_gradient(_forward, _backward, without=(0,))
