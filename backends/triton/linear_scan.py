"""h_t = exp(log_a_t) * h_{t-1} + x_t.  De et al. 2024, arXiv:2402.19427, eq. 4.

The backward goes from the last token to the first, with the state c_t = a_t g_t:

    g_t = dh_t + c_{t+1},  dx_t = g_t,  dlog_a_t = c_t h_{t-1}
"""

import triton
import triton.language as tl

from ._device.common import ChainTilings, advance, tilings
from ._device.math import decay as decay_of
from ._device.tokens import CONTINUES, PADDING, STARTS, read_kind
from ._runtime.framework import operation, unsupported_reason
from ._runtime.launch import like
from ._runtime.operation import Operation
from ._scan.chained_scan import (
    READ_AGAIN,
    READ_LAST,
    WRITTEN,
    launch_chained_scan,
    load_previous_output,
    locate_program,
    new_outputs,
    state_of,
    states_before_next_groups,
)

# A thread reads its tokens twice, and they should be in the cache the second time: tiles are small.
# With few chains, the cache has room for longer tiles, and a chain has fewer of them. By default
# the compiler takes 48 to 64 registers; with a limit of 80, it takes more of them and prefetches
# farther, and fewer programs share the cache.
TILINGS = ChainTilings(
    tilings((64, 16, 4, 4, 80), (64, 16, 8, 4, 80), (128, 8, 8, 4, 80)),
    tilings((64, 16, 16, 8, 80), (32, 64, 8, 8, 80), (64, 16, 16, 8, 128)),
    tilings((64, 16, 8, 4, 80), (64, 32, 8, 8, 80)),
)
BACKWARD_TILINGS = ChainTilings(
    tilings((64, 16, 4, 4), (64, 16, 4, 4, 72), (64, 32, 4, 8)),
    tilings((64, 32, 8, 8, 80), (64, 32, 8, 8, 72), (32, 64, 4, 8)),
    tilings((64, 32, 4, 8), (64, 16, 4, 4)),
)


@triton.jit
def _decay(log_a, kind):
    """exp(log_a); 0 for a token that starts a document, and 1 for padding."""
    FINE: tl.constexpr = log_a.dtype == tl.float32
    log_a = log_a.to(tl.float32)
    if kind is None:
        a, _ = decay_of(log_a, FINE)
    else:
        a, _ = decay_of(tl.where(kind == PADDING, 0.0, log_a), FINE)
        a = tl.where(kind == STARTS, 0.0, a)
    return a


@triton.jit
def _load_step(x, log_a, token_kind, row, d, t_valid, d_valid, D, CACHED: tl.constexpr):
    """Loads x_t and a_t; 0 and 1 for padding and after the last token, where the state stays."""
    offsets, valid = row * D + d, t_valid & d_valid
    x_t = tl.load(x + offsets, valid, other=0.0, eviction_policy=CACHED).to(tl.float32)
    log_a_t = tl.load(log_a + offsets, valid, other=0.0, eviction_policy=CACHED)
    kind = read_kind(token_kind, row, t_valid)
    if kind is not None:
        x_t = tl.where(kind == PADDING, 0.0, x_t)
    return x_t, _decay(log_a_t, kind)


