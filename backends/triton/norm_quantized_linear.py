"""y = RMSNorm(x) W + b for one row, where W is quantized: see `norm_linear`.

One launch makes integers of the normalized row, so that this is done once. Programs of a second one
make some columns of y each, from all channels, and read their part of each weight once. With a
gate, a third follows.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.constants import SMALLEST_BLOCK_OF_SCALES
from keras_recurrent.backends.triton._ahead import let_next_launch_begin
from keras_recurrent.backends.triton._framework import (
    aligned,
    forward_operation,
    overlap,
    refusal_of_steps,
    run,
)
from keras_recurrent.backends.triton._launch import Array, Launch, dtype_name
from keras_recurrent.backends.triton._quantized_products import CHANNELS_AT_ONCE, of_one_row
from keras_recurrent.backends.triton._quantized_row import row_kernel
from keras_recurrent.backends.triton.norm_linear import gate_of_one_row

_GATES = (None, "silu", "gelu")
_MAX_WIDTH = 32768  # the registers of one program hold a row
_THREADS = 256
# How many threads read neighboring bytes of a channel, 16 each: as many as leave enough programs
# for all multiprocessors of a large GPU.
_ACROSS = (8, 4, 2, 1)
_PROGRAMS = 132
_MOST_STEPS = 4  # of a program, each as long as its code


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
def _kernel(
    row,
    unit,
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
    K: tl.constexpr,
    N: tl.constexpr,
    N_2: tl.constexpr,
    N_3: tl.constexpr,
    PADDED: tl.constexpr,
    LIMBS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    ACROSS: tl.constexpr,
    VECTORS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    COLUMNS: tl.constexpr = ACROSS * 128 // BITS
    TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    TILES_2: tl.constexpr = TILES + (N_2 + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0)
    if AHEAD:
        let_next_launch_begin()
    # Which of the maps: one code for all, of which the compiler knows the columns if all are alike.
    first, columns = 0, N
    second, third = tile >= TILES, tile >= TILES_2
    if kernel_2 is not None:  # noqa: SIM102
        if second:
            kernel, kernel_scale, y = kernel_2, kernel_scale_2, y_2
            first, columns = TILES, N_2
            if BLOCK_SIZE:
                kernel_zero = kernel_zero_2
    if kernel_3 is not None:  # noqa: SIM102
        if third:
            kernel, kernel_scale, y = kernel_3, kernel_scale_3, y_3
            first, columns = TILES_2, N_3
            if BLOCK_SIZE:
                kernel_zero = kernel_zero_3
    total = of_one_row(
        *(row, kernel, kernel_scale, kernel_zero, tile - first, columns),
        *(K, PADDED, LIMBS, BITS, BLOCK_SIZE, LANES, ACROSS, VECTORS, AHEAD),
    )
    n = (tile - first) * COLUMNS + tl.arange(0, COLUMNS)
    valid = n < columns
    factor = tl.load(unit)
    if BLOCK_SIZE == 0:
        factor /= tl.load(kernel_scale + n, valid, other=1.0).to(tl.float32)
    total *= factor
    if bias is not None:
        total += tl.load(bias + n, valid & (tile < TILES), other=0.0).to(tl.float32)
    if bias_2 is not None:
        total += tl.load(bias_2 + n, valid & second & (tile < TILES_2), other=0.0).to(tl.float32)
    if bias_3 is not None:
        total += tl.load(bias_3 + n, valid & third, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + n, valid, other=0.0).to(tl.float32)
    tl.store(y + n, total, valid)


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
    weights = kernel, kernel_2, kernel_3, *scales, kernel_zero, kernel_zero_2, kernel_zero_3
    channels, short = x.shape[1], dtype_name(x) == "bfloat16"
    widths = tuple(0 if s is None else s.shape[-1] for s in scales)
    limbs = 1 if quantized else 2 if short else 3
    options = tile(channels, widths, bits, block_size) | {
        "LIMBS": limbs,
        "VECTORS": has_vectors(widths, bits, block_size, kernel_scale) and aligned(*weights),
        **overlap(x),
    }
    padded = options["PADDED"]
    row = Array((limbs, padded), "int8"), Array((1,), "float32")
    of_row = row_options(channels, padded) | {
        "NORM": epsilon >= 0,
        "LIMBS": limbs,
        "QUANTIZED": quantized,
        "SHORT": short,
        **overlap(x),
    }
    given = run(Launch(row_kernel, 1, (x, scale), row, (epsilon,), of_row))
    # With a gate, each map is written as it was summed up.
    outputs = _rows(x, scales, "float32" if gate else dtype_name(x))
    inputs = *given, *weights, bias, bias_2, bias_3, None if gate else residual
    programs = sum(triton.cdiv(n, options["ACROSS"] * 128 // bits) for n in widths)
    found = run(Launch(_kernel, programs, inputs, outputs, (), options))
    if not gate:
        return found
    first, second, _ = found
    (output,) = _rows(x, scales[:1], dtype_name(x))
    return gate_of_one_row(x, first, second, residual, output, gate), None, None


def row_options(channels, padded):
    """The constants of the launch that makes integers of a row."""
    row = triton.next_power_of_2(max(channels, padded))
    return {"K": channels, "ROW": row, "PADDED": padded, "num_warps": 32 if row > 16384 else 16}


def has_vectors(widths, bits, block_size, kernel_scale):
    """Whether 16 bytes hold columns of one channel, and scales of blocks, in bfloat16, as well."""
    whole = all(n * bits % 128 == 0 for n in widths)
    return whole and (not block_size or dtype_name(kernel_scale) == "bfloat16")


def tile(channels, widths, bits, block_size):
    """The constants of a program, for rows of so many channels and maps of so many columns."""

    def programs(across):
        return sum(triton.cdiv(n, across * 128 // bits) for n in widths)

    def span(across):
        return _THREADS // across * CHANNELS_AT_ONCE

    # Of those that leave no thread without channels, and take few steps.
    busy = [n for n in _ACROSS if span(n) <= channels] or list(_ACROSS[:1])
    busy = [n for n in busy if triton.cdiv(channels, span(n)) <= _MOST_STEPS] or busy[-1:]
    across = next((n for n in busy if programs(n) >= _PROGRAMS), busy[-1])
    return {
        **dict(zip(("K", "N", "N_2", "N_3"), (channels, *widths), strict=True)),
        "PADDED": triton.cdiv(channels, span(across)) * span(across),
        "BITS": bits,
        "BLOCK_SIZE": block_size,
        "LANES": _THREADS // across,
        "ACROSS": across,
        "num_warps": _THREADS // 32,
    }


_norm_quantized_linear = forward_operation("norm_quantized_linear", forward, results, count=3)
