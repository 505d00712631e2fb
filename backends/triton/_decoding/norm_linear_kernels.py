"""Kernels of `norm_linear`: columns of one to four products, gates, and sums of partial products.

`norm_linear_products.py` computes the products of a program.
"""

import triton
import triton.language as tl

from .._device.pdl import launch_dependents, wait_for_previous_launch
from .._device.products import operand
from .norm_linear_products import (
    apply_gate,
    load_squares,
    norm_factors,
    project_row,
    project_rows,
)


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
    squares,
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
    NUM_SQUARES: tl.constexpr,
    BLOCK_S: tl.constexpr,
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
            *(x, x_2, squares, scale, kernel, first_channel, n, epsilon, K, N, LENGTH),
            *(NORM, GATE, NUM_SQUARES, BLOCK_S, BLOCK_N, BLOCK_K, SUM_AT_END, PDL),
        )
        up = total
    else:
        total, up = project_rows(
            *(x, squares, kernel, up_kernel, first_channel, n, rows, epsilon),
            *(K, N, LENGTH, GATE, NUM_SQUARES, BLOCK_S, BLOCK_B, BLOCK_K, STAGES, SHORT),
        )
    return total, up


@triton.jit
def columns_kernel(
    x,
    x_2,
    squares,
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
    NUM_SQUARES: tl.constexpr,
    BLOCK_S: tl.constexpr,
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
            *(x, x_2, squares, kernel, kernel_2, n, scale, first_channel, rows, epsilon),
            *(K, N, GATE, LENGTH, NORM, NUM_SQUARES, BLOCK_S),
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
                *(x, None, squares, kernel_2, None, n, scale, 0, rows, epsilon),
                *(K, N_2, 0, LENGTH, NORM, NUM_SQUARES, BLOCK_S),
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
                *(x, None, squares, kernel_3, None, n, scale, 0, rows, epsilon),
                *(K, N_3, 0, LENGTH, NORM, NUM_SQUARES, BLOCK_S),
                *(BLOCK_B, BLOCK_N, BLOCK_K, STAGES, SHORT, SUM_AT_END, PDL),
            )
            _store_columns(total, bias_3, None, y_3, n, rows, N_3, OUTPUT_SCALE)
    if kernel_4 is not None:  # noqa: SIM102
        if tile >= TILES + TILES_2 + TILES_3:
            n = (tile - TILES - TILES_2 - TILES_3) * BLOCK_N + tl.arange(0, BLOCK_N)
            total, _ = _project(
                *(x, None, squares, kernel_4, None, n, scale, 0, rows, epsilon),
                *(K, N_4, 0, LENGTH, NORM, NUM_SQUARES, BLOCK_S),
                *(BLOCK_B, BLOCK_N, BLOCK_K, STAGES, SHORT, SUM_AT_END, PDL),
            )
            _store_columns(total, bias_4, None, y_4, n, rows, N_4, OUTPUT_SCALE)


@triton.jit
def gate_kernel(
    gate_total,
    up_total,
    squares,
    gate_bias,
    up_bias,
    residual,
    y,
    rows,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    GATE: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    OUTPUT_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Applies a gate to columns of one row, after the norm's factor if it has squares."""
    TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // TILES
    n = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        launch_dependents()
        wait_for_previous_launch()
    gate = tl.load(gate_total + row * N + n, n < N, other=0.0)
    up = tl.load(up_total + row * N + n, n < N, other=0.0)
    if squares is not None:
        row_squares = load_squares(squares, row + tl.arange(0, 1), rows, NUM_SQUARES, BLOCK_S)
        factor = norm_factors(row_squares, epsilon, K)
        gate *= factor
        up *= factor
    if gate_bias is not None:
        gate += tl.load(gate_bias + n, n < N, other=0.0).to(tl.float32)
    if up_bias is not None:
        up += tl.load(up_bias + n, n < N, other=0.0).to(tl.float32)
    value = _scale_output(apply_gate(gate, up, GATE), OUTPUT_SCALE)
    if residual is not None:
        value += tl.load(residual + row * N + n, n < N, other=0.0).to(tl.float32)
    tl.store(y + row * N + n, operand(value, y.dtype.element_ty == tl.bfloat16), n < N)


@triton.jit
def sum_kernel(
    sums,
    squares,
    bias,
    residual,
    next_scale,
    y,
    scaled,
    next_squares,
    rows,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    OUTPUT_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds partial sums of columns of one row, and applies the norm's factor if it has squares.

    With `next_scale`, the weight of the norm that follows, it also stores the weighted row and sums
    of squares: `x` and `squares` of the product after that norm.
    """
    TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // TILES
    n = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        launch_dependents()
    if bias is not None:
        offset = tl.load(bias + n, n < N, other=0.0).to(tl.float32)
    if next_scale is not None:
        weight = tl.load(next_scale + n, n < N, other=0.0).to(tl.float32)
    if PDL:
        wait_for_previous_launch()
    if squares is not None:
        row_squares = load_squares(squares, row + tl.arange(0, 1), rows, NUM_SQUARES, BLOCK_S)
    value = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(sums + (part * rows + row) * N + n, n < N, other=0.0)
    if squares is not None:
        value *= norm_factors(row_squares, epsilon, K)
    if bias is not None:
        value += offset
    value = _scale_output(value, OUTPUT_SCALE)
    if residual is not None:
        value += tl.load(residual + row * N + n, n < N, other=0.0).to(tl.float32)
    SHORT: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    tl.store(y + row * N + n, operand(value, SHORT), n < N)
    if next_scale is not None:
        tl.store(scaled + row * N + n, operand(value * weight, SHORT), n < N)
        value = tl.where(n < N, value, 0.0)
        tl.store(next_squares + tl.program_id(0), tl.sum(value * value, 0))
