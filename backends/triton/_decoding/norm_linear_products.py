"""Matrix products of `norm_linear`: RMSNorm(x) W for one row, and x W for up to 128 rows.

The norm's factor r is constant within a row, so it multiplies the sums, r Σ x_k s_k W_kn, and the
squares of x are summed in the same loop. Where the squares are given, the launch that computed x
has multiplied it by s.
"""

import triton
import triton.language as tl

from .._device.common import load_float32, next_power_of_2_in_kernel
from .._device.math import gelu, reciprocal_root, silu
from .._device.pdl import wait_for_previous_launch
from .._device.products import product


@triton.jit
def apply_gate(gate, x, GATE: tl.constexpr):
    """activation(gate) * x; GATE: 1 for silu, 2 for gelu."""
    return (silu(gate) if GATE == 1 else gelu(gate)) * x


@triton.jit
def load_squares(squares, row, rows, NUM_SQUARES: tl.constexpr):
    """The sums of squares of groups of channels, [rows, groups], for `norm_factors`."""
    group = tl.arange(0, next_power_of_2_in_kernel(NUM_SQUARES))
    valid = (row < rows)[:, None] & (group < NUM_SQUARES)[None, :]
    return load_float32(squares, row[:, None] * NUM_SQUARES + group[None, :], valid)


@triton.jit
def norm_factors(row_squares, epsilon, K: tl.constexpr):
    """The norm's factor r of each row, from the result of `load_squares`."""
    return reciprocal_root(tl.sum(row_squares, 1) / K + epsilon)


@triton.jit
def _load_weights(kernel, k, n, K: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr = False):
    pointers = kernel + k[:, None] * N + n[None, :]
    if WHOLE:
        weights = tl.load(pointers)
    else:
        weights = tl.load(pointers, (k < K)[:, None] & (n < N)[None, :], other=0.0)
    return weights


@triton.jit
def project_row(
    x,
    x_2,
    squares,
    scale,
    kernel,
    first_channel,
    n,
    epsilon,
    N: tl.constexpr,
    PRODUCT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns n [BLOCK_N] of RMSNorm(x) W in float32, over LENGTH channels from `first_channel` on.

    A program reads its tile of the weight once. Its loads overlap, and the first ones begin before
    x is available. With SUM_AT_END, channels are summed once after the last step, which takes more
    registers and fewer barriers. With x_2, the row is activation(x) * x_2.
    """
    K: tl.constexpr = PRODUCT.K
    LENGTH: tl.constexpr = PRODUCT.LENGTH
    BLOCK_N: tl.constexpr = PRODUCT.BLOCK_N
    BLOCK_K: tl.constexpr = PRODUCT.BLOCK_K
    total = tl.zeros((BLOCK_K, BLOCK_N) if PRODUCT.SUM_AT_END else (BLOCK_N,), tl.float32)
    channel_squares = tl.zeros((BLOCK_K,), tl.float32)
    for i in tl.static_range((LENGTH + BLOCK_K - 1) // BLOCK_K):
        k = first_channel + i * BLOCK_K + tl.arange(0, BLOCK_K)
        whole = (i + 1) * BLOCK_K <= LENGTH and K % LENGTH == 0 and N % BLOCK_N == 0
        weight = _load_weights(kernel, k, n, K, N, whole)
        scales = 1.0
        if scale is not None:
            scales = tl.load(scale + k, k < K, other=0.0).to(tl.float32)
        wait_for_previous_launch(PDL and i == 0)
        if squares is not None and i == 0:
            row_squares = load_squares(squares, tl.arange(0, 1), 1, PRODUCT.NUM_SQUARES)
        value = tl.load(x + k, k < K, other=0.0).to(tl.float32)
        if x_2 is not None:
            value = apply_gate(value, tl.load(x_2 + k, k < K, other=0.0), PRODUCT.GATE)
        channel_squares += value * value
        products = (value * scales)[:, None] * weight.to(tl.float32)
        total += products if PRODUCT.SUM_AT_END else tl.sum(products, 0)
    if PRODUCT.SUM_AT_END:
        total = tl.sum(total, 0)
    if PRODUCT.NORM:
        total *= reciprocal_root(tl.sum(channel_squares, 0) / K + epsilon)
    total = total[None, :]
    if squares is not None:
        total *= norm_factors(row_squares, epsilon, K)[:, None]
    return total


@triton.jit
def project_rows(
    x,
    squares,
    kernel,
    up_kernel,
    first_channel,
    n,
    rows,
    epsilon,
    N: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Columns n of x W for the first BLOCK_B rows of x; with a GATE, of x times `up_kernel`, too.

    Sums over LENGTH channels from `first_channel` on, a multiple of BLOCK_K or all channels. Tensor
    cores multiply while the next channels are loaded into shared memory.
    """
    K: tl.constexpr = PRODUCT.K
    BLOCK_B: tl.constexpr = PRODUCT.BLOCK_B
    row = tl.arange(0, BLOCK_B)
    total = tl.zeros((BLOCK_B, n.shape[0]), tl.float32)
    up = tl.zeros((BLOCK_B, n.shape[0]), tl.float32)
    if squares is not None:  # loaded here, so that the products do not end with a wait for them
        row_squares = load_squares(squares, row, rows, PRODUCT.NUM_SQUARES)
    for start in tl.range(0, PRODUCT.LENGTH, PRODUCT.BLOCK_K, num_stages=PRODUCT.STAGES):
        k = first_channel + start + tl.arange(0, PRODUCT.BLOCK_K)
        valid = (row < rows)[:, None] & (k < K)[None, :]
        value = tl.load(x + row[:, None] * K + k[None, :], valid, other=0.0)
        total = product(value, _load_weights(kernel, k, n, K, N), total, PRODUCT.SHORT)
        if PRODUCT.GATE:
            up = product(value, _load_weights(up_kernel, k, n, K, N), up, PRODUCT.SHORT)
    if squares is not None:
        factors = norm_factors(row_squares, epsilon, K)[:, None]
        total *= factors
        up *= factors
    return total, up
