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
from ._decoding.norm_linear_tiles import num_squares, tile_starts
from ._device.common import IN_INTERPRETER, Constants
from ._device.pdl import launch_dependents
from ._quantized.quantized_columns import column_indices
from ._quantized.quantized_interpreted import project_row as interpreted_project_row
from ._quantized.quantized_products import project_row
from ._quantized.quantized_tiles import choose_tile
from ._runtime.framework import (
    are_aligned,
    decoding_step,
    pdl_options,
    run,
    step_unsupported_reason,
)
from ._runtime.launch import Array, Launch, dtype_name

_GATES = (None, "silu", "gelu")
_MAX_WIDTH = 32768  # the registers of one program hold a row


def unsupported(
    x, kernels, kernel_scales, kernel_zeros, bits=8, block_size=None, **others
) -> str | None:
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
    return step_unsupported_reason(x, kernel_scales, **others)


@triton.jit
def _add_bias(total, bias, n, valid):
    return total if bias is None else total + tl.load(bias + n, valid, other=0.0).to(tl.float32)


@triton.jit
def _load_offsets(biases, n, valid, is_after, GATE: tl.constexpr):
    """The bias of columns n of this tile's projection; with a gate, of both projections."""
    if GATE:
        offsets = _add_bias(0.0, biases[0], n, valid), _add_bias(0.0, biases[1], n, valid)
    else:
        offset = 0.0
        for i in tl.static_range(len(is_after)):
            inside = valid
            if i > 0:
                inside &= is_after[i - 1]
            # A third or fourth projection that is the last one has all remaining tiles.
            if i < 2 or i + 1 < len(is_after):
                inside &= is_after[i] == 0
            offset = _add_bias(offset, biases[i], n, inside)
        offsets = (offset,)
    return offsets


@triton.jit
def _kernel(
    x,
    scale,
    kernels,
    kernel_scales,
    kernel_zeros,
    biases,
    residual,
    squares,
    outputs,
    epsilon,
    WIDTHS: tl.constexpr,
    TILE_STARTS: tl.constexpr,
    PRODUCT: tl.constexpr,
    GATE: tl.constexpr,
    OUTPUT_SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """kernels, ..., outputs: tuples of one to four pointers; see `columns_kernel`."""
    tile = tl.program_id(0)
    launch_dependents(PDL)
    is_after = ()  # booleans: the tile comes after those of a projection
    for i in tl.static_range(len(outputs)):
        is_after = is_after + (tile >= TILE_STARTS[i + 1],)
    # One code path serves all projections; the compiler knows the columns if they are equal.
    kernel, scales = kernels[0], kernel_scales[0]
    if PRODUCT.BLOCK_SIZE:
        zeros = kernel_zeros[0]
    y, first, columns = outputs[0], 0, WIDTHS[0]
    for i in tl.static_range(1, len(outputs)):
        if is_after[i - 1]:
            kernel, scales, y = kernels[i], kernel_scales[i], outputs[i]
            first, columns = TILE_STARTS[i], WIDTHS[i]
            if PRODUCT.BLOCK_SIZE:
                zeros = kernel_zeros[i]
    tile -= first
    if GATE == 0:
        kernels, kernel_scales = (kernel,), (scales,)
        kernel_zeros = (zeros,) if PRODUCT.BLOCK_SIZE else kernel_zeros[:1]
    if IN_INTERPRETER:
        n = (tile * PRODUCT.COLUMNS + tl.arange(0, PRODUCT.COLUMNS),)
    else:
        n = column_indices(tile, PRODUCT)
    # The previous launch does not write these, so their loads start before it has ended.
    divisors, offsets = (), ()
    for u in tl.static_range(len(n)):
        for i in tl.static_range(len(kernels)):
            divisor = 1.0  # where blocks have scales instead of columns
            if PRODUCT.BLOCK_SIZE == 0:
                divisor = tl.load(kernel_scales[i] + n[u], n[u] < columns, other=1.0)
                divisor = divisor.to(tl.float32)
            divisors = divisors + (divisor,)
        valid = n[u] < columns
        offsets = offsets + _load_offsets(biases, n[u], valid, is_after, GATE)
    weights = kernels, kernel_scales, kernel_zeros
    if IN_INTERPRETER:
        totals, unit, before = interpreted_project_row(
            x, scale, squares, weights, residual, n[0], columns, epsilon, PRODUCT
        )
    else:
        totals, unit, before = project_row(
            x, scale, squares, weights, residual, tile, n, columns, epsilon, PRODUCT, PDL
        )
    PROJECTIONS: tl.constexpr = len(kernels)
    for u in tl.static_range(len(n)):
        total = totals[u] * (unit / divisors[PROJECTIONS * u]) + offsets[PROJECTIONS * u]
        if GATE:
            up = totals[len(n) + u] * (unit / divisors[2 * u + 1]) + offsets[2 * u + 1]
            total = apply_gate(total, up, GATE)
        if OUTPUT_SCALE != 1.0:
            total *= OUTPUT_SCALE
        if residual is not None:
            total += before[u].to(tl.float32)
        tl.store(y + n[u], total, n[u] < columns)


def results(x, kernels, kernel_scales, *_, gate, **_options):
    """The output `Array` of each projection, or of the gated unit."""
    scales = kernel_scales[:1] if gate else kernel_scales
    return [Array((x.shape[0], scale.shape[-1]), dtype_name(x)) for scale in scales]


@decoding_step(unsupported, results)
def norm_quantized_linear(
    x,
    kernels: list,
    kernel_scales: list,
    kernel_zeros: list,
    biases: list,
    scale=None,
    residual=None,
    squares=None,
    epsilon: float | None = None,
    gate: str | None = None,
    output_scale: float | None = None,
    bits: int = 8,
    block_size: int | None = None,
    row_dtype: str | None = None,
):
    outputs = results(x, kernels, kernel_scales, gate=gate)
    block_size, quantized = block_size or 0, row_dtype is not None
    channels, short = x.shape[1], dtype_name(x) == "bfloat16"
    widths = tuple(s.shape[-1] for s in kernel_scales)
    limbs = 1 if quantized else 2 if short else 3
    product = choose_tile(
        *(channels, widths, bits, gate, limbs, block_size),
        NORM=epsilon is not None,
        NUM_SQUARES=num_squares(squares),
        QUANTIZED=quantized,
        VECTORS=(not block_size or dtype_name(kernel_scales[0]) == "bfloat16")
        and are_aligned(*kernels, *kernel_scales, *kernel_zeros),
        WHOLE=channels % 4 == 0
        and are_aligned(x, scale)
        and (scale is None or dtype_name(scale) in ("float32", "bfloat16")),
    )
    tiles = tile_starts(widths[: len(outputs)], product.COLUMNS)
    options = {"WIDTHS": widths, "TILE_STARTS": tiles, "PRODUCT": Constants(product)}
    options |= {"GATE": _GATES.index(gate), **product.launch_options, **pdl_options(x)}
    options["OUTPUT_SCALE"] = 1.0 if output_scale is None else output_scale
    lists = map(tuple, (kernels, kernel_scales, kernel_zeros, biases))
    inputs = x, scale, *lists, residual, squares
    launch = Launch(_kernel, tiles[-1], inputs, (tuple(outputs),), (epsilon or 0.0,), options)
    return run(launch)[0]
