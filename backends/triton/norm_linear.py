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
from ._decoding.norm_linear_tiles import is_split, squares_options, tile_options
from ._runtime.framework import (
    compute_capability,
    forward_operation,
    matrix_product,
    pdl_options,
    run,
    step_unsupported_reason,
)
from ._runtime.launch import Array, Launch, cdiv, dtype_name, like

_GATES = (None, "silu", "gelu")
_BLOCK = ROW_SQUARES_GROUP  # numbers of a program that applies a gate or adds partial sums


def unsupported(
    x,
    scale,
    kernel,
    kernel_2=None,
    kernel_3=None,
    kernel_4=None,
    bias=None,
    bias_2=None,
    bias_3=None,
    bias_4=None,
    residual=None,
    squares=None,
    next_scale=None,
    epsilon=None,
    gate=None,
    output_scale=None,
) -> str | None:
    """Reason why this implementation cannot take these arguments, or None."""
    if next_scale is not None and (kernel_2 is not None if gate is None else kernel_3 is None):
        return "takes `next_scale` with a single product, or with a third one after a gate"
    kernels = [k for k in (kernel, kernel_2, kernel_3, kernel_4) if k is not None]
    dtypes = {dtype_name(t) for t in (x, *kernels)}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        return f"needs `x` and kernels all in float32 or all in bfloat16, got {sorted(dtypes)}"
    return step_unsupported_reason(
        x, scale, *kernels, bias, bias_2, bias_3, bias_4, residual, squares, next_scale
    )


def norm_linear(
    x,
    scale,
    kernel,
    kernel_2=None,
    kernel_3=None,
    kernel_4=None,
    bias=None,
    bias_2=None,
    bias_3=None,
    bias_4=None,
    residual=None,
    squares=None,
    next_scale=None,
    epsilon=None,
    gate=None,
    output_scale=None,
):
    """x: [B, K]; scale: [K]; kernels: [K, N] each. Returns a tuple of [B, N] in x's dtype.

    With `next_scale`, [N], it ends with y * next_scale and sums of squares of y, [B, U].
    """
    kernels, biases = (kernel, kernel_2, kernel_3, kernel_4), (bias, bias_2, bias_3, bias_4)
    count = 1 if gate else sum(k is not None for k in kernels)
    outputs = _norm_linear(
        *(x, scale, *kernels, *biases, residual, squares, next_scale),
        epsilon=-1.0 if epsilon is None else float(epsilon),
        gate=_GATES.index(gate),
        output_scale=1.0 if output_scale is None else float(output_scale),
    )
    return tuple(outputs[:count]) + (() if next_scale is None else tuple(outputs[4:]))


def results(x, scale, kernel, kernel_2, kernel_3, kernel_4, *others, gate: int, **_):
    def output(weight):
        if weight is None:
            return None
        return Array((x.shape[0], weight.shape[1]), dtype_name(x))

    weights = kernel, kernel_2, kernel_3, kernel_4
    if gate:
        weights = (kernel if kernel_3 is None else kernel_3), None, None, None
    scaled = squares = None
    if others[-1] is not None:
        scaled = output(weights[0])
        squares = Array((x.shape[0], cdiv(scaled.shape[1], ROW_SQUARES_GROUP)), "float32")
    return *map(output, weights), scaled, squares


def forward(
    x,
    scale,
    kernel,
    kernel_2,
    kernel_3,
    kernel_4,
    bias,
    bias_2,
    bias_3,
    bias_4,
    residual,
    squares,
    next_scale,
    *,
    epsilon: float,
    gate: int,
    output_scale: float,
):
    tensors = x, scale, kernel, kernel_2, kernel_3, kernel_4, bias, bias_2, bias_3, bias_4
    outputs = results(*tensors, next_scale, gate=gate)
    rows = x.shape[0]
    ends = {"residual": residual, "next_scale": next_scale, "output_scale": output_scale}
    if rows > max_fused_rows(dtype_name(x)):
        return _many_rows(tensors, outputs, squares=squares, epsilon=epsilon, gate=gate, **ends)
    if gate and kernel_3 is not None:
        gate_tensors = x, scale, kernel, kernel_2, None, None, bias, bias_2, None, None
        down_arguments = None, kernel_3, None, None, None, bias_3, None, None, None
        if rows == 1 and is_split(1, *kernel_3.shape):
            gate_total, up_total = _gate_and_up(gate_tensors, squares, epsilon)
            return _launch((gate_total, *down_arguments), outputs, gate=gate, x_2=up_total, **ends)
        y, *_ = forward(
            *(*gate_tensors, None, squares, None), epsilon=epsilon, gate=gate, output_scale=1.0
        )
        return _launch((y, *down_arguments), outputs, **ends)
    if rows == 1 and gate:
        totals = _gate_and_up(tensors, squares, epsilon)
        y = _gate(*totals, outputs[0], gate, residual=residual, output_scale=output_scale)
        return y, *[None] * 5
    if rows > 1 and squares is None and epsilon >= 0:
        (x,) = rms_norm.forward(x, scale, epsilon=epsilon)
        tensors, epsilon = (x, None, *tensors[2:]), -1.0
    return _launch(tensors, outputs, squares=squares, epsilon=epsilon, gate=gate, **ends)


def _gate_and_up(tensors, squares, epsilon):
    """The gate and up projections of one row, in float32, before the gate is applied."""
    whole = Array((1, tensors[2].shape[1]), "float32")
    outputs = whole, whole, *[None] * 4
    return _launch(tensors, outputs, squares=squares, epsilon=epsilon)[:2]


