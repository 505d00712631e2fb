"""y = RMSNorm(x) W + b for one row, with W quantized to 8 or 4 bits: see `norm_linear`.

A program quantizes the normalized row and computes some columns of y from all channels; with a
gate, these columns of both projections. It reads its tile of each weight once. This file has the
arguments, the launch, and the kernel's beginning and end: it chooses the projection, then applies
scales, bias, gates and residual. The product itself is spread over the files of `_quantized`:

- `quantized_tiles.py` chooses, on the host, how many columns and warps a program has, and in how
  many steps it goes through the channels;
- `quantized_weights.py` loads words of weights, their scales and zero points, before the previous
  launch has ended;
- `quantized_row.py` loads the row, normalizes it, and makes each number one to three bytes (limbs);
- `quantized_products.py` multiplies these bytes by the weights on tensor cores; its `project_row`
  calls the functions of the other files in order;
- `quantized_columns.py` defines which columns a thread has sums of, and adds the sums of threads;
- `quantized_interpreted.py` has a `project_row` for Triton's interpreter, which runs no PTX.
"""

import triton
import triton.language as tl

from ..constants import MIN_SCALE_BLOCK
from ._decoding.norm_linear_products import apply_gate
from ._decoding.norm_linear_tiles import padded, squares_options
from ._device.common import IN_INTERPRETER
from ._device.pdl import launch_dependents
from ._quantized import quantized_interpreted
from ._quantized.quantized_columns import column_indices
from ._quantized.quantized_products import project_row
from ._quantized.quantized_tiles import tile_options
from ._runtime.framework import (
    are_aligned,
    forward_operation,
    pdl_options,
    run,
    step_unsupported_reason,
)
from ._runtime.launch import Array, Launch, cdiv, dtype_name

_GATES = (None, "silu", "gelu")
_MAX_WIDTH = 32768  # the registers of one program hold a row
_interpreted_project_row = quantized_interpreted.project_row


def unsupported(
    x,
    kernels,
    kernel_scales,
    kernel_zeros,
    biases,
    scale=None,
    residual=None,
    squares=None,
    epsilon=None,
    gate=None,
    output_scale=None,
    bits=8,
    block_size=None,
    row_dtype=None,
) -> str | None:
    """Reason why this implementation cannot take these arguments, or None."""
    rows, channels = x.shape
    if rows != 1:
        return f"takes one row, got {rows}: for more, a matrix product is faster"
    if channels > _MAX_WIDTH:
        return f"takes rows of up to {_MAX_WIDTH} channels, got {channels}"
    if dtype_name(x) not in ("float32", "bfloat16"):
        return f"takes rows of float32 or bfloat16, got {dtype_name(x)}"
    least = MIN_SCALE_BLOCK
    if block_size is not None and (block_size < least or block_size & (block_size - 1)):
        return f"takes block sizes that are powers of 2, at least {least}, got {block_size}"
    odd = [s.shape[-1] for s in kernel_scales if s.shape[-1] * bits % 32]
    if odd:
        return f"needs multiples of {32 // bits} columns, one 32-bit word, got {odd[0]}"
    # On JAX, this check accepts float and integer dtypes alike.
    return step_unsupported_reason(x, *kernel_scales, *biases, scale, residual, squares)


def norm_quantized_linear(
    x,
    kernels,
    kernel_scales,
    kernel_zeros,
    biases,
    scale=None,
    residual=None,
    squares=None,
    epsilon=None,
    gate=None,
    output_scale=None,
    bits=8,
    block_size=None,
    row_dtype=None,
):
    """x: [1, K]; kernels: a list of [K, N] of int8, or int4 packed along N. Returns [1, N] each.

    `backends/reference/norm_quantized_linear.py` describes all arguments. Results have x's dtype.
    """
    outputs = _norm_quantized_linear(
        *(x, kernels, kernel_scales, kernel_zeros, biases, scale, residual, squares),
        epsilon=-1.0 if epsilon is None else float(epsilon),
        gate=_GATES.index(gate),
        output_scale=1.0 if output_scale is None else float(output_scale),
        bits=bits,
        block_size=block_size or 0,
        quantized=row_dtype is not None,
    )
    return tuple(outputs)


