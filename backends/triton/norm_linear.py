"""y = RMSNorm(x) W + b: norm and linear layers, which take most of a decoding step's time.

Of up to 16 rows, or 128 in bfloat16, a program computes some columns of y from all channels of x.
Where there are few columns, it takes some of the channels, and another launch adds these partial
sums.

- A single row is normalized in the same kernel. The gate of a gated MLP is applied by the down
  projection where its programs read some channels each, otherwise by a separate launch: programs
  that read two weights were slower by a third.
- Several rows are normalized by a launch before. They are multiplied on tensor cores, and the gate
  of a gated MLP is applied in the same kernel: with norms inside that kernel a step took twice as
  long.
- With `squares`, the launch that computed x has multiplied it by the norm's weight, and the norm's
  factor multiplies the products: no launch reads x only to normalize it. With `next_scale`, the
  launch that adds partial sums prepares the norm that follows in this way.

Products of more rows are those of the framework; one launch after a product does the rest.
"""

from ..constants import ROW_SQUARES_GROUP, max_fused_rows
from . import rms_norm
from ._decoding.norm_linear_kernels import columns_kernel, gate_kernel, sum_kernel
from ._decoding.norm_linear_tiles import (
    Product,
    is_split,
    num_squares,
    tile_options,
    tile_starts,
)
from ._device.common import Constants
from ._runtime.framework import (
    compute_capability,
    decoding_step,
    matrix_product,
    pdl_options,
    run,
    step_unsupported_reason,
)
from ._runtime.launch import Array, Launch, cdiv, dtype_name, like

_GATES = (None, "silu", "gelu")
_UNCHANGED = False, 1.0  # of outputs: True for a squared ReLU, and a factor
_BLOCK = ROW_SQUARES_GROUP  # numbers of a program that applies a gate or adds partial sums


def unsupported(x, kernels, next_scale=None, gate=None, **others) -> str | None:
    if next_scale is not None and len(kernels) != (1 if gate is None else 3):
        return "takes `next_scale` with a single product, or with a third one after a gate"
    dtypes = {dtype_name(t) for t in (x, *kernels)}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        return f"needs `x` and kernels all in float32 or all in bfloat16, got {sorted(dtypes)}"
    return step_unsupported_reason(x, kernels, next_scale, **others)


def results(x, kernels, biases, scale, residual, squares, next_scale, *, gate, **_options):
    if gate:
        kernels = kernels[2:] or kernels[:1]
    outputs = [Array((x.shape[0], kernel.shape[1]), dtype_name(x)) for kernel in kernels]
    if next_scale is None:
        return outputs
    (y,) = outputs
    return [y, y, Array((x.shape[0], cdiv(y.shape[1], ROW_SQUARES_GROUP)), "float32")]


@decoding_step(unsupported, results)
def norm_linear(
    x,
    kernels: list,
    biases: list,
    scale=None,
    residual=None,
    squares=None,
    next_scale=None,
    epsilon: float | None = None,
    gate: str | None = None,
    activation: str | None = None,
    output_scale: float | None = None,
):
    outputs = results(x, kernels, biases, scale, residual, squares, next_scale, gate=gate)
    rows, gate = x.shape[0], _GATES.index(gate)
    norm = {"scale": scale, "squares": squares, "epsilon": -1.0 if epsilon is None else epsilon}
    ends = {"residual": residual, "next_scale": next_scale}
    ends["change"] = activation is not None, 1.0 if output_scale is None else output_scale
    if rows > max_fused_rows(dtype_name(x)):
        return _many_rows(x, kernels, biases, outputs, gate, norm, **ends)
    if not gate or len(kernels) == 2:
        return _few_rows(x, kernels, biases, outputs, gate, norm, **ends)
    projections, down = (kernels[:2], biases[:2]), (kernels[2:], biases[2:])
    if rows == 1 and is_split(1, *kernels[2].shape):
        gate_total, up_total = _gate_and_up(x, *projections, **norm)
        return _launch(gate_total, *down, outputs, gate=gate, x_2=up_total, **ends)
    gated = Array((rows, kernels[0].shape[1]), dtype_name(x))
    (y,) = _few_rows(x, *projections, [gated], gate, norm)
    return _launch(y, *down, outputs, **ends)


def _few_rows(
    x, kernels, biases, outputs, gate, norm, residual=None, next_scale=None, change=_UNCHANGED
):
    """Products that are fused with their norm or gate, by one or two launches."""
    ends = {"residual": residual, "change": change}
    if x.shape[0] == 1 and gate:
        return _gate(_gate_and_up(x, kernels, biases, **norm), outputs[0], gate, **ends)
    if x.shape[0] > 1 and norm["squares"] is None and norm["epsilon"] >= 0:
        (x,) = rms_norm.forward(x, norm["scale"], epsilon=norm["epsilon"])
        norm = {}
    return _launch(x, kernels, biases, outputs, gate=gate, next_scale=next_scale, **norm, **ends)


def _gate_and_up(x, kernels, biases, **norm):
    """The gate and up projections of one row, in float32, before the gate is applied."""
    whole = Array((1, kernels[0].shape[1]), "float32")
    return _launch(x, kernels, biases, (whole, whole), **norm)


