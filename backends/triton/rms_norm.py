"""y = x r * scale, r = 1 / sqrt(mean(x²) + ε).  Zhang and Sennrich 2019, arXiv:1910.07467.

Forward and backward read and write each row once. The backward computes r again:

    dx = r (dy scale - x r mean(dy scale x r)),  dscale = Σ dy x r
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from keras_recurrent.backends.torch._common import register_gradient
from keras_recurrent.backends.triton._common import contiguous, on_device_of, refusal
from keras_recurrent.backends.triton._token_wise import Tile, num_rows

_MAX_WIDTH = 16384  # the registers of one program hold a row
_TILE_SIZE = 2048  # elements, 16 a thread, unless a row is longer


def unsupported(x, scale=None, epsilon=0.0) -> str | None:
    """Why this implementation refuses these arguments; None if it accepts them."""
    if x.shape[-1] > _MAX_WIDTH:
        return f"holds rows of up to {_MAX_WIDTH} channels, got {x.shape[-1]}"
    return refusal(x, scale)


def rms_norm(x, scale=None, epsilon=0.0):
    """x: [..., D]; scale: [D] or None. Returns [..., D] in x's dtype."""
    return _forward(x, scale, float(epsilon))


def _tile(width):
    block_d = triton.next_power_of_2(max(1, width))
    return Tile(block_d, max(1, _TILE_SIZE // block_d), min(16, max(4, block_d // 512)))


def _stages(tile):
    """How many tiles of a program are loaded ahead into shared memory."""
    return 3 if tile.BLOCK_D < _MAX_WIDTH else 2


@triton.jit
def _reciprocal_root(x, epsilon, D):
    """r of each row, correctly rounded: in a row of one channel dx is proportional to 1 - x² r².

    0 where the sum of squares is 0 or leaves the range of float32.
    """
    z = tl.sum(x * x, 1)[:, None] / D + epsilon
    return tl.where(z == 0, 0.0, tl.div_rn(1.0, tl.sqrt_rn(z)))


@triton.jit
def _forward_kernel(
    x, scale, y, rows, epsilon, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    valid = (row < rows - first) & (d < D)
    value = tl.load(x + first * D + (row * D + d), valid, other=0.0).to(tl.float32)
    value *= _reciprocal_root(value, epsilon, D)
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
    dy += start
    x += start
    dx += start
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
        r = _reciprocal_root(value, epsilon, D)
        value *= tl.where(real, r, 0.0)
        if scale is not None:
            total += gradient * value
            gradient *= weight
        gradient -= value * (tl.sum(gradient * value, 1)[:, None] / D)
        tl.store(dx + offsets, gradient * r, valid)
        dy += step
        x += step
        dx += step
    if scale is not None:
        total = tl.sum(total, 0)[None, :]
        tl.store(d_scale + program.to(tl.int64) * D + d, total, d < D)


@torch.library.custom_op("keras_recurrent::triton_rms_norm", mutates_args=())
def _forward(x: Tensor, scale: Tensor | None, epsilon: float) -> Tensor:
    tile, rows = _tile(x.shape[-1]), num_rows(x)
    y = x.new_empty(x.shape)
    with on_device_of(x):
        _forward_kernel[(tile.tiles(rows),)](
            *contiguous(x, scale), y, rows, epsilon, D=x.shape[-1], **tile._asdict()
        )
    return y


@_forward.register_fake
def _(x, scale, epsilon):
    return x.new_empty(x.shape)


@torch.library.custom_op("keras_recurrent::triton_rms_norm_backward", mutates_args=())
def _backward(dy: Tensor, x: Tensor, scale: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    tile, rows = _tile(width), num_rows(x)
    programs = tile.programs(rows)
    dx = x.new_empty(x.shape)
    d_scale = x.new_empty((programs, 0 if scale is None else width), dtype=torch.float32)
    with on_device_of(x):
        _backward_kernel[(programs,)](
            *contiguous(dy, x, scale),
            dx,
            d_scale,
            rows,
            epsilon,
            D=width,
            STAGES=_stages(tile),
            **tile._asdict(),
        )
    return dx, d_scale.sum(0).to(x.dtype if scale is None else scale.dtype)


@_backward.register_fake
def _(dy, x, scale, epsilon):
    return x.new_empty(x.shape), x.new_empty(0) if scale is None else scale.new_empty(scale.shape)


register_gradient(_forward, _backward, keep_output=False, token_kinds=False, options=1)
