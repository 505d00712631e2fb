"""y = RMSNorm(x) W + b for a few rows: norm and linear layers, most of a decoding step's time.

A program computes some columns of y from all channels of x. Where there are few columns, it takes
some of the channels, and another launch adds these partial sums.

- A single row is normalized in the same kernel. The gate of a gated MLP is applied by the down
  projection where its programs read some channels each, otherwise by a separate launch: programs
  that read two weights were slower by a third.
- Several rows are normalized by a launch before, multiplied on tensor cores, and gated in the same
  kernel: with norms inside that kernel a step took twice as long.
"""

import triton

from ..constants import MAX_FUSED_ROWS
from . import rms_norm
from ._decoding.norm_linear_kernels import columns_kernel, gate_kernel, sum_kernel
from ._decoding.norm_linear_tiles import is_split, tile_options
from ._runtime.framework import forward_operation, pdl_options, run, step_unsupported_reason
from ._runtime.launch import Array, Launch, dtype_name

_GATES = (None, "silu", "gelu")
_BLOCK = 256  # numbers of a program that applies a gate or adds partial sums


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
    """Reason why this implementation cannot take these arguments, or None."""
    if x.shape[0] > MAX_FUSED_ROWS:
        return (
            f"takes up to {MAX_FUSED_ROWS} rows, got {x.shape[0]}: for more, a matrix product "
            "is faster"
        )
    kernels = [k for k in (kernel, kernel_2, kernel_3) if k is not None]
    dtypes = {dtype_name(t) for t in (x, *kernels)}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        return f"needs `x` and kernels all in float32 or all in bfloat16, got {sorted(dtypes)}"
    return step_unsupported_reason(x, scale, *kernels, bias, bias_2, bias_3, residual)


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
    outputs = _norm_linear(*tensors, epsilon=epsilon, gate=_GATES.index(gate))
    count = 1 if gate else sum(k is not None for k in (kernel, kernel_2, kernel_3))
    return tuple(outputs[:count])


def results(x, scale, kernel, kernel_2, kernel_3, *_, gate: int, **__):
    def output(weight):
        return None if weight is None else Array((x.shape[0], weight.shape[1]), dtype_name(x))

    if gate:
        return output(kernel if kernel_3 is None else kernel_3), None, None
    return output(kernel), output(kernel_2), output(kernel_3)


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
    tensors = x, scale, kernel, kernel_2, kernel_3, bias, bias_2, bias_3
    outputs = results(*tensors, gate=gate)
    rows = x.shape[0]
    if gate and kernel_3 is not None:
        gate_tensors = x, scale, kernel, kernel_2, None, bias, bias_2, None
        down_arguments = None, kernel_3, None, None, bias_3, None, None
        if rows == 1 and is_split(1, *kernel_3.shape):
            gate_total, up_total = _gate_and_up(gate_tensors, epsilon)
            return _launch((gate_total, *down_arguments), residual, outputs, -1.0, gate, up_total)
        y, *_ = forward(*gate_tensors, None, epsilon=epsilon, gate=gate)
        return forward(y, *down_arguments, residual, epsilon=-1.0, gate=0)
    if rows == 1 and gate:
        gate_total, up_total = _gate_and_up(tensors, epsilon)
        return _gate_row(x, gate_total, up_total, residual, outputs[0], gate), None, None
    if rows > 1 and epsilon >= 0:
        (x,) = rms_norm.forward(x, scale, epsilon=epsilon)
        tensors, epsilon = (x, None, *tensors[2:]), -1.0
    return _launch(tensors, residual, outputs, epsilon, gate)


def _gate_and_up(tensors, epsilon):
    """The gate and up projections of one row, in float32, before the gate is applied."""
    whole = Array((1, tensors[2].shape[1]), "float32")
    return _launch(tensors, None, (whole, whole, None), epsilon, gate=0)[:2]


def _gate_row(x, gate_total, up_total, residual, output, gate):
    """Applies the gate to one row: activation(gate_total) * up_total, both in float32."""
    columns = output.shape[1]
    options = {"N": columns, "GATE": gate, "BLOCK": _BLOCK, **pdl_options(x)}
    programs = triton.cdiv(columns, _BLOCK)
    arrays = gate_total, up_total, residual
    return run(Launch(gate_kernel, programs, arrays, (output,), (), options))[0]


def _launch(tensors, residual, outputs, epsilon, gate, x_2=None):
    """Runs the projections of x.

    With a gate, several rows take it between two projections; one row takes it between x and x_2,
    before a single projection.
    """
    x, _, kernel, kernel_2, kernel_3, bias, *_ = tensors
    rows, channels = x.shape
    widths = [0 if w is None else w.shape[1] for w in (kernel, kernel_2, kernel_3)]
    parts = kernel_2 is None and epsilon < 0
    options = tile_options(rows, channels, sum(widths), dtype_name(kernel), gate, parts)
    columns = [widths[0], 0 if gate else widths[1], widths[2]]
    programs = sum(triton.cdiv(n, options["BLOCK_N"]) for n in columns)
    options |= dict(zip(("K", "N", "N_2", "N_3"), (channels, *widths), strict=True))
    options |= {"NORM": epsilon >= 0, "GATE": gate, "SHORT": dtype_name(kernel) == "bfloat16"}
    options |= pdl_options(x)
    count = triton.cdiv(channels, options["LENGTH"])
    if count == 1:
        inputs = x, x_2, *tensors[1:], residual
        return run(Launch(columns_kernel, programs, inputs, outputs, (rows, epsilon), options))
    inputs = x, x_2, None, kernel, *[None] * 6
    sums = Array((count, rows, widths[0]), "float32"), None, None
    sums, *_ = run(Launch(columns_kernel, programs * count, inputs, sums, (rows, epsilon), options))
    options = {"N": widths[0], "PARTS": count, "BLOCK": _BLOCK, **pdl_options(x)}
    programs = triton.cdiv(rows * widths[0], _BLOCK)
    inputs = sums, bias, residual
    numbers = (rows * widths[0],)
    return *run(Launch(sum_kernel, programs, inputs, outputs[:1], numbers, options)), None, None


_norm_linear = forward_operation("norm_linear", forward, results, count=3)