@triton.jit
def _forward_kernel(
    x,
    log_a,
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
    tile, b, d, d_valid, start, token = locate_program(B, T, D, TILE, False)
    x, log_a, h = advance((x, log_a, h), token * D)
    if token_kind is not None:
        token_kind += token

    group = tl.arange(0, TILE.GROUPS)[:, None]
    decay = tl.full((TILE.GROUPS, TILE.BLOCK_D), 1.0, tl.float32)
    total = tl.zeros((TILE.GROUPS, TILE.BLOCK_D), tl.float32)
    for j in tl.static_range(TILE.ROWS):
        row = group * TILE.ROWS + j
        t_valid = start + row < T
        x_t, a = _load_step(x, log_a, token_kind, row, d[None, :], t_valid, d_valid, D, READ_AGAIN)
        decay *= a
        total = a * total + x_t

    chain = initial, final, carry, B, D, tile, tiles, b, d
    group, state = states_before_next_groups(decay, total, chain, TILE.GROUPS)
    for j in tl.static_range(TILE.ROWS):
        row = group * TILE.ROWS + j
        t_valid = start + row < T
        x_t, a = _load_step(x, log_a, token_kind, row, d[None, :], t_valid, d_valid, D, READ_LAST)
        state = a * state + x_t
        offsets = row * D + d[None, :]
        tl.store(h + offsets, state, t_valid & d_valid, cache_modifier=WRITTEN)


@triton.jit
def _backward_kernel(
    dh,
    log_a,
    h,
    initial,
    token_kind,
    d_final,
    dx,
    d_log_a,
    d_initial,
    carry,
    B,
    T,
    D,
    tiles,
    TILE: tl.constexpr,
):
    tile, b, d, d_valid, start, token = locate_program(B, T, D, TILE, True)
    dh, log_a, h, dx, d_log_a = advance((dh, log_a, h, dx, d_log_a), token * D)
    if token_kind is not None:
        token_kind += token

    group = tl.arange(0, TILE.GROUPS)[:, None]
    decay = tl.full((TILE.GROUPS, TILE.BLOCK_D), 1.0, tl.float32)
    total = tl.zeros((TILE.GROUPS, TILE.BLOCK_D), tl.float32)
    for j in tl.static_range(TILE.ROWS):
        row = -(group * TILE.ROWS + j)
        t_valid = start + row >= 0
        offsets = row * D + d[None, :]
        valid = t_valid & d_valid
        log_a_t = tl.load(log_a + offsets, valid, other=0.0, eviction_policy=READ_AGAIN)
        dh_t = tl.load(dh + offsets, valid, other=0.0, eviction_policy=READ_AGAIN).to(tl.float32)
        kind = read_kind(token_kind, row, t_valid)
        a = _decay(log_a_t, kind)
        decay *= a
        total = a * (total + dh_t)

    chain = d_final, d_initial, carry, B, D, tile, tiles, b, d
    group, c = states_before_next_groups(decay, total, chain, TILE.GROUPS)
    for j in tl.static_range(TILE.ROWS):
        row = -(group * TILE.ROWS + j)
        t_valid = start + row >= 0
        offsets = row * D + d[None, :]
        valid = t_valid & d_valid
        log_a_t = tl.load(log_a + offsets, valid, other=0.0, eviction_policy=READ_LAST)
        dh_t = tl.load(dh + offsets, valid, other=0.0, eviction_policy=READ_LAST).to(tl.float32)
        previous = load_previous_output(h, initial, start, row, b, d[None, :], d_valid, D)
        kind = read_kind(token_kind, row, t_valid)
        g = dh_t + c
        c = _decay(log_a_t, kind) * g
        d_log_a_t = c * previous
        if kind is not None:
            g = tl.where(kind == PADDING, 0.0, g)
            d_log_a_t = tl.where(kind == CONTINUES, d_log_a_t, 0.0)
        tl.store(dx + offsets, g, valid, cache_modifier=WRITTEN)
        tl.store(d_log_a + offsets, d_log_a_t, valid, cache_modifier=WRITTEN)


def forward(x, log_a, initial_state, token_kind):
    tensors = x, log_a, initial_state, token_kind
    return launch_chained_scan("linear_scan", _forward_kernel, TILINGS, tensors, new_outputs(x))


def backward(x, log_a, initial_state, token_kind, h, dh, d_final):
    tensors = dh, log_a, h, initial_state, token_kind, d_final
    gradients = like(h), like(log_a), state_of(h)
    dx, d_log_a, d_initial = launch_chained_scan(
        "linear_scan backward", _backward_kernel, BACKWARD_TILINGS, tensors, gradients
    )
    return dx, d_log_a, None if initial_state is None else d_initial, None


linear_scan = operation(
    Operation(
        "linear_scan",
        forward,
        new_outputs,
        backward,
        unsupported_reason,
        saves_output=True,
        unused_in_backward=("x",),
    )
)
