"""y = x r * scale, r = 1 / sqrt(mean(x²) + ε).  Zhang and Sennrich 2019, arXiv:1910.07467.

Forward and backward read and write each row once. The backward computes r again:

    dx = r (dy scale - x r mean(dy scale x r)),  dscale = Σ dy x r
"""

import triton
import triton.language as tl

from ..constants import SMALLEST_SCALED_EPSILON, SQUARES_SCALE
from ._device.common import advance
from ._device.math import reciprocal_root
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._device.token_wise import Tile, num_rows
from ._runtime.framework import (
    cast,
    operation,
    pdl_options,
    run,
    token_wise_unsupported_reason,
)
from ._runtime.launch import Array, Launch, dtype_name, like, next_power_of_2
from ._runtime.operation import Operation

_SCALE = tl.constexpr(SQUARES_SCALE)
_SMALLEST_SCALED_EPSILON = tl.constexpr(SMALLEST_SCALED_EPSILON)
_MAX_WIDTH = 16384  # channels of a row, which the registers of one program hold
_TILE_SIZE = 2048  # elements, 16 a thread; more if a row is longer
_FEW_ROWS = 16  # at most so many in a decoding step, whose kernel takes less time than its launch


def unsupported(x, scale=None, epsilon=0.0) -> str | None:
    if x.shape[-1] > _MAX_WIDTH:
        return f"takes rows of up to {_MAX_WIDTH} channels, got {x.shape[-1]}"
    return token_wise_unsupported_reason(x, scale)


def _tile(width):
    block_d = next_power_of_2(width)
    return Tile(block_d, max(1, _TILE_SIZE // block_d), min(16, max(4, block_d // 512)))


def _stages(tile):
    """Number of pipeline stages: tiles of a program that are prefetched into shared memory."""
    return 3 if tile.BLOCK_D < _MAX_WIDTH else 2


@triton.jit
def _reciprocal_rms(x, epsilon, D):
    """r of each row, correctly rounded: in a row of one channel dx is proportional to 1 - x² r².

    0 if the mean square is 0 or exceeds the range of float32; `constants.py` explains the scaling.
    """
    z = tl.sum(x * (x * _SCALE), 1)[:, None] / D / _SCALE
    if epsilon < _SMALLEST_SCALED_EPSILON:
        scale = tl.where(z > 1.0, _SCALE, 1 / _SCALE)
        z = tl.sum(x * (x * scale), 1)[:, None] / D / scale
    return reciprocal_root(z + epsilon)


@triton.jit
def _forward_kernel(
    x,
    scale,
    y,
    rows,
    epsilon,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait_for_previous_launch(PDL)
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    valid = (row < rows - first) & (d < D)
    value = tl.load(x + first * D + (row * D + d), valid, other=0.0).to(tl.float32)
    value *= _reciprocal_rms(value, epsilon, D)
    if scale is not None:
        value *= tl.load(scale + d, d < D, other=0.0).to(tl.float32)
    tl.store(y + first * D + (row * D + d), value, valid)


@triton.jit
def _backward_kernel(
    dy,
    x,
    scale,
    dx,
    d_scale,
    rows,
    epsilon,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    start = program.to(tl.int64) * (ROWS * D)
    step = programs.to(tl.int64) * (ROWS * D)
    dy, x, dx = advance((dy, x, dx), start)
    row = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    offsets = row * D + d
    if scale is not None:
        weight = tl.load(scale + d, d < D, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        real = tile * ROWS + row < rows
        valid = real & (d < D)
        value = tl.load(x + offsets, valid, other=0.0).to(tl.float32)
        gradient = tl.load(dy + offsets, valid, other=0.0).to(tl.float32)
        r = _reciprocal_rms(value, epsilon, D)
        value *= tl.where(real, r, 0.0)
        if scale is not None:
            total += gradient * value
            gradient *= weight
        gradient -= value * (tl.sum(gradient * value, 1)[:, None] / D)
        tl.store(dx + offsets, gradient * r, valid)
        dy, x, dx = advance((dy, x, dx), step)
    if scale is not None:
        total = tl.sum(total, 0)[None, :]
        tl.store(d_scale + program.to(tl.int64) * D + d, total, d < D)


def results(x, scale, *, epsilon: float):
    return (like(x),)


def forward(x, scale, *, epsilon: float):
    width = x.shape[-1]
    tile, rows = _tile(width), num_rows(x)
    pdl = pdl_options(x) if rows <= _FEW_ROWS else {"PDL": False}
    options, numbers = {"D": width, **tile._asdict(), **pdl}, (rows, float(epsilon))
    return run(Launch(_forward_kernel, tile.tiles(rows), (x, scale), (like(x),), numbers, options))


def backward(x, scale, y, dy, *, epsilon: float):
    width = x.shape[-1]
    tile, rows = _tile(width), num_rows(x)
    programs = tile.programs(rows)
    sums = None if scale is None else Array((programs, width), "float32")
    options = {"D": width, "STAGES": _stages(tile), **tile._asdict()}
    inputs, outputs, numbers = (dy, x, scale), (like(x), sums), (rows, float(epsilon))
    dx, d_scale = run(Launch(_backward_kernel, programs, inputs, outputs, numbers, options))
    return dx, None if scale is None else cast(d_scale.sum(0), dtype_name(scale), copy=False)


rms_norm = operation(Operation("rms_norm", forward, results, backward, unsupported, on_jax=False))
