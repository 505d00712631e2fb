"""log f = log(β + (1 - β) σ(z)).  Qin et al. 2023, arXiv:2311.04823, §3.2.

With a = log β and b = log(1 - β) + log σ(z) it is log(exp(a) + exp(b)), and the gradients are

    dz = dlog f σ(b - a) σ(-z),  da = Σ dlog f σ(a - b),  dlog(1 - β) = Σ dlog f σ(b - a)

for which the backward needs only z, β and the gradient of log f. If the gate forgets at most half,
w = (1 - β) σ(-z) <= 1/2, log f is log(1 - w) = -log(1 + w / (1 - w)).
"""

import triton
import triton.language as tl

from ._device.common import advance, load_float32
from ._device.math import exp, log1p, reciprocal, sigmoid
from ._device.token_wise import Tile, num_rows
from ._runtime.framework import cast, operation, run, token_wise_unsupported_reason
from ._runtime.launch import Array, Launch, cdiv, dtype_name, like, next_power_of_2
from ._runtime.operation import Operation

_TILE_SIZE = 2048  # elements; a thread loads two vectors of 16 bytes from a 16-bit tensor
# The forward has this many times the programs of the backward, each of which stores a line of sums.
_FORWARD_PROGRAMS = 8


def _tile(width):
    block_d = min(256, next_power_of_2(width))
    return Tile(block_d, _TILE_SIZE // block_d, 4)


@triton.jit
def _locate_program(D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """This program, the number of programs, the offset of its first tile, its step, channels."""
    blocks = tl.cdiv(D, BLOCK_D)
    program, programs = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    d = (tl.program_id(0) % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    return program, programs, program.to(tl.int64) * ROWS * D, programs.to(tl.int64) * ROWS * D, d


@triton.jit
def _load_bound(lower_bound, d, D):
    """Loads log β and log(1 - β)."""
    return load_float32(lower_bound, d, d < D), load_float32(lower_bound + D, d, d < D)


@triton.jit
def _log_sigmoid(z, FINE: tl.constexpr):
    """log σ(z) and exp(-|z|)."""
    e = exp(-tl.abs(z), FINE)
    return tl.where(z > 0.0, 0.0, z) - log1p(e, FINE), e


@triton.jit
def _one_minus_sigmoid(z, e):
    """1 - σ(z) = σ(-z), from e = exp(-|z|)."""
    # On a GPU, e may be a number even if z is NaN.
    return tl.where(z == z, tl.where(z > 0.0, e, 1.0) * reciprocal(1.0 + e), z)


@triton.jit
def _forward_kernel(
    logits,
    lower_bound,
    log_f,
    rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    FINE: tl.constexpr = logits.dtype.element_ty == tl.float32
    program, programs, start, step, d = _locate_program(D, BLOCK_D, ROWS)
    logits, log_f = advance((logits, log_f), start)
    if lower_bound is not None:
        log_beta, log_not_beta = _load_bound(lower_bound, d, D)
    row = tl.arange(0, ROWS)[:, None]
    offsets = row * D + d
    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        valid = (tile * ROWS + row < rows) & (d < D)
        z = tl.load(logits + offsets, valid, other=0.0).to(tl.float32)
        log_s, e = _log_sigmoid(z, FINE)
        if lower_bound is not None:
            above = log_not_beta + log_s
            larger = tl.where(log_beta > above, log_beta, above)
            forgotten = exp(log_not_beta, FINE) * _one_minus_sigmoid(z, e)
            small = (forgotten <= 0.5) & (log_beta == log_beta)  # log β may be NaN
            ratio = forgotten * reciprocal(1.0 - tl.minimum(forgotten, 0.5))
            gap = tl.where(above == log_beta, 0.0, tl.abs(above - log_beta))  # both may be -inf
            log = log1p(tl.where(small, ratio, exp(-gap, FINE)), FINE)
            log_s = tl.where(small, -log, larger + log)
        tl.store(log_f + offsets, log_s, valid)
        logits, log_f = advance((logits, log_f), step)


@triton.jit
def _backward_kernel(
    d_log_f,
    logits,
    lower_bound,
    d_logits,
    d_bound,
    rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    FINE: tl.constexpr = logits.dtype.element_ty == tl.float32
    program, programs, start, step, d = _locate_program(D, BLOCK_D, ROWS)
    d_log_f, logits, d_logits = advance((d_log_f, logits, d_logits), start)
    if lower_bound is not None:
        log_beta, log_not_beta = _load_bound(lower_bound, d, D)
    row = tl.arange(0, ROWS)[:, None]
    offsets = row * D + d
    d_below = tl.zeros((ROWS, BLOCK_D), tl.float32)
    d_above = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        valid = (tile * ROWS + row < rows) & (d < D)
        z = tl.load(logits + offsets, valid, other=0.0).to(tl.float32)
        gradient = tl.load(d_log_f + offsets, valid, other=0.0)
        log_s, e = _log_sigmoid(z, FINE)
        if lower_bound is not None:
            above, below = sigmoid(log_not_beta + log_s - log_beta, FINE)
            d_below += gradient * below
            gradient *= above
            d_above += gradient
        gradient *= _one_minus_sigmoid(z, e)
        tl.store(d_logits + offsets, gradient, valid)
        d_log_f, logits, d_logits = advance((d_log_f, logits, d_logits), step)
    if lower_bound is not None:
        line = d_bound + program.to(tl.int64) * 2 * D + d
        tl.store(line, tl.sum(d_below, 0)[None, :], d < D)
        tl.store(line + D, tl.sum(d_above, 0)[None, :], d < D)


def results(logits, lower_bound):
    return (like(logits).astype("float32"),)


def forward(logits, lower_bound):
    tile, rows, blocks = _sizes(logits)
    programs = min(tile.tiles(rows), _FORWARD_PROGRAMS * tile.programs(rows, blocks))
    log_f = like(logits).astype("float32")
    tensors, options = (logits, lower_bound), {"D": logits.shape[-1], **tile._asdict()}
    return run(Launch(_forward_kernel, programs * blocks, tensors, (log_f,), (rows,), options))


def backward(logits, lower_bound, log_f, d_log_f):
    tile, rows, blocks = _sizes(logits)
    programs = tile.programs(rows, blocks)
    sums = None if lower_bound is None else Array((programs, *lower_bound.shape), "float32")
    outputs = like(logits), sums
    tensors, options = (d_log_f, logits, lower_bound), {"D": logits.shape[-1], **tile._asdict()}
    d_logits, d_bound = run(
        Launch(_backward_kernel, programs * blocks, tensors, outputs, (rows,), options)
    )
    if lower_bound is None:
        return d_logits, None
    return d_logits, cast(d_bound.sum(0), dtype_name(lower_bound), copy=False)


def _sizes(logits):
    """The tile, the number of rows, and the number of blocks of channels."""
    tile = _tile(logits.shape[-1])
    return tile, num_rows(logits), cdiv(logits.shape[-1], tile.BLOCK_D)


log_forget_gate = operation(
    Operation("log_forget_gate", forward, results, backward, token_wise_unsupported_reason)
)
