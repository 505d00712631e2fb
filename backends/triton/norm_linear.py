"""y = RMSNorm(x) W + b for a few rows: what a step of generation spends most of its time on.

A program makes some columns of y from all channels of x. A single row is normalized in the same
kernel; a few rows are before it, by one launch more, so that tensor cores take them as they are.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton import rms_norm
from keras_recurrent.backends.triton._ahead import let_next_launch_begin
from keras_recurrent.backends.triton._framework import (
    forward_operation,
    framework,
    overlap,
    refusal_of_steps,
    run,
)
from keras_recurrent.backends.triton._launch import Array, Launch, dtype_name
from keras_recurrent.backends.triton._math import gelu, silu
from keras_recurrent.backends.triton._norm_linear_products import of_one_row, of_rows

_GATES = (None, "silu", "gelu")
_TILE = {"BLOCK_B": 1, "BLOCK_N": 16, "STAGES": 1, "num_warps": 8}
_BLOCK_K = {"bfloat16": 2048, "float32": 512}
_TILE_OF_ROWS = {"BLOCK_B": 16, "BLOCK_N": 64, "BLOCK_K": 128, "STAGES": 4, "num_warps": 4}
# Where there are too few columns for all multiprocessors, more channels are under way at once, as
# many as the shared memory of small GPUs holds.
_FEW_COLUMNS = 4096
_TILE_OF_FEW = {"BLOCK_B": 16, "BLOCK_N": 32, "BLOCK_K": 512, "STAGES": 3, "num_warps": 4}
_TILE_OF_FLOAT32 = {"BLOCK_B": 16, "BLOCK_N": 32, "BLOCK_K": 64, "STAGES": 2, "num_warps": 4}


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
    most = framework.MOST_ROWS_OF_STEPS
    if x.shape[0] > most:
        return f"is for up to {most} rows, got {x.shape[0]}: products of matrices are faster"
    kernels = [k for k in (kernel, kernel_2, kernel_3) if k is not None]
    dtypes = {dtype_name(t) for t in (x, *kernels)}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        return f"takes float32 or bfloat16, the same of x and kernels, got {sorted(dtypes)}"
    return refusal_of_steps(x, scale, *kernels, bias, bias_2, bias_3, residual)


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
def _store_columns(total, bias, residual, y, n, rows, N: tl.constexpr):
    row = tl.arange(0, total.shape[0])
    places, valid = row[:, None] * N + n[None, :], (row < rows)[:, None] & (n < N)[None, :]
    if bias is not None:
        total += tl.load(bias + n, n < N, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        total += tl.load(residual + places, valid, other=0.0).to(tl.float32)
    tl.store(y + places, total, valid)


@triton.jit
def _maps(
    x,
    scale,
    kernel,
    other,
    n,
    rows,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SHORT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if BLOCK_B == 1:
        total, beside = of_one_row(
            x, scale, kernel, other, n, epsilon, K, N, NORM, PAIR, BLOCK_K, AHEAD
        )
    else:
        total, beside = of_rows(
            x, kernel, other, n, rows, K, N, PAIR, BLOCK_B, BLOCK_K, STAGES, SHORT
        )
    return total, beside


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
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SHORT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES_2: tl.constexpr = 0 if GATE else (N_2 + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    if AHEAD:
        let_next_launch_begin()
    if tile < TILES:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        total, beside = _maps(
            x,
            scale,
            kernel,
            kernel_2,
            n,
            rows,
            epsilon,
            K,
            N,
            NORM,
            GATE != 0,
            BLOCK_B,
            BLOCK_K,
            STAGES,
            SHORT,
            AHEAD,
        )
        if GATE:
            if bias is not None:
                total += tl.load(bias + n, n < N, other=0.0).to(tl.float32)[None, :]
            if bias_2 is not None:
                beside += tl.load(bias_2 + n, n < N, other=0.0).to(tl.float32)[None, :]
            total = (silu(total) if GATE == 1 else gelu(total)) * beside
            _store_columns(total, None, residual, y, n, rows, N)
        else:
            _store_columns(total, bias, residual, y, n, rows, N)
    # Two conditions each: the compiler knows the first.
    if kernel_2 is not None and GATE == 0:  # noqa: SIM102
        if tile >= TILES and tile < TILES + TILES_2:
            n = (tile - TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
            total, _ = _maps(
                x,
                scale,
                kernel_2,
                None,
                n,
                rows,
                epsilon,
                K,
                N_2,
                NORM,
                False,
                BLOCK_B,
                BLOCK_K,
                STAGES,
                SHORT,
                AHEAD,
            )
            _store_columns(total, bias_2, None, y_2, n, rows, N_2)
    if kernel_3 is not None:  # noqa: SIM102
        if tile >= TILES + TILES_2:
            n = (tile - TILES - TILES_2) * BLOCK_N + tl.arange(0, BLOCK_N)
            total, _ = _maps(
                x,
                scale,
                kernel_3,
                None,
                n,
                rows,
                epsilon,
                K,
                N_3,
                NORM,
                False,
                BLOCK_B,
                BLOCK_K,
                STAGES,
                SHORT,
                AHEAD,
            )
            _store_columns(total, bias_3, None, y_3, n, rows, N_3)


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
    if rows > 1 and epsilon >= 0:
        (x,) = rms_norm.forward(x, scale, epsilon=epsilon)
        scale, epsilon = None, -1.0
    tensors = x, scale, kernel, kernel_2, kernel_3, bias, bias_2, bias_3, residual
    widths = [0 if w is None else w.shape[1] for w in (kernel, kernel_2, kernel_3)]
    few = gate == 0 and sum(widths) <= _FEW_COLUMNS
    options = _tile(rows, channels, few, dtype_name(kernel))
    if gate:  # two kernels at once take more shared memory
        options["STAGES"] = min(options["STAGES"], 3)
    columns = [widths[0], 0 if gate else widths[1], widths[2]]
    programs = sum(triton.cdiv(n, options["BLOCK_N"]) for n in columns)
    options |= dict(zip(("K", "N", "N_2", "N_3"), (channels, *widths), strict=True))
    options |= {"NORM": epsilon >= 0, "GATE": gate, "SHORT": dtype_name(kernel) == "bfloat16"}
    # Programs of several rows that wait would take the shared memory of those that run.
    options |= overlap(x) if rows == 1 else {"AHEAD": False}
    return run(Launch(_kernel, programs, tensors, outputs, (rows, epsilon), options))


def _tile(rows, channels, few, dtype):
    if rows == 1:
        tile = _TILE | {"BLOCK_K": _BLOCK_K[dtype]}
    elif dtype == "float32":
        tile = _TILE_OF_FLOAT32
    else:
        tile = _TILE_OF_FEW if few else _TILE_OF_ROWS
    return tile | {"BLOCK_K": min(tile["BLOCK_K"], triton.next_power_of_2(max(16, channels)))}


_norm_linear = forward_operation("norm_linear", forward, results, count=3)