def _many_rows(tensors, outputs, *, squares, epsilon, gate, residual, next_scale, output_scale):
    """Products of the framework; a launch after each applies gate, norm's factor, bias and ends."""
    (x, scale), kernels, biases = tensors[:2], tensors[2:6], tensors[6:]
    norm = {"squares": squares, "epsilon": epsilon, "channels": x.shape[1]}
    ends = {"residual": residual, "output_scale": output_scale}
    if squares is None and epsilon >= 0:
        (x,) = rms_norm.forward(x, scale, epsilon=epsilon)
    if gate:
        totals = [matrix_product(x, kernel, "float32") for kernel in kernels[:2]]
        if kernels[2] is None:
            return _gate(*totals, outputs[0], gate, *biases[:2], **norm, **ends), *[None] * 5
        x = _gate(*totals, like(totals[0]).astype(dtype_name(x)), gate, *biases[:2], **norm)
        kernels, biases, norm = kernels[2:], biases[2:], {}
    elif (
        squares is not None
        and kernels[1] is not None
        and any(k is not None and b is None for k, b in zip(kernels, biases, strict=True))
    ):
        # One launch before the products, instead of one after each.
        (x, *_), norm = _add_parts(x, (like(x), None, None), **norm), {}
    found = [None] * 6
    for i, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
        if kernel is None:
            continue
        added = norm.get("squares"), bias, next_scale, ends["residual"]
        if output_scale == 1.0 and all(tensor is None for tensor in added):
            found[i] = matrix_product(x, kernel, dtype_name(x))
            continue
        total = matrix_product(x, kernel, "float32")
        results = outputs[i], *outputs[4:]
        found[i], *found[4:] = _add_parts(total, results, bias, next_scale, **norm, **ends)
        ends["residual"] = None  # which is added to the first output
    return found


def _gate(
    gate_total,
    up_total,
    output,
    gate,
    bias=None,
    bias_2=None,
    *,
    squares=None,
    residual=None,
    **ends,
):
    """activation(gate_total) * up_total, both in float32, after the norm's factor and biases."""
    arrays = gate_total, up_total, squares, bias, bias_2, residual
    return _finish(gate_kernel, arrays, (output,), squares, GATE=gate, **ends)[0]


def _add_parts(
    sums, outputs, bias=None, next_scale=None, *, squares=None, residual=None, parts=1, **ends
):
    """Adds partial sums [parts, B, N], and applies the norm's factor, bias, scale and residual.

    outputs: the output, and with `next_scale` the next norm's input and sums of squares.
    """
    arrays = sums, squares, bias, residual, next_scale
    return _finish(sum_kernel, arrays, outputs, squares, PARTS=parts, **ends)


def _finish(
    kernel, arrays, outputs, squares, *, epsilon=-1.0, channels=1, output_scale=1.0, **constants
):
    """Runs a kernel that follows products, with a program for each block of columns of a row."""
    rows, columns = outputs[0].shape
    options = {"K": channels, "N": columns, "OUTPUT_SCALE": output_scale, "BLOCK": _BLOCK}
    options |= {**constants, **squares_options(squares), **pdl_options(arrays[0])}
    programs = rows * cdiv(columns, _BLOCK)
    return run(Launch(kernel, programs, arrays, outputs, (rows, epsilon), options))


def _launch(
    tensors,
    outputs,
    *,
    residual=None,
    squares=None,
    next_scale=None,
    epsilon=-1.0,
    gate=0,
    output_scale=1.0,
    x_2=None,
):
    """Runs the projections of x.

    With a gate, several rows take it between two projections; one row takes it between x and x_2,
    before a single projection. A launch that adds partial sums also prepares the norm that follows.
    """
    x, _, kernel, kernel_2, kernel_3, kernel_4, bias, *_ = tensors
    rows, channels = x.shape
    widths = [0 if w is None else w.shape[1] for w in (kernel, kernel_2, kernel_3, kernel_4)]
    norm = epsilon >= 0 and squares is None
    # One row with a norm is not split: another launch would take longer.
    parts = kernel_2 is None and not norm and (rows > 1 or squares is None)
    sizes = rows, channels, sum(widths), dtype_name(kernel)
    options = tile_options(*sizes, gate, parts, compute_capability(x))
    columns = [widths[0], 0 if gate else widths[1], *widths[2:]]
    programs = sum(cdiv(n, options["BLOCK_N"]) for n in columns)
    options |= dict(zip(("K", "N", "N_2", "N_3", "N_4"), (channels, *widths), strict=True))
    options |= {"NORM": norm, "GATE": gate, "SHORT": dtype_name(kernel) == "bfloat16"}
    options |= {"OUTPUT_SCALE": output_scale, **squares_options(squares), **pdl_options(x)}
    count = cdiv(channels, options["LENGTH"])
    if count == 1 and next_scale is None:
        inputs, outputs = (x, x_2, squares, *tensors[1:], residual), outputs[:4]
        outputs = run(Launch(columns_kernel, programs, inputs, outputs, (rows, epsilon), options))
        return *outputs, None, None
    inputs = x, x_2, None, tensors[1], kernel, *[None] * 8
    sums = Array((count, rows, widths[0]), "float32"), None, None, None
    options["OUTPUT_SCALE"] = 1.0
    sums, *_ = run(Launch(columns_kernel, programs * count, inputs, sums, (rows, epsilon), options))
    norm = {"squares": squares, "epsilon": epsilon, "channels": channels, "parts": count}
    ends = {"residual": residual, "output_scale": output_scale}
    y, *prepared = _add_parts(sums, (outputs[0], *outputs[4:]), bias, next_scale, **norm, **ends)
    return y, None, None, None, *prepared


_norm_linear = forward_operation("norm_linear", forward, results, count=6)
