"""Kernels of `norm_linear`: columns of one to four products, gates, and sums of partial products.

`norm_linear_products.py` computes the products of a program.
"""

import triton
import triton.language as tl

from .._device.common import load_float32
from .._device.math import reciprocal_root, sigmoid
from .._device.pdl import launch_dependents, wait_for_previous_launch
from .._device.products import operand
from .norm_linear_products import apply_gate, project_row, project_rows


@triton.jit
def _scale_output(value, OUTPUT_SCALE: tl.constexpr):
    return value if OUTPUT_SCALE == 1.0 else value * OUTPUT_SCALE


@triton.jit
def _store_columns(
    total, bias, residual, y, n, rows, N: tl.constexpr, OUTPUT_SCALE: tl.constexpr
):  # fmt: skip
    row = tl.arange(0, total.shape[0])
    offsets, valid = row[:, None] * N + n[None, :], (row < rows)[:, None] & (n < N)[None, :]
    if bias is not None:
        total += tl.load(bias + n, n < N, other=0.0).to(tl.float32)[None, :]
    total = _scale_output(total, OUTPUT_SCALE)
    if residual is not None:
        total += tl.load(residual + offsets, valid, other=0.0).to(tl.float32)
    tl.store(y + offsets, operand(total, y.dtype.element_ty == tl.bfloat16), valid)


