"""The real-gated linear recurrent unit.  De et al. 2024, arXiv:2402.19427, §2.4.

    r_t = σ(gate_a_t),  i_t = σ(gate_x_t),  log a_t = -8 softplus(-Λ) r_t
    h_t = a_t h_{t-1} + s_t i_t x_t,  s_t = sqrt(1 - a_t²)

where a token that starts a document has a_t = 0 and s_t = 1. Gates, square root and scan are one
pass: three tensors are read and one is written. The backward goes from the last token to the first,
with the state c_t = a_t g_t, g_t = dh_t + c_{t+1}:

    dx = g s i,  di = g s x,  dlog a = c h_{t-1} - g i x a² / s
    dr = -8 softplus(-Λ) dlog a,  dΛ = 8 σ(-Λ) Σ r dlog a

The derivative of the square root, 1 / (2 s), is held below MAX_SQRT_GRADIENT.
"""

import triton
import triton.language as tl

from ..constants import DECAY_EXPONENT, MAX_SQRT_GRADIENT
from ._device.common import ChainTilings, advance, tilings
from ._device.math import decay as decay_of
from ._device.math import sigmoid, softplus
from ._device.tokens import CONTINUES, PADDING, STARTS, read_kind, select_by_kind
from ._runtime.framework import cast, operation, unsupported_reason
from ._runtime.launch import dtype_name, like
from ._runtime.operation import Operation
from ._scan.chained_scan import (
    DEFAULT_POLICY,
    READ_LAST,
    WRITTEN,
    launch_chained_scan,
    load_previous_output,
    locate_program,
    new_outputs,
    state_of,
    states_before_groups,
    states_before_next_groups,
)

_C = tl.constexpr(DECAY_EXPONENT)
_MAX_INVERSE_ROOT = tl.constexpr(2 * MAX_SQRT_GRADIENT)
TILINGS = ChainTilings(
    tilings((64, 8, 4, 2, 128), (64, 16, 4, 4, 128), (32, 16, 4, 2, 128), (64, 16, 4, 4, 168)),
    tilings((32, 32, 4, 4, 128), (64, 32, 4, 8, 128), (32, 64, 4, 8, 128)),
)


@triton.jit
def _load(tensor, offsets, valid, kind, CACHED: tl.constexpr):
    """Loads elements as float32; 0 for padding, which may contain NaN.

    CACHED: a cache policy (`chained_scan.py`); it made the forward faster, but not the backward.
    """
    value = tl.load(tensor + offsets, valid, other=0.0, eviction_policy=CACHED).to(tl.float32)
    if kind is not None:
        value = tl.where(kind == PADDING, 0.0, value)
    return value


@triton.jit
def _forward_kernel(
    x,
    gate_a,
    gate_x,
    a_logit,
    initial,
    token_kind,
    h,
    final,
    carry,
    B,
    T,
    D,
    tiles,
    TILE: tl.constexpr,
):
    FINE: tl.constexpr = gate_a.dtype.element_ty == tl.float32
    tile, b, d, d_valid, start, token = locate_program(B, T, D, TILE, False)
    x, gate_a, gate_x, h = advance((x, gate_a, gate_x, h), token * D)
    if token_kind is not None:
        token_kind += token
    logit = tl.load(a_logit + d, d < D, other=0.0).to(tl.float32)
    strongest = softplus(-logit)[None, :] * -_C

    decays = ()
    inputs = ()
    group = tl.arange(0, TILE.GROUPS)[:, None]
    decay = tl.full((TILE.GROUPS, TILE.BLOCK_D), 1.0, tl.float32)
    total = tl.zeros((TILE.GROUPS, TILE.BLOCK_D), tl.float32)
    for j in tl.static_range(TILE.ROWS):
        row = group * TILE.ROWS + j
        valid = (start + row < T) & d_valid
        kind = read_kind(token_kind, row, start + row < T)
        offsets = row * D + d[None, :]
        r, _ = sigmoid(_load(gate_a, offsets, valid, kind, READ_LAST), FINE)
        i, _ = sigmoid(_load(gate_x, offsets, valid, kind, READ_LAST), FINE)
        log_a = r * strongest
        a, s2 = decay_of(log_a, FINE)
        x_t = i * _load(x, offsets, valid, kind, READ_LAST)
        s_x = tl.sqrt(s2) * x_t
        if kind is not None:
            a = select_by_kind(kind, a, 0.0, 1.0)
            s_x = tl.where(kind == STARTS, x_t, s_x)
        a = tl.where(valid, a, 1.0)
        decay *= a
        total = a * total + s_x
        decays = decays + (a,)
        inputs = inputs + (s_x,)

    chain = initial, final, carry, B, D, tile, tiles, b, d
    state = states_before_groups(decay, total, chain, TILE.GROUPS)
    for j in tl.static_range(TILE.ROWS):
        row = group * TILE.ROWS + j
        state = decays[j] * state + inputs[j]
        valid = (start + row < T) & d_valid
        tl.store(h + row * D + d[None, :], state, valid, cache_modifier=WRITTEN)


