"""y = RMSNorm(x) W + b for one row, where W is quantized: see `norm_linear`.

A program makes some columns of y from all channels of x, and reads its part of each weight once.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.constants import SMALLEST_BLOCK_OF_SCALES
from keras_recurrent.backends.triton._ahead import let_next_launch_begin
from keras_recurrent.backends.triton._framework import (
    forward_operation,
    overlap,
    refusal_of_steps,
    run,
)
from keras_recurrent.backends.triton._launch import Array, Launch, dtype_name
from keras_recurrent.backends.triton._quantized_products import of_one_row
from keras_recurrent.backends.triton.norm_linear import gated

_GATES = (None, "silu", "gelu")
_MAX_WIDTH = 32768  # the registers of one program hold a row
_THREADS = 256
_WORDS_OF_A_LOAD = 4  # 16 bytes
# The words of 32 bits that a program reads of one channel: whole lines of memory where this leaves
# enough programs for all multiprocessors of a large GPU.
_LINES = (32, 16, 8, 4)
_PROGRAMS = 132
_AT_ONCE = SMALLEST_BLOCK_OF_SCALES  # loads of a thread, of channels that have one scale


def unsupported(
    x,
    scale,
    kernel,
    kernel_2=None,
    kernel_3=None,
    kernel_scale=None,
    kernel_scale_2=None,
    kernel_scale_3=None,
    kernel_zero=None,
    kernel_zero_2=None,
    kernel_zero_3=None,
    bias=None,
    bias_2=None,
    bias_3=None,
    residual=None,
    epsilon=None,
    gate=None,
    bits=8,
    block_size=None,
    row_dtype=None,
) -> str | None:
    """Why this implementation refuses these arguments; None if it accepts them."""
    rows, channels = x.shape
    if rows > 1:
        return f"is for one row, got {rows}: products of matrices are faster"
    if channels > _MAX_WIDTH:
        return f"holds rows of up to {_MAX_WIDTH} channels, got {channels}"
    if dtype_name(x) not in ("float32", "bfloat16"):
        return f"takes rows of float32 or bfloat16, got {dtype_name(x)}"
    least = SMALLEST_BLOCK_OF_SCALES
    if block_size is not None and (block_size < least or block_size & (block_size - 1)):
        return f"takes blocks of a power of 2, {least} or more, got {block_size}"
    scales = [s for s in (kernel_scale, kernel_scale_2, kernel_scale_3) if s is not None]
    odd = [s.shape[-1] for s in scales if s.shape[-1] * bits % 32]
    if odd:
        return f"reads words of {32 // bits} columns, of which {odd[0]} is no multiple"
    # JAX's check of tensors knows float and integer types alike.
    return refusal_of_steps(x, scale, *scales, bias, bias_2, bias_3, residual)


def norm_quantized_linear(
    x,
    scale,
    kernel,
    kernel_2=None,
    kernel_3=None,
    kernel_scale=None,
    kernel_scale_2=None,
    kernel_scale_3=None,
    kernel_zero=None,
    kernel_zero_2=None,
    kernel_zero_3=None,
    bias=None,
    bias_2=None,
    bias_3=None,
    residual=None,
    epsilon=None,
    gate=None,
    bits=8,
    block_size=None,
    row_dtype=None,
):
    """Of the arguments `unsupported` takes. Returns a tuple of [1, N] in x's dtype."""
    found = _norm_quantized_linear(
        *(x, scale, kernel, kernel_2, kernel_3),
        *(kernel_scale, kernel_scale_2, kernel_scale_3),
        *(kernel_zero, kernel_zero_2, kernel_zero_3),
        *(bias, bias_2, bias_3, residual),
        epsilon=-1.0 if epsilon is None else float(epsilon),
        gate=_GATES.index(gate),
        bits=bits,
        block_size=block_size or 0,
        quantized=row_dtype is not None,
    )
    count = 1 if gate else sum(k is not None for k in (kernel, kernel_2, kernel_3))
    return tuple(found[:count])


