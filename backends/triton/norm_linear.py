"""y = RMSNorm(x) W + b for few rows: what a step of generation spends most of its time on.

A program makes some columns of y from all of x, and reads its part of each weight once. The norm's
factor r is the same for a whole row, so it multiplies the sums, r Σ x_k s_k W_kn, and the squares
of x are summed in the same walk. One row is summed on plain arithmetic units; several are the rows
of a product on tensor cores, for which x s is split into two numbers of 16 bits, the second what
the first lacks.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from keras_recurrent.backends.triton._ahead import (
    fetch_ahead,
    let_next_launch_begin,
    wait_for_launch_before,
)
from keras_recurrent.backends.triton._framework import forward_operation, overlap, refusal, run
from keras_recurrent.backends.triton._launch import Array, Launch, dtype_name
from keras_recurrent.backends.triton._math import sigmoid
from keras_recurrent.backends.triton._products import operand, product

_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)
_GATES = (None, "silu", "gelu")
_MOST_ROWS = 64


class Tile(NamedTuple):
    """Rows of x, columns of y, channels at a time and how many of these are loaded ahead."""

    ROWS: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    num_warps: int


ONE_ROW = Tile(1, 16, 512, 3, 4)
SEVERAL_ROWS = Tile(16, 16, 256, 4, 2)


def unsupported(
    x,
    scale,
    kernel,
    kernel_2=None,
    kernel_3=None,
    bias=None,
    bias_2=None,
    bias_3=None,
    residual=None,
    epsilon=None,
    gate=None,
) -> str | None:
    """Why this implementation refuses these arguments; None if it accepts them."""
    if x.shape[0] > _MOST_ROWS:
        return f"is for up to {_MOST_ROWS} rows, got {x.shape[0]}"
    kernels = [k for k in (kernel, kernel_2, kernel_3) if k is not None]
    dtypes = {dtype_name(t) for t in (x, *kernels)}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        return f"takes float32 or bfloat16, the same of x and kernels, got {sorted(dtypes)}"
    return refusal(x, scale, *kernels, bias, bias_2, bias_3, residual)


def norm_linear(
    x,
    scale,
    kernel,
    kernel_2=None,
    kernel_3=None,
    bias=None,
    bias_2=None,
    bias_3=None,
    residual=None,
    epsilon=None,
    gate=None,
):
    """x: [B, K]; scale: [K]; kernels: [K, N] each. Returns a tuple of [B, N] in x's dtype."""
    tensors = x, scale, kernel, kernel_2, kernel_3, bias, bias_2, bias_3, residual
    epsilon = -1.0 if epsilon is None else float(epsilon)
    found = _norm_linear(*tensors, epsilon=epsilon, gate=_GATES.index(gate))
    count = 1 if gate else sum(k is not None for k in (kernel, kernel_2, kernel_3))
    return tuple(found[:count])


@triton.jit
def _activated(z, GATE: tl.constexpr):
    u = z
    if GATE == 2:
        near = tl.where(tl.abs(z) > 10.0, tl.where(z > 0.0, 10.0, -10.0), z)
        u = (near + 0.044715 * near * near * near) * _SQRT_8_OVER_PI
    s, _ = sigmoid(u, True)
    return z * tl.where(u < -80.0, 0.0, s)


@triton.jit
def _inputs(x, scale, rows_valid, row, k, K: tl.constexpr):
    """x s, and x itself, [rows, BLOCK_K] in float32."""
    valid = k < K
    value = tl.load(
        x + row[:, None] * K + k[None, :], rows_valid[:, None] & valid[None, :], other=0.0
    ).to(tl.float32)
    scaled = value
    if scale is not None:
        scaled = value * tl.load(scale + k, valid, other=0.0).to(tl.float32)[None, :]
    return scaled, value


@triton.jit
def _weights(kernel, k, n, K: tl.constexpr, N: tl.constexpr):
    valid = (k < K)[:, None] & (n < N)[None, :]
    return tl.load(kernel + k[:, None] * N + n[None, :], valid, other=0.0)


@triton.jit
def _added(total, scaled, weight):
    """total [rows, N] or, of one row, [K, N], plus what these channels give."""
    SHORT: tl.constexpr = weight.dtype == tl.bfloat16
    if scaled.shape[0] == 1:
        total += tl.trans(scaled) * weight.to(tl.float32)
    else:
        total = product(scaled, weight, total, SHORT)
        if SHORT:
            total = product(scaled - operand(scaled, True).to(tl.float32), weight, total, True)
    return total