@triton.jit
def _backward_kernel(
    dh,
    x,
    gate_a,
    gate_x,
    a_logit,
    h,
    initial,
    token_kind,
    d_final,
    dx,
    d_gate_a,
    d_gate_x,
    d_initial,
    d_logit,
    carry,
    B,
    T,
    D,
    tiles,
    TILE: tl.constexpr,
):
    FINE: tl.constexpr = gate_a.dtype.element_ty == tl.float32
    tile, b, d, d_valid, start, token = locate_program(B, T, D, TILE, True)
    dh, x, gate_a, gate_x, h = advance((dh, x, gate_a, gate_x, h), token * D)
    dx, d_gate_a, d_gate_x = advance((dx, d_gate_a, d_gate_x), token * D)
    if token_kind is not None:
        token_kind += token
    logit = tl.load(a_logit + d, d < D, other=0.0).to(tl.float32)
    strongest = softplus(-logit)[None, :] * -_C

    group = tl.arange(0, TILE.GROUPS)[:, None]
    decay = tl.full((TILE.GROUPS, TILE.BLOCK_D), 1.0, tl.float32)
    total = tl.zeros((TILE.GROUPS, TILE.BLOCK_D), tl.float32)
    for j in tl.static_range(TILE.ROWS):
        row = -(group * TILE.ROWS + j)
        valid = (start + row >= 0) & d_valid
        kind = read_kind(token_kind, row, start + row >= 0)
        offsets = row * D + d[None, :]
        r, _ = sigmoid(_load(gate_a, offsets, valid, kind, DEFAULT_POLICY), FINE)
        a, _ = decay_of(r * strongest, FINE)
        if kind is not None:
            a = select_by_kind(kind, a, 0.0, 1.0)
        a = tl.where(valid, a, 1.0)
        decay *= a
        total = a * (total + tl.load(dh + offsets, valid, other=0.0).to(tl.float32))

    chain = d_final, d_initial, carry, B, D, tile, tiles, b, d
    group, c = states_before_next_groups(decay, total, chain, TILE.GROUPS)
    d_strongest = tl.zeros((TILE.GROUPS, TILE.BLOCK_D), tl.float32)
    for j in tl.static_range(TILE.ROWS):
        row = -(group * TILE.ROWS + j)
        valid = (start + row >= 0) & d_valid
        kind = read_kind(token_kind, row, start + row >= 0)
        offsets = row * D + d[None, :]
        r, not_r = sigmoid(_load(gate_a, offsets, valid, kind, DEFAULT_POLICY), FINE)
        i, not_i = sigmoid(_load(gate_x, offsets, valid, kind, DEFAULT_POLICY), FINE)
        x_t = _load(x, offsets, valid, kind, DEFAULT_POLICY)
        log_a = r * strongest
        a, s2 = decay_of(log_a, FINE)
        inverse_root = tl.rsqrt(tl.maximum(s2, 1e-36))
        s = s2 * inverse_root
        if kind is not None:
            a = select_by_kind(kind, a, 0.0, 1.0)
            s = select_by_kind(kind, s, 1.0, 0.0)
        g = c + tl.load(dh + offsets, valid, other=0.0).to(tl.float32)
        c = a * g
        gi = g * i
        previous = load_previous_output(h, initial, start, row, b, d[None, :], d_valid, D)
        d_log_a = c * previous - gi * x_t * (a * a * tl.minimum(inverse_root, _MAX_INVERSE_ROOT))
        if kind is not None:
            d_log_a = tl.where(kind == CONTINUES, d_log_a, 0.0)
        d_strongest += tl.where(valid, r * d_log_a, 0.0)
        tl.store(dx + offsets, gi * s, valid)
        tl.store(d_gate_a + offsets, d_log_a * log_a * not_r, valid)
        tl.store(d_gate_x + offsets, gi * x_t * s * not_i, valid)

    not_a, _ = sigmoid(-logit, True)
    line = (tile * B + b).to(tl.int64) * D + d
    tl.store(d_logit + line, not_a * _C * tl.sum(d_strongest, 0), d < D)


def forward(x, gate_a, gate_x, a_logit, initial_state, token_kind):
    tensors = x, gate_a, gate_x, a_logit, initial_state, token_kind
    return launch_chained_scan("rg_lru", _forward_kernel, TILINGS, tensors, new_outputs(x))


def backward(x, gate_a, gate_x, a_logit, initial_state, token_kind, h, dh, d_final):
    tensors = dh, x, gate_a, gate_x, a_logit, h, initial_state, token_kind, d_final
    gradients = like(x), like(gate_a), like(gate_x), state_of(x)
    *d_tensors, d_initial, d_logit = launch_chained_scan(
        "rg_lru backward", _backward_kernel, TILINGS, tensors, gradients, channel_sums=True
    )
    d_logit = cast(d_logit, dtype_name(a_logit), copy=False)
    return *d_tensors, d_logit, None if initial_state is None else d_initial, None


rg_lru = operation(
    Operation("rg_lru", forward, new_outputs, backward, unsupported_reason, saves_output=True)
)