def _many_rows(
    x, kernels, biases, outputs, gate, norm, residual=None, next_scale=None, change=_UNCHANGED
):
    """Products of the framework; a launch after each applies gate, norm's factor, bias and ends."""
    scale, squares, epsilon = norm["scale"], norm["squares"], norm["epsilon"]
    norm = {"squares": squares, "epsilon": epsilon, "channels": x.shape[1]}
    ends = {"residual": residual, "change": change}
    if squares is None and epsilon >= 0:
        (x,) = rms_norm.forward(x, scale, epsilon=epsilon)
    if gate:
        totals = [matrix_product(x, kernel, "float32") for kernel in kernels[:2]]
        if len(kernels) == 2:
            return _gate(totals, outputs[0], gate, biases, **norm, **ends)
        gated = like(totals[0]).astype(dtype_name(x))
        (x,) = _gate(totals, gated, gate, biases[:2], **norm)
        kernels, biases, norm = kernels[2:], biases[2:], {}
    elif squares is not None and len(kernels) > 1 and any(bias is None for bias in biases):
        # One launch before the products, instead of one after each.
        (x,), norm = _add_parts(x, (like(x),), **norm), {}
    found = []
    for i, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
        added = norm.get("squares"), bias, next_scale, ends["residual"]
        if change == _UNCHANGED and all(tensor is None for tensor in added):
            found.append(matrix_product(x, kernel, dtype_name(x)))
            continue
        total = matrix_product(x, kernel, "float32")
        results = outputs[i : i + 1] if next_scale is None else outputs
        found += _add_parts(total, results, bias, next_scale, **norm, **ends)
        ends["residual"] = None  # which is added to the first output
    return found


def _gate(totals, output, gate, biases=(None, None), *, squares=None, residual=None, **ends):
    """activation(gate) * up, from both totals in float32, after the norm's factor and biases."""
    arrays = *totals, squares, *biases, residual
    return _finish(gate_kernel, arrays, (output,), squares, GATE=gate, **ends)


def _add_parts(
    sums, outputs, bias=None, next_scale=None, *, squares=None, residual=None, parts=1, **ends
):
    """Adds partial sums [parts, B, N], and applies the norm's factor, bias, scale and residual.

    outputs: the output, and with `next_scale` the next norm's input and sums of squares.
    """
    arrays = sums, squares, bias, residual, next_scale
    count, outputs = len(outputs), (*outputs, None, None)[:3]
    return _finish(sum_kernel, arrays, outputs, squares, PARTS=parts, **ends)[:count]


def _finish(
    kernel, arrays, outputs, squares, *, epsilon=-1.0, channels=1, change=_UNCHANGED, **constants
):
    """Runs a kernel that follows products, with a program for each block of columns of a row."""
    rows, columns = outputs[0].shape
    options = {"K": channels, "N": columns, "OUTPUT": change, "BLOCK": _BLOCK}
    options |= {**constants, "NUM_SQUARES": num_squares(squares), **pdl_options(arrays[0])}
    programs = rows * cdiv(columns, _BLOCK)
    return run(Launch(kernel, programs, arrays, outputs, (rows, epsilon), options))


def _launch(
    x,
    kernels,
    biases,
    outputs,
    *,
    scale=None,
    residual=None,
    squares=None,
    next_scale=None,
    epsilon=-1.0,
    gate=0,
    change=_UNCHANGED,
    x_2=None,
):
    """Runs the projections of x.

    With a gate, several rows take it between two projections; one row takes it between x and x_2,
    before a single projection. A launch that adds partial sums also prepares the norm that follows.
    """
    rows, channels = x.shape
    widths, dtype = tuple(kernel.shape[1] for kernel in kernels), dtype_name(kernels[0])
    norm = epsilon >= 0 and squares is None
    # One row with a norm is not split: another launch would take longer.
    is_single = len(kernels) == 1 and not norm and (rows > 1 or squares is None)
    sizes = rows, channels, sum(widths), dtype
    tile = tile_options(*sizes, gate, is_single, compute_capability(x))
    product = Product(
        **{"K": channels, "NORM": norm, "GATE": gate, "NUM_SQUARES": num_squares(squares)},
        **{"SHORT": dtype == "bfloat16", **tile},
    )
    tiles = tile_starts(widths[:1] if gate else widths, product.BLOCK_N)
    options = {"WIDTHS": widths, "TILE_STARTS": tiles, "PRODUCT": Constants(product)}
    options |= {**product.launch_options, **pdl_options(x)}
    numbers, parts = (rows, epsilon), cdiv(channels, product.LENGTH)
    if parts == 1 and next_scale is None:
        inputs = x, x_2, squares, scale, tuple(kernels), tuple(biases), residual
        options["OUTPUT"] = change
        launch = Launch(columns_kernel, tiles[-1], inputs, (tuple(outputs),), numbers, options)
        return run(launch)[0]
    inputs = x, x_2, None, scale, tuple(kernels), (None,), None
    sums = Array((parts, rows, widths[0]), "float32")
    options["OUTPUT"] = _UNCHANGED
    launch = Launch(columns_kernel, tiles[-1] * parts, inputs, ((sums,),), numbers, options)
    ((sums,),) = run(launch)
    norm = {"squares": squares, "epsilon": epsilon, "channels": channels, "parts": parts}
    ends = {"residual": residual, "change": change}
    return _add_parts(sums, outputs, biases[0], next_scale, **norm, **ends)