@triton.jit
def _load_divisors(kernel_scale, n, columns, BLOCK_SIZE: tl.constexpr):
    """Divisors of the sums of columns n: Keras's scales; 1 where blocks have scales instead."""
    if BLOCK_SIZE:
        scales = 1.0
    else:
        scales = tl.load(kernel_scale + n, n < columns, other=1.0).to(tl.float32)
    return scales


@triton.jit
def _add_bias(total, bias, n, valid):
    return total if bias is None else total + tl.load(bias + n, valid, other=0.0).to(tl.float32)


@triton.jit
def _kernel(
    x,
    scale,
    kernel,
    kernel_2,
    kernel_3,
    kernel_4,
    kernel_scale,
    kernel_scale_2,
    kernel_scale_3,
    kernel_scale_4,
    kernel_zero,
    kernel_zero_2,
    kernel_zero_3,
    kernel_zero_4,
    bias,
    bias_2,
    bias_3,
    bias_4,
    residual,
    squares,
    y,
    y_2,
    y_3,
    y_4,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    N_2: tl.constexpr,
    N_3: tl.constexpr,
    N_4: tl.constexpr,
    ROW: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LIMBS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WARPS: tl.constexpr,
    ACROSS: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
    DEPTH: tl.constexpr,
    VECTORS: tl.constexpr,
    WHOLE: tl.constexpr,
    OUTPUT_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    COLUMNS: tl.constexpr = ACROSS * WORDS * 32 // BITS
    TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    TILES_2: tl.constexpr = TILES + (N_2 + COLUMNS - 1) // COLUMNS
    TILES_3: tl.constexpr = TILES_2 + (N_3 + COLUMNS - 1) // COLUMNS
    tile = tl.program_id(0)
    if PDL:
        launch_dependents()
    # One code path serves all projections; the compiler knows the columns if they are equal.
    first, columns = 0, N
    second, third, fourth = tile >= TILES, tile >= TILES_2, tile >= TILES_3
    only_third = third
    if kernel_2 is not None and GATE == 0:  # noqa: SIM102
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
    if kernel_4 is not None:
        if fourth:
            kernel, kernel_scale, y = kernel_4, kernel_scale_4, y_4
            first, columns = TILES_3, N_4
            if BLOCK_SIZE:
                kernel_zero = kernel_zero_4
        only_third = third & (fourth == 0)
    tile -= first
    kernels, scales, zeros = (kernel,), (kernel_scale,), (kernel_zero,)
    if GATE:
        kernels, scales = (kernel, kernel_2), (kernel_scale, kernel_scale_2)
        zeros = (kernel_zero, kernel_zero_2)
    if IN_INTERPRETER:
        n = (tile * COLUMNS + tl.arange(0, COLUMNS),)
    else:
        n = column_indices(tile, BITS, ACROSS, WORDS)
    # The previous launch does not write these, so their loads start before it has ended.
    divisors, offsets = (), ()
    for u in tl.static_range(len(n)):
        for i in tl.static_range(len(kernels)):
            divisors = divisors + (_load_divisors(scales[i], n[u], columns, BLOCK_SIZE),)
        valid = n[u] < columns
        if GATE:
            offsets = offsets + (
                _add_bias(0.0, bias, n[u], valid),
                _add_bias(0.0, bias_2, n[u], valid),
            )
        else:
            offset = _add_bias(0.0, bias, n[u], valid & (second == 0))
            offset = _add_bias(offset, bias_2, n[u], valid & second & (third == 0))
            offset = _add_bias(offset, bias_3, n[u], valid & only_third)
            offsets = offsets + (_add_bias(offset, bias_4, n[u], valid & fourth),)
    if IN_INTERPRETER:
        totals, unit, before = _interpreted_project_row(
            *(x, scale, squares, kernels, scales, zeros, residual, n[0], columns, epsilon),
            *(K, NORM, NUM_SQUARES, BLOCK_S, LIMBS, QUANTIZED, BITS, BLOCK_SIZE, ROW),
        )
    else:
        totals, unit, before = project_row(
            *(x, scale, squares, kernels, scales, zeros, residual, tile, n, columns, epsilon),
            *(K, NORM, NUM_SQUARES, BLOCK_S, LIMBS, QUANTIZED, BITS, BLOCK_SIZE),
            *(WARPS, ACROSS, WORDS, STEPS, DEPTH, VECTORS, WHOLE, PDL),
        )
    PROJECTIONS: tl.constexpr = len(kernels)
    for u in tl.static_range(len(n)):
        total = totals[u] * (unit / divisors[PROJECTIONS * u]) + offsets[PROJECTIONS * u]
        if GATE:
            up = (
                totals[len(n) + u] * (unit / divisors[PROJECTIONS * u + 1])
                + offsets[PROJECTIONS * u + 1]
            )
            total = apply_gate(total, up, GATE)
        if OUTPUT_SCALE != 1.0:
            total *= OUTPUT_SCALE
        if residual is not None:
            total += before[u].to(tl.float32)
        tl.store(y + n[u], total, n[u] < columns)


def results(x, kernels, kernel_scales, *others, gate: int, **_):
    """The output `Array` of each projection, or of the gated unit."""
    scales = kernel_scales[:1] if gate else kernel_scales
    return [Array((x.shape[0], scale.shape[-1]), dtype_name(x)) for scale in scales]


def forward(
    x,
    kernels: list,
    kernel_scales: list,
    kernel_zeros: list,
    biases: list,
    scale,
    residual,
    squares,
    *,
    epsilon: float,
    gate: int,
    output_scale: float,
    bits: int,
    block_size: int,
    quantized: bool,
):
    outputs = results(x, kernels, kernel_scales, gate=gate)
    channels, short = x.shape[1], dtype_name(x) == "bfloat16"
    widths = [s.shape[-1] for s in kernel_scales]
    limbs = 1 if quantized else 2 if short else 3
    options = tile_options(channels, widths, bits, gate, limbs, block_size)
    options |= {"NORM": epsilon >= 0, "GATE": gate, "LIMBS": limbs, "QUANTIZED": quantized}
    options |= squares_options(squares)
    options |= {
        "BLOCK_SIZE": block_size,
        "VECTORS": vectors_usable(widths, bits, block_size, kernel_scales[0], options["WORDS"])
        and are_aligned(*kernels, *kernel_scales, *kernel_zeros),
        "WHOLE": channels % 4 == 0
        and are_aligned(x, scale)
        and (scale is None or dtype_name(scale) in ("float32", "bfloat16")),
        "OUTPUT_SCALE": output_scale,
        **pdl_options(x),
    }
    columns = options["ACROSS"] * options["WORDS"] * 32 // bits
    programs = sum(cdiv(n, columns) for n in (widths[:1] if gate else widths))
    lists = kernels, kernel_scales, kernel_zeros, biases
    inputs = x, scale, *(tensor for tensors in lists for tensor in padded(tensors))
    inputs = *inputs, residual, squares
    launch = Launch(_kernel, programs, inputs, padded(outputs), (epsilon,), options)
    return run(launch)[: len(outputs)]


def vectors_usable(widths, bits, block_size, kernel_scale, words):
    """Returns True if a thread may load its words, scales and zero points as vectors.

    The words of a thread must belong to one channel, and scales of blocks must be bfloat16.
    """
    whole = all(n * bits % (32 * words) == 0 for n in widths)
    return whole and (not block_size or dtype_name(kernel_scale) == "bfloat16")


_norm_quantized_linear = forward_operation("norm_quantized_linear", forward, results)
