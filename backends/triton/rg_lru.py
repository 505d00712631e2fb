"""The real-gated linear recurrent unit.  De et al. 2024, arXiv:2402.19427, §2.4.

    r_t = σ(gate_a_t),  i_t = σ(gate_x_t),  log a_t = -8 softplus(-Λ) r_t
    h_t = a_t h_{t-1} + s_t i_t x_t,  s_t = sqrt(1 - a_t²); a_t = 0, s_t = 1 at a restart

Gates, square root and scan in one pass: three tensors are read and one is written. The backward
goes from the last token to the first, with the state c_t = a_t g_t, g_t = dh_t + c_{t+1}:

    dx = g s i,  di = g s x,  dlog a = c h_{t-1} - g i x a² / s
    dr = -8 softplus(-Λ) dlog a,  dΛ = 8 σ(-Λ) Σ r dlog a

where the s that divides is bounded below as in the released code.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from keras_recurrent.backends.torch._common import register_gradient
from keras_recurrent.backends.triton import _search
from keras_recurrent.backends.triton._chain import (
    carry_between,
    enter,
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
from keras_recurrent.backends.triton._math import sigmoid, softplus

TILINGS = Tilings(
    (
        Tiling(64, 8, 4, 2, 128),
        Tiling(64, 16, 4, 4, 128),
        Tiling(32, 16, 4, 2, 128),
        Tiling(64, 16, 4, 4, 168),
    ),
    (
        Tiling(32, 32, 4, 4, 128),
        Tiling(64, 32, 4, 8, 128),
        Tiling(32, 64, 4, 8, 128),
    ),
)


def unsupported(x, gate_a, gate_x, a_logit, initial_state=None, token_kind=None) -> str | None:
    """Why this kernel refuses these arguments; None if it accepts them."""
    return refusal(x, gate_a, gate_x, a_logit, initial_state, token_kind)


def rg_lru(x, gate_a, gate_x, a_logit, initial_state=None, token_kind=None):
    """x, gate_a, gate_x: [B, T, D]; a_logit: [D].

    Returns ([B, T, D] in x's dtype, [B, D] in float32).
    """
    return _forward(x, gate_a, gate_x, a_logit, initial_state, token_kind)


@triton.jit
def _read(tensor, at, there, kind):
    """0 at padding, whatever stands there."""
    value = tl.load(tensor + at, there, other=0.0).to(tl.float32)
    if kind is not None:
        value = tl.where(kind == 2, 0.0, value)
    return value


@triton.jit
def _forward_kernel(
    x,
    gate_a,
    gate_x,
    a_logit,
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
    FINE: tl.constexpr = gate_a.dtype.element_ty == tl.float32
    tile, b, d = place(B, D, BLOCK_D)
    inside = (d < D)[None, :]
    start = tile * (GROUPS * ROWS)
    token = b.to(tl.int64) * T + start
    x += token * D
    gate_a += token * D
    gate_x += token * D
    h += token * D
    if token_kind is not None:
        token_kind += token
    strongest = -8.0 * softplus(-tl.load(a_logit + d, d < D, other=0.0).to(tl.float32))[None, :]

    decays = ()
    inputs = ()
    group = tl.arange(0, GROUPS)[:, None]
    decay = tl.full((GROUPS, BLOCK_D), 1.0, tl.float32)
    total = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    for j in tl.static_range(ROWS):
        row = group * ROWS + j
        there = (start + row < T) & inside
        kind = read_kind(token_kind, row, start + row < T)
        at = row * D + d[None, :]
        r, _ = sigmoid(_read(gate_a, at, there, kind), FINE)
        i, _ = sigmoid(_read(gate_x, at, there, kind), FINE)
        log_a = r * strongest
        a, s2 = decay_of(log_a, FINE)
        x_t = i * _read(x, at, there, kind)
        s_x = tl.sqrt(s2) * x_t
        if kind is not None:
            a = tl.where(kind == 0, a, tl.where(kind == 1, 0.0, 1.0))
            s_x = tl.where(kind == 1, x_t, s_x)
        a = tl.where(there, a, 1.0)
        decay *= a
        total = a * total + s_x
        decays = decays + (a,)
        inputs = inputs + (s_x,)

    state = enter(decay, total, first, last, carry, B, D, tile, tiles, b, d, GROUPS)
    for j in tl.static_range(ROWS):
        row = group * ROWS + j
        state = decays[j] * state + inputs[j]
        tl.store(h + row * D + d[None, :], state, (start + row < T) & inside)


@triton.jit
def _backward_kernel(
    dh,
    x,
    gate_a,
    gate_x,
    a_logit,
    h,
    first,
    token_kind,
    d_last,
    dx,
    d_gate_a,
    d_gate_x,
    d_logit,
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
    FINE: tl.constexpr = gate_a.dtype.element_ty == tl.float32
    tile, b, d = place(B, D, BLOCK_D)
    inside = (d < D)[None, :]
    start = T - 1 - tile * (GROUPS * ROWS)
    token = b.to(tl.int64) * T + start
    dh += token * D
    x += token * D
    gate_a += token * D
    gate_x += token * D
    h += token * D
    dx += token * D
    d_gate_a += token * D
    d_gate_x += token * D
    if token_kind is not None:
        token_kind += token
    logit = tl.load(a_logit + d, d < D, other=0.0).to(tl.float32)
    strongest = -8.0 * softplus(-logit)[None, :]

    group = tl.arange(0, GROUPS)[:, None]
    decay = tl.full((GROUPS, BLOCK_D), 1.0, tl.float32)
    total = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    for j in tl.static_range(ROWS):
        row = -(group * ROWS + j)
        there = (start + row >= 0) & inside
        kind = read_kind(token_kind, row, start + row >= 0)
        at = row * D + d[None, :]
        r, _ = sigmoid(_read(gate_a, at, there, kind), FINE)
        a, _ = decay_of(r * strongest, FINE)
        if kind is not None:
            a = tl.where(kind == 0, a, tl.where(kind == 1, 0.0, 1.0))
        a = tl.where(there, a, 1.0)
        decay *= a
        total = a * (total + tl.load(dh + at, there, other=0.0).to(tl.float32))

    group, c = enter_next(decay, total, d_last, d_first, carry, B, D, tile, tiles, b, d, GROUPS)
    d_strongest = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    for j in tl.static_range(ROWS):
        row = -(group * ROWS + j)
        there = (start + row >= 0) & inside
        kind = read_kind(token_kind, row, start + row >= 0)
        at = row * D + d[None, :]
        r, not_r = sigmoid(_read(gate_a, at, there, kind), FINE)
        i, not_i = sigmoid(_read(gate_x, at, there, kind), FINE)
        x_t = _read(x, at, there, kind)
        log_a = r * strongest
        a, s2 = decay_of(log_a, FINE)
        inverse = tl.rsqrt(tl.maximum(s2, 1e-36))
        s = s2 * inverse
        if kind is not None:
            a = tl.where(kind == 0, a, tl.where(kind == 1, 0.0, 1.0))
            s = tl.where(kind == 0, s, tl.where(kind == 1, 1.0, 0.0))
        g = c + tl.load(dh + at, there, other=0.0).to(tl.float32)
        c = a * g
        gi = g * i
        before = output_before(h, first, start, row, b, d[None, :], inside, D)
        # The derivative of sqrt(z) is taken as 1 / sqrt(max(4 z, 1e-6)).
        d_log_a = c * before - gi * x_t * (a * a * tl.minimum(inverse, 2000.0))
        if kind is not None:
            d_log_a = tl.where(kind == 0, d_log_a, 0.0)
        d_strongest += tl.where(there, r * d_log_a, 0.0)
        tl.store(dx + at, gi * s, there)
        tl.store(d_gate_a + at, d_log_a * log_a * not_r, there)
        tl.store(d_gate_x + at, gi * x_t * s * not_i, there)

    not_a, _ = sigmoid(-logit, True)
    at_tile = (tile * B + b).to(tl.int64) * D + d
    tl.store(d_logit + at_tile, 8.0 * not_a * tl.sum(d_strongest, 0), d < D)


@torch.library.custom_op("keras_recurrent::triton_rg_lru", mutates_args=())
def _forward(
    x: Tensor,
    gate_a: Tensor,
    gate_x: Tensor,
    a_logit: Tensor,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, length, width = x.shape
    tensors = contiguous(x, gate_a, gate_x, a_logit, initial_state, token_kind)
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
        _search.run("rg_lru", TILINGS.of(batch, width), launch, tensors, sizes)
    return h, last


@_forward.register_fake
def _(x, gate_a, gate_x, a_logit, initial_state, token_kind):
    return x.new_empty(x.shape), x.new_empty((x.shape[0], x.shape[2]), dtype=torch.float32)


@torch.library.custom_op("keras_recurrent::triton_rg_lru_backward", mutates_args=())
def _backward(
    dh: Tensor,
    d_state: Tensor,
    h: Tensor,
    x: Tensor,
    gate_a: Tensor,
    gate_x: Tensor,
    a_logit: Tensor,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, length, width = x.shape
    tensors = contiguous(dh, x, gate_a, gate_x, a_logit, h, initial_state, token_kind, d_state)
    dx, d_gate_a, d_gate_x = (t.new_empty(t.shape) for t in (x, gate_a, gate_x))
    d_initial = d_state.new_empty(d_state.shape)

    def launch(tile):
        tile = tile.fitted(length, width)
        tiles = triton.cdiv(length, tile.tokens)
        d_logit = x.new_empty((tiles * batch, width), dtype=torch.float32)
        _backward_kernel[(tiles * batch * triton.cdiv(width, tile.BLOCK_D),)](
            *tensors,
            dx,
            d_gate_a,
            d_gate_x,
            d_logit,
            d_initial,
            carry_between(tiles, batch, width, x),
            batch,
            length,
            width,
            tiles,
            **tile._asdict(),
        )
        return d_logit.sum(0)

    sizes = {"batch": batch, "length": length, "width": width}
    with on_device_of(x):
        d_logit = _search.run("rg_lru backward", TILINGS.of(batch, width), launch, tensors, sizes)
    return dx, d_gate_a, d_gate_x, d_logit.to(a_logit.dtype), d_initial


@_backward.register_fake
def _(dh, d_state, h, x, gate_a, gate_x, a_logit, initial_state, token_kind):
    return (
        x.new_empty(x.shape),
        gate_a.new_empty(gate_a.shape),
        gate_x.new_empty(gate_x.shape),
        a_logit.new_empty(a_logit.shape),
        d_state.new_empty(d_state.shape),
    )


register_gradient(_forward, _backward)
