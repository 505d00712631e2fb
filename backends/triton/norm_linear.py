"""y = RMSNorm(x) W + b for a single row: what a step of generation spends most of its time on.

A program makes some columns of y from all of x, and reads its part of each weight once, in loads
that are all under way together. The norm's factor r is the same for the whole row, so it multiplies
the sums, r Σ x_k s_k W_kn, and the squares of x are summed in the same walk.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton._ahead import let_next_launch_begin, wait_for_launch_before
from keras_recurrent.backends.triton._framework import (
    forward_operation,
    overlap,
    refusal_of_steps,
    run,
)
from keras_recurrent.backends.triton._launch import Array, Launch, dtype_name
from keras_recurrent.backends.triton._math import gelu, silu

_GATES = (None, "silu", "gelu")
_TILE = {"BLOCK_N": 16, "num_warps": 8}
_BLOCK_K = {"bfloat16": 2048, "float32": 512}


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
    if x.shape[0] != 1:
        return f"is for a single row, got {x.shape[0]}: products of matrices are faster"
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
    """x: [1, K]; scale: [K]; kernels: [K, N] each. Returns a tuple of [1, N] in x's dtype."""
    tensors = x, scale, kernel, kernel_2, kernel_3, bias, bias_2, bias_3, residual
    epsilon = -1.0 if epsilon is None else float(epsilon)
    found = _norm_linear(*tensors, epsilon=epsilon, gate=_GATES.index(gate))
    count = 1 if gate else sum(k is not None for k in (kernel, kernel_2, kernel_3))
    return tuple(found[:count])


@triton.jit
def _weights(kernel, k, n, K: tl.constexpr, N: tl.constexpr):
    valid = (k < K)[:, None] & (n < N)[None, :]
    return tl.load(kernel + k[:, None] * N + n[None, :], valid, other=0.0)


@triton.jit
def _maps(
    x,
    scale,
    kernel,
    other,
    n,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The columns n of RMSNorm(x) W and, with PAIR, of the same with `other`."""
    total = tl.zeros((BLOCK_K, n.shape[0]), tl.float32)
    beside = tl.zeros((BLOCK_K, n.shape[0]), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        k = i * BLOCK_K + tl.arange(0, BLOCK_K)
        weight = _weights(kernel, k, n, K, N)
        weight_2 = weight
        if PAIR:
            weight_2 = _weights(other, k, n, K, N)
        factor = 1.0
        if scale is not None:
            factor = tl.load(scale + k, k < K, other=0.0).to(tl.float32)
        if AHEAD and i == 0:
            wait_for_launch_before()
        value = tl.load(x + k, k < K, other=0.0).to(tl.float32)
        squares += value * value
        value = (value * factor)[:, None]
        total += value * weight.to(tl.float32)
        if PAIR:
            beside += value * weight_2.to(tl.float32)
    total, beside = tl.sum(total, 0), tl.sum(beside, 0)
    if NORM:
        z = tl.sum(squares, 0) / K + epsilon
        r = tl.where(z == 0, 0.0, tl.div_rn(1.0, tl.sqrt_rn(tl.where(z == 0, 1.0, z))))
        total *= r
        beside *= r
    return total, beside


@triton.jit
def _further_map(
    x,
    scale,
    kernel,
    bias,
    y,
    n,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):
    total, _ = _maps(x, scale, kernel, None, n, epsilon, K, N, NORM, False, BLOCK_K, AHEAD)
    if bias is not None:
        total += tl.load(bias + n, n < N, other=0.0).to(tl.float32)
    tl.store(y + n, total, n < N)


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
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    N_2: tl.constexpr,
    N_3: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if AHEAD:
        let_next_launch_begin()
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES_2: tl.constexpr = 0 if GATE else (N_2 + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    if tile < TILES:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = n < N
        total, beside = _maps(
            x, scale, kernel, kernel_2, n, epsilon, K, N, NORM, GATE != 0, BLOCK_K, AHEAD
        )
        if bias is not None:
            total += tl.load(bias + n, valid, other=0.0).to(tl.float32)
        if GATE:
            if bias_2 is not None:
                beside += tl.load(bias_2 + n, valid, other=0.0).to(tl.float32)
            total = (silu(total) if GATE == 1 else gelu(total)) * beside
        if residual is not None:
            total += tl.load(residual + n, valid, other=0.0).to(tl.float32)
        tl.store(y + n, total, valid)
    # Two conditions each: the compiler knows the first.
    if kernel_2 is not None and GATE == 0:  # noqa: SIM102
        if tile >= TILES and tile < TILES + TILES_2:
            n = (tile - TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
            _further_map(x, scale, kernel_2, bias_2, y_2, n, epsilon, K, N_2, NORM, BLOCK_K, AHEAD)
    if kernel_3 is not None:  # noqa: SIM102
        if tile >= TILES + TILES_2:
            n = (tile - TILES - TILES_2) * BLOCK_N + tl.arange(0, BLOCK_N)
            _further_map(x, scale, kernel_3, bias_3, y_3, n, epsilon, K, N_3, NORM, BLOCK_K, AHEAD)


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
    channels = x.shape[1]
    widths = [0 if w is None else w.shape[1] for w in (kernel, kernel_2, kernel_3)]
    columns = [widths[0], 0 if gate else widths[1], widths[2]]
    programs = sum(triton.cdiv(n, _TILE["BLOCK_N"]) for n in columns)
    options = dict(zip(("K", "N", "N_2", "N_3"), (channels, *widths), strict=True))
    options |= {"NORM": epsilon >= 0, "GATE": gate, **_TILE, **overlap(x)}
    largest = _BLOCK_K[dtype_name(kernel)]
    options["BLOCK_K"] = min(largest, triton.next_power_of_2(max(16, channels)))
    return run(Launch(_kernel, programs, tensors, outputs, (epsilon,), options))


_norm_linear = forward_operation("norm_linear", forward, results, count=3)
