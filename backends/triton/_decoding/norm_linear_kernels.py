"""Kernels of `norm_linear`: columns of one to four products, gates, and sums of partial products.

`norm_linear_products.py` computes the products of a program.
"""

import triton
import triton.language as tl

from .._device.common import load_float32
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
def _finish_output(value, OUTPUT: tl.constexpr):
    """Applies the squared ReLU if OUTPUT[0] is True, then the factor OUTPUT[1]."""
    if OUTPUT[0]:
        value = tl.where(value < 0.0, 0.0, value * value)
    return value if OUTPUT[1] == 1.0 else value * OUTPUT[1]


@triton.jit
def _store_columns(total, bias, residual, y, n, rows, N: tl.constexpr, OUTPUT: tl.constexpr):
    row = tl.arange(0, total.shape[0])
    offsets, valid = row[:, None] * N + n[None, :], (row < rows)[:, None] & (n < N)[None, :]
    total = _finish_output(_add_columns(total, bias, n, N), OUTPUT)
    if residual is not None:
        total += load_float32(residual, offsets, valid)
    tl.store(y + offsets, operand(total, y.dtype.element_ty == tl.bfloat16), valid)


@triton.jit
def _add_columns(total, bias, n, N: tl.constexpr):
    """Adds a bias [N], if there is one, to the columns n of all rows."""
    return total if bias is None else total + load_float32(bias, n, n < N)[None, :]


@triton.jit
def columns_kernel(
    x,
    x_2,
    squares,
    scale,
    kernels,
    biases,
    residual,
    outputs,
    rows,
    epsilon,
    WIDTHS: tl.constexpr,
    TILE_STARTS: tl.constexpr,
    PRODUCT: tl.constexpr,
    OUTPUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns of one of the products; with a gate and several rows, of the gated unit.

    kernels, biases, outputs: pointers of all products. WIDTHS: the columns of each kernel.
    TILE_STARTS: the first tile of each kernel, and the number of tiles.
    """
    BLOCK_N: tl.constexpr = PRODUCT.BLOCK_N
    GATED: tl.constexpr = PRODUCT.GATE > 0 and PRODUCT.BLOCK_B > 1
    tile = tl.program_id(0)
    first_channel = 0
    if PRODUCT.LENGTH < PRODUCT.K:
        part = tile // TILE_STARTS[1]
        tile %= TILE_STARTS[1]
        first_channel = part * PRODUCT.LENGTH
        outputs = (outputs[0] + part * rows * WIDTHS[0],)
    # With several rows, dependents may not start early: they would take the shared memory that
    # this launch's own next programs need. These programs wait before their first load, which is x.
    launch_dependents(PDL and PRODUCT.BLOCK_B == 1)
    wait_for_previous_launch(PDL and PRODUCT.BLOCK_B > 1)
    for i in tl.static_range(len(outputs)):
        # A third or fourth kernel that is the last one has all remaining tiles.
        if tile >= TILE_STARTS[i] and (
            (i > 1 and i + 1 == len(outputs)) or tile < TILE_STARTS[i + 1]
        ):
            n = (tile - TILE_STARTS[i]) * BLOCK_N + tl.arange(0, BLOCK_N)
            if PRODUCT.BLOCK_B == 1:
                total = project_row(
                    *(x, x_2, squares, scale, kernels[i], first_channel, n, epsilon, WIDTHS[i]),
                    *(PRODUCT, PDL),
                )
            else:
                total, up = project_rows(
                    *(x, squares, kernels[i], kernels[1] if GATED else None, first_channel, n),
                    *(rows, epsilon, WIDTHS[i], PRODUCT),
                )
            if GATED:
                total = _add_columns(total, biases[0], n, WIDTHS[0])
                total = apply_gate(total, _add_columns(up, biases[1], n, WIDTHS[0]), PRODUCT.GATE)
            _store_columns(
                *(total, None if GATED else biases[i], residual if i == 0 else None),
                *(outputs[i], n, rows, WIDTHS[i], OUTPUT),
            )


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
    OUTPUT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Applies a gate to columns of one row, after the norm's factor if it has squares."""
    TILES: tl.constexpr = (N + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // TILES
    n = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    launch_dependents(PDL)
    wait_for_previous_launch(PDL)
    gate = tl.load(gate_total + row * N + n, n < N, other=0.0)
    up = tl.load(up_total + row * N + n, n < N, other=0.0)
    if squares is not None:
        row_squares = load_squares(squares, row + tl.arange(0, 1), rows, NUM_SQUARES)
        factor = norm_factors(row_squares, epsilon, K)
        gate *= factor
        up *= factor
    if gate_bias is not None:
        gate += load_float32(gate_bias, n, n < N)
    if up_bias is not None:
        up += load_float32(up_bias, n, n < N)
    value = _finish_output(apply_gate(gate, up, GATE), OUTPUT)
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
    OUTPUT: tl.constexpr,
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
    launch_dependents(PDL)
    if bias is not None:
        offset = load_float32(bias, n, n < N)
    if next_scale is not None:
        weight = load_float32(next_scale, n, n < N)
    wait_for_previous_launch(PDL)
    if squares is not None:
        row_squares = load_squares(squares, row + tl.arange(0, 1), rows, NUM_SQUARES)
    value = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(sums + (part * rows + row) * N + n, n < N, other=0.0)
    if squares is not None:
        value *= norm_factors(row_squares, epsilon, K)
    if bias is not None:
        value += offset
    value = _finish_output(value, OUTPUT)
    if residual is not None:
        value += tl.load(residual + row * N + n, n < N, other=0.0).to(tl.float32)
    SHORT: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    tl.store(y + row * N + n, operand(value, SHORT), n < N)
    if next_scale is not None:
        tl.store(scaled + row * N + n, operand(value * weight, SHORT), n < N)
        value = tl.where(n < N, value, 0.0)
        tl.store(next_squares + tl.program_id(0), tl.sum(value * value, 0))