@triton.jit
def _maps(
    x,
    scale,
    kernel,
    other,
    first_row,
    n,
    rows,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    PAIR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The columns n of RMSNorm(x) W and, with PAIR, of the same with `other`: [rows, n] each."""
    if AHEAD:
        for start in range(0, K, BLOCK_K):
            fetch_ahead(kernel, start + tl.arange(0, BLOCK_K), n, K, N)
            if PAIR:
                fetch_ahead(other, start + tl.arange(0, BLOCK_K), n, K, N)
        wait_for_launch_before()
    row = first_row + tl.arange(0, ROWS)
    rows_valid = row < rows
    HEIGHT: tl.constexpr = BLOCK_K if ROWS == 1 else ROWS
    total = tl.zeros((HEIGHT, n.shape[0]), tl.float32)
    beside = tl.zeros((HEIGHT, n.shape[0]), tl.float32)
    squares = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        weight = _weights(kernel, k, n, K, N)
        scaled, value = _inputs(x, scale, rows_valid, row, k, K)
        squares += value * value
        total = _added(total, scaled, weight)
        if PAIR:
            beside = _added(beside, scaled, _weights(other, k, n, K, N))
    if ROWS == 1:
        total = tl.sum(total, 0)[None, :]
        beside = tl.sum(beside, 0)[None, :]
    if NORM:
        z = tl.sum(squares, 1) / K + epsilon
        r = tl.where(z == 0, 0.0, tl.div_rn(1.0, tl.sqrt_rn(tl.where(z == 0, 1.0, z))))
        total *= r[:, None]
        beside *= r[:, None]
    return total, beside


@triton.jit
def _further_map(
    x,
    scale,
    kernel,
    bias,
    y,
    first_row,
    n,
    rows,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    total, _ = _maps(
        *(x, scale, kernel, None, first_row, n, rows, epsilon),
        *(K, N, NORM, False, ROWS, BLOCK_K, STAGES, AHEAD),
    )
    if bias is not None:
        total += tl.load(bias + n, n < N, other=0.0).to(tl.float32)[None, :]
    row = first_row + tl.arange(0, ROWS)
    tl.store(y + row[:, None] * N + n[None, :], total, (row < rows)[:, None] & (n < N)[None, :])


@triton.jit
def _kernel(
    x,
    scale,
    kernel,
    kernel_2,
    kernel_3,
    bias,
    bias_2,
    bias_3,
    residual,
    y,
    y_2,
    y_3,
    rows,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    N_2: tl.constexpr,
    N_3: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        let_next_launch_begin()
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES_2: tl.constexpr = 0 if GATE else (N_2 + BLOCK_N - 1) // BLOCK_N
    TILES_3: tl.constexpr = (N_3 + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) % (TILES + TILES_2 + TILES_3)
    first_row = tl.program_id(0) // (TILES + TILES_2 + TILES_3) * ROWS
    row = first_row + tl.arange(0, ROWS)
    if tile < TILES:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (row < rows)[:, None] & (n < N)[None, :]
        total, beside = _maps(
            *(x, scale, kernel, kernel_2, first_row, n, rows, epsilon),
            *(K, N, NORM, GATE != 0, ROWS, BLOCK_K, STAGES, AHEAD),
        )
        if bias is not None:
            total += tl.load(bias + n, n < N, other=0.0).to(tl.float32)[None, :]
        if GATE:
            if bias_2 is not None:
                beside += tl.load(bias_2 + n, n < N, other=0.0).to(tl.float32)[None, :]
            total = _activated(total, GATE) * beside
        if residual is not None:
            total += tl.load(residual + row[:, None] * N + n[None, :], valid, other=0.0).to(
                tl.float32
            )
        tl.store(y + row[:, None] * N + n[None, :], total, valid)
    # Two conditions each: the compiler knows the first.
    if kernel_2 is not None and GATE == 0:  # noqa: SIM102
        if tile >= TILES and tile < TILES + TILES_2:
            n = (tile - TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
            _further_map(
                *(x, scale, kernel_2, bias_2, y_2, first_row, n, rows, epsilon),
                *(K, N_2, NORM, ROWS, BLOCK_K, STAGES, AHEAD),
            )
    if kernel_3 is not None:  # noqa: SIM102
        if tile >= TILES + TILES_2:
            n = (tile - TILES - TILES_2) * BLOCK_N + tl.arange(0, BLOCK_N)
            _further_map(
                *(x, scale, kernel_3, bias_3, y_3, first_row, n, rows, epsilon),
                *(K, N_3, NORM, ROWS, BLOCK_K, STAGES, AHEAD),
            )


def results(
    x,
    scale,
    kernel,
    kernel_2,
    kernel_3,
    bias,
    bias_2,
    bias_3,
    residual,
    *,
    epsilon: float,
    gate: int,
):
    def output(weight):
        return None if weight is None else Array((x.shape[0], weight.shape[1]), dtype_name(x))

    return output(kernel), None if gate else output(kernel_2), output(kernel_3)


def forward(
    x,
    scale,
    kernel,
    kernel_2,
    kernel_3,
    bias,
    bias_2,
    bias_3,
    residual,
    *,
    epsilon: float,
    gate: int,
):
    tensors = x, scale, kernel, kernel_2, kernel_3, bias, bias_2, bias_3, residual
    outputs = results(*tensors, epsilon=epsilon, gate=gate)
    rows, channels = x.shape
    widths = [0 if w is None else w.shape[1] for w in (kernel, kernel_2, kernel_3)]
    tile = ONE_ROW if rows == 1 else SEVERAL_ROWS
    tile = tile._replace(BLOCK_K=min(tile.BLOCK_K, triton.next_power_of_2(max(16, channels))))
    columns = [widths[0], 0 if gate else widths[1], widths[2]]
    programs = sum(triton.cdiv(n, tile.BLOCK_N) for n in columns) * triton.cdiv(rows, tile.ROWS)
    options = dict(zip(("K", "N", "N_2", "N_3"), (channels, *widths), strict=True))
    options |= {"NORM": epsilon >= 0, "GATE": gate, **tile._asdict(), **overlap(x)}
    return run(Launch(_kernel, programs, tensors, outputs, (rows, epsilon), options))


_norm_linear = forward_operation("norm_linear", forward, results, count=3)