@triton.jit
def _project(
    x,
    x_2,
    input_gate,
    kernel,
    up_kernel,
    n,
    scale,
    first_channel,
    rows,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    GATE: tl.constexpr,
    LENGTH: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SHORT: tl.constexpr,
    SUM_AT_END: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns n of the product; with a gate and several rows, those of `up_kernel`, too."""
    if BLOCK_B == 1:
        total = project_row(
            *(x, x_2, input_gate, scale, kernel, first_channel, n, epsilon, K, N, LENGTH),
            *(NORM, GATE, BLOCK_N, BLOCK_K, SUM_AT_END, PDL),
        )
        up = total
    else:
        total, up = project_rows(
            *(x, kernel, up_kernel, first_channel, n, rows, K, N, LENGTH, GATE),
            *(BLOCK_B, BLOCK_K, STAGES, SHORT),
        )
    return total, up


@triton.jit
def columns_kernel(
    x,
    x_2,
    input_gate,
    scale,
    kernel,
    kernel_2,
    kernel_3,
    kernel_4,
    bias,
    bias_2,
    bias_3,
    bias_4,
    residual,
    y,
    y_2,
    y_3,
    y_4,
    rows,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    N_2: tl.constexpr,
    N_3: tl.constexpr,
    N_4: tl.constexpr,
    LENGTH: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SHORT: tl.constexpr,
    SUM_AT_END: tl.constexpr,
    OUTPUT_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES_2: tl.constexpr = 0 if GATE else (N_2 + BLOCK_N - 1) // BLOCK_N
    TILES_3: tl.constexpr = (N_3 + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    first_channel = 0
    if LENGTH < K:
        part = tile // TILES
        tile %= TILES
        first_channel = part * LENGTH
        y += part * rows * N
    # With several rows, dependents may not start early: they would take the shared memory that
    # this launch's own next programs need. These programs wait before their first load, which is x.
    if PDL and BLOCK_B == 1:
        launch_dependents()
    if PDL and BLOCK_B > 1:
        wait_for_previous_launch()
    if tile < TILES:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        total, up = _project(
            *(x, x_2, input_gate, kernel, kernel_2, n, scale, first_channel, rows, epsilon),
            *(K, N, GATE, LENGTH, NORM),
            *(BLOCK_B, BLOCK_N, BLOCK_K, STAGES, SHORT, SUM_AT_END, PDL),
        )
        if GATE and BLOCK_B > 1:
            if bias is not None:
                total += tl.load(bias + n, n < N, other=0.0).to(tl.float32)[None, :]
            if bias_2 is not None:
                up += tl.load(bias_2 + n, n < N, other=0.0).to(tl.float32)[None, :]
            total = apply_gate(total, up, GATE)
            _store_columns(total, None, residual, y, n, rows, N, OUTPUT_SCALE)
        else:
            _store_columns(total, bias, residual, y, n, rows, N, OUTPUT_SCALE)
    # Nested conditions: the compiler knows the outer one.
    if kernel_2 is not None and GATE == 0:  # noqa: SIM102
        if tile >= TILES and tile < TILES + TILES_2:
            n = (tile - TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
            total, _ = _project(
                *(x, None, input_gate, kernel_2, None, n, scale, 0, rows, epsilon),
                *(K, N_2, 0, LENGTH, NORM),
                *(BLOCK_B, BLOCK_N, BLOCK_K, STAGES, SHORT, SUM_AT_END, PDL),
            )
            _store_columns(total, bias_2, None, y_2, n, rows, N_2, OUTPUT_SCALE)
    if kernel_3 is not None:
        third = tile >= TILES + TILES_2
        if kernel_4 is not None:
            third &= tile < TILES + TILES_2 + TILES_3
        if third:
            n = (tile - TILES - TILES_2) * BLOCK_N + tl.arange(0, BLOCK_N)
            total, _ = _project(
                *(x, None, input_gate, kernel_3, None, n, scale, 0, rows, epsilon),
                *(K, N_3, 0, LENGTH, NORM),
                *(BLOCK_B, BLOCK_N, BLOCK_K, STAGES, SHORT, SUM_AT_END, PDL),
            )
            _store_columns(total, bias_3, None, y_3, n, rows, N_3, OUTPUT_SCALE)
    if kernel_4 is not None:  # noqa: SIM102
        if tile >= TILES + TILES_2 + TILES_3:
            n = (tile - TILES - TILES_2 - TILES_3) * BLOCK_N + tl.arange(0, BLOCK_N)
            total, _ = _project(
                *(x, None, input_gate, kernel_4, None, n, scale, 0, rows, epsilon),
                *(K, N_4, 0, LENGTH, NORM),
                *(BLOCK_B, BLOCK_N, BLOCK_K, STAGES, SHORT, SUM_AT_END, PDL),
            )
            _store_columns(total, bias_4, None, y_4, n, rows, N_4, OUTPUT_SCALE)


@triton.jit
def input_kernel(
    x,
    scale,
    input_gate,
    y,
    epsilon,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Stores σ(input_gate) * RMSNorm(x), a program for each row."""
    if PDL:
        launch_dependents()
        wait_for_previous_launch()
    k = tl.arange(0, BLOCK_K)
    offsets = tl.program_id(0) * K + k
    value = load_float32(x, offsets, k < K)
    if NORM:
        value *= reciprocal_root(tl.sum(value * value, 0) / K + epsilon)
        if scale is not None:
            value *= load_float32(scale, k, k < K)
    value *= sigmoid(load_float32(input_gate, offsets, k < K), True)[0]
    tl.store(y + offsets, value, k < K)


@triton.jit
def gate_kernel(
    gate_total,
    up_total,
    residual,
    y,
    N: tl.constexpr,
    GATE: tl.constexpr,
    OUTPUT_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_launch()
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(gate_total + n, n < N, other=0.0)
    value = apply_gate(value, tl.load(up_total + n, n < N, other=0.0), GATE)
    value = _scale_output(value, OUTPUT_SCALE)
    if residual is not None:
        value += tl.load(residual + n, n < N, other=0.0).to(tl.float32)
    tl.store(y + n, value, n < N)


@triton.jit
def sum_kernel(
    sums,
    bias,
    residual,
    y,
    n,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    OUTPUT_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_launch()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(sums + part * n + index, index < n, other=0.0)
    if bias is not None:
        value += tl.load(bias + index % N, index < n, other=0.0).to(tl.float32)
    value = _scale_output(value, OUTPUT_SCALE)
    if residual is not None:
        value += tl.load(residual + index, index < n, other=0.0).to(tl.float32)
    tl.store(y + index, value, index < n)