@triton.jit
def _map(
    x,
    scale,
    kernel,
    kernel_scale,
    kernel_zero,
    bias,
    residual,
    y,
    tile,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SHORT: tl.constexpr,
    ROW: tl.constexpr,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    total, n = of_one_row(
        *(x, scale, kernel, kernel_scale, kernel_zero, tile, epsilon),
        *(K, N, BITS, BLOCK_SIZE, NORM, QUANTIZED, SHORT, ROW, WORDS, LANES, AT_ONCE, AHEAD),
    )
    if bias is not None:
        total += tl.load(bias + n, n < N, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + n, n < N, other=0.0).to(tl.float32)
    tl.store(y + n, total, n < N)


@triton.jit
def _kernel(
    x,
    scale,
    kernel,
    kernel_2,
    kernel_3,
    kernel_scale,
    kernel_scale_2,
    kernel_scale_3,
    kernel_zero,
    kernel_zero_2,
    kernel_zero_3,
    bias,
    bias_2,
    bias_3,
    residual,
    y,
    y_2,
    y_3,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    N_2: tl.constexpr,
    N_3: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SHORT: tl.constexpr,
    ROW: tl.constexpr,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    COLUMNS: tl.constexpr = WORDS * 32 // BITS
    TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    TILES_2: tl.constexpr = (N_2 + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0)
    if AHEAD:
        let_next_launch_begin()
    if tile < TILES:
        _map(
            *(x, scale, kernel, kernel_scale, kernel_zero, bias, residual, y),
            *(tile, epsilon, K, N, BITS, BLOCK_SIZE, NORM, QUANTIZED, SHORT),
            *(ROW, WORDS, LANES, AT_ONCE, AHEAD),
        )
    # Two conditions each: the compiler knows the first.
    if kernel_2 is not None:  # noqa: SIM102
        if tile >= TILES and tile < TILES + TILES_2:
            _map(
                *(x, scale, kernel_2, kernel_scale_2, kernel_zero_2, bias_2, None, y_2),
                *(tile - TILES, epsilon, K, N_2, BITS, BLOCK_SIZE, NORM, QUANTIZED, SHORT),
                *(ROW, WORDS, LANES, AT_ONCE, AHEAD),
            )
    if kernel_3 is not None:  # noqa: SIM102
        if tile >= TILES + TILES_2:
            _map(
                *(x, scale, kernel_3, kernel_scale_3, kernel_zero_3, bias_3, None, y_3),
                *(tile - TILES - TILES_2, epsilon, K, N_3, BITS, BLOCK_SIZE, NORM, QUANTIZED),
                *(SHORT, ROW, WORDS, LANES, AT_ONCE, AHEAD),
            )


def results(
    x,
    scale,
    kernel,
    kernel_2,
    kernel_3,
    kernel_scale,
    kernel_scale_2,
    kernel_scale_3,
    *_,
    gate: int,
    **__,
):
    first, second, third = _rows(x, (kernel_scale, kernel_scale_2, kernel_scale_3), dtype_name(x))
    return first, None if gate else second, third


def _rows(x, scales, dtype):
    """What is written for each map, by its scales; None for one that is absent."""
    return tuple(None if s is None else Array((x.shape[0], s.shape[-1]), dtype) for s in scales)


def forward(
    x,
    scale,
    kernel,
    kernel_2,
    kernel_3,
    kernel_scale,
    kernel_scale_2,
    kernel_scale_3,
    kernel_zero,
    kernel_zero_2,
    kernel_zero_3,
    bias,
    bias_2,
    bias_3,
    residual,
    *,
    epsilon: float,
    gate: int,
    bits: int,
    block_size: int,
    quantized: bool,
):
    scales = kernel_scale, kernel_scale_2, kernel_scale_3
    inputs = x, scale, kernel, kernel_2, kernel_3, *scales
    inputs += kernel_zero, kernel_zero_2, kernel_zero_3, bias, bias_2, bias_3
    # With a gate, each map is written as it was summed up.
    dtype = "float32" if gate else dtype_name(x)
    outputs = _rows(x, scales, dtype)
    widths = tuple(0 if s is None else s.shape[-1] for s in scales)
    options = tile(x.shape[1], widths, bits, block_size) | {
        "NORM": epsilon >= 0,
        "QUANTIZED": quantized,
        "SHORT": dtype_name(x) == "bfloat16",
        **overlap(x),
    }
    programs = sum(triton.cdiv(n, options["WORDS"] * 32 // bits) for n in widths)
    inputs += (None if gate else residual,)
    found = run(Launch(_kernel, programs, inputs, outputs, (epsilon,), options))
    if not gate:
        return found
    first, second, _ = found
    (output,) = _rows(x, scales[:1], dtype_name(x))
    return gated(x, first, second, residual, output, gate), None, None


def tile(channels, widths, bits, block_size):
    """The constants of a program, for rows of so many channels and maps of so many columns."""

    def programs(words):
        return sum(triton.cdiv(n, words * 32 // bits) for n in widths)

    words = next((n for n in _LINES if programs(n) >= _PROGRAMS), _LINES[-1])
    lanes = _THREADS * _WORDS_OF_A_LOAD // words
    row = triton.next_power_of_2(channels)
    return {
        **dict(zip(("K", "N", "N_2", "N_3"), (channels, *widths), strict=True)),
        "BITS": bits,
        "BLOCK_SIZE": block_size,
        "ROW": row,
        "WORDS": words,
        "LANES": lanes,
        "AT_ONCE": min(_AT_ONCE, max(1, row // lanes)),
        "num_warps": _THREADS // 32,
    }


_norm_quantized_linear = forward_operation("norm_quantized_linear", forward, results, count=3)
