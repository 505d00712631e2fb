"""RMSNorm(x) W for one row, and x W for a few rows: see `norm_linear`.

The norm's factor r is the same for a whole row, so it multiplies the sums, r Σ x_k s_k W_kn, and
the squares of x are summed in the same walk.
"""

import triton
import triton.language as tl

from .._device.math import gelu, reciprocal_root, silu
from .._device.pdl import wait_for_previous_launch
from .._device.products import product


@triton.jit
def gated(first, second, GATE: tl.constexpr):
    """The first, activated, times the second; GATE: 1 for silu, 2 for gelu."""
    return (silu(first) if GATE == 1 else gelu(first)) * second


@triton.jit
def _weights(kernel, k, n, K: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr = False):
    places = kernel + k[:, None] * N + n[None, :]
    if WHOLE:
        weights = tl.load(places)
    else:
        weights = tl.load(places, (k < K)[:, None] & (n < N)[None, :], other=0.0)
    return weights


@triton.jit
def of_one_row(
    x,
    x_2,
    scale,
    kernel,
    first,
    n,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    LENGTH: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The columns n [BLOCK_N] of RMSNorm(x) W, float32; of LENGTH channels from `first` on.

    A program reads its part of the weight once, in loads that are under way together; the first
    ones before x is there. With AT_ONCE the channels of all steps are summed at the end, which
    takes more registers and fewer barriers. With x_2 the row is activation(x) x_2.
    """
    total = tl.zeros((BLOCK_K, BLOCK_N) if AT_ONCE else (BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range((LENGTH + BLOCK_K - 1) // BLOCK_K):
        k = first + i * BLOCK_K + tl.arange(0, BLOCK_K)
        whole = (i + 1) * BLOCK_K <= LENGTH and K % LENGTH == 0 and N % BLOCK_N == 0
        weight = _weights(kernel, k, n, K, N, whole)
        scales = 1.0
        if scale is not None:
            scales = tl.load(scale + k, k < K, other=0.0).to(tl.float32)
        if PDL and i == 0:
            wait_for_previous_launch()
        value = tl.load(x + k, k < K, other=0.0).to(tl.float32)
        if x_2 is not None:
            value = gated(value, tl.load(x_2 + k, k < K, other=0.0), GATE)
        squares += value * value
        products = (value * scales)[:, None] * weight.to(tl.float32)
        total += products if AT_ONCE else tl.sum(products, 0)
    if AT_ONCE:
        total = tl.sum(total, 0)
    if NORM:
        total *= reciprocal_root(tl.sum(squares, 0) / K + epsilon)
    return total[None, :]


@triton.jit
def of_rows(
    x,
    kernel,
    other,
    first,
    n,
    rows,
    K: tl.constexpr,
    N: tl.constexpr,
    LENGTH: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SHORT: tl.constexpr,
):
    """The columns n of x W for the first rows [BLOCK_B] of x, with a GATE also with `other`.

    Of LENGTH channels from `first` on, which is a multiple of BLOCK_K unless it is all of them.
    Tensor cores multiply; the loads of the next channels are under way meanwhile, into shared
    memory.
    """
    row = tl.arange(0, BLOCK_B)
    total = tl.zeros((BLOCK_B, n.shape[0]), tl.float32)
    beside = tl.zeros((BLOCK_B, n.shape[0]), tl.float32)
    for start in tl.range(0, LENGTH, BLOCK_K, num_stages=STAGES):
        k = first + start + tl.arange(0, BLOCK_K)
        valid = (row < rows)[:, None] & (k < K)[None, :]
        value = tl.load(x + row[:, None] * K + k[None, :], valid, other=0.0)
        total = product(value, _weights(kernel, k, n, K, N), total, SHORT)
        if GATE:
            beside = product(value, _weights(other, k, n, K, N), beside, SHORT)
    return total, beside
