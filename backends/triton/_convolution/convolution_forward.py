"""Forward kernel of `causal_conv1d`, and the loads and the filter that its gradients repeat.

A program goes through positions with the last W inputs in registers.
"""

import triton
import triton.language as tl

from .._device.common import advance
from .._device.math import sigmoid
from .convolution_positions import load_token_and_document, locate_program, sequence_sizes


@triton.jit
def load_parameters(kernel, bias, d, D, W: tl.constexpr):
    """Loads the filter's weights, the current token's first, and the bias."""
    weights = ()
    for k in tl.static_range(W):
        weights = weights + (tl.load(kernel + (W - 1 - k) * D + d, d < D, other=0.0),)
    bias_value = tl.zeros(d.shape, tl.float32)
    if bias is not None:
        bias_value = tl.load(bias + d, d < D, other=0.0).to(tl.float32)
    return weights, bias_value


@triton.jit
def load_input(
    x, initial, position, offsets, num_real, d, D, W: tl.constexpr, INSIDE: tl.constexpr
):
    """Loads the input at each position: 0 before the state, and after the last real token.

    x, initial: pointers to a sequence's inputs and state. INSIDE: all positions are real tokens.
    """
    real = d < D
    if not INSIDE:
        real &= (position >= 0) & (position < num_real)
    value = tl.load(x + offsets, real, other=0.0).to(tl.float32)
    if not INSIDE and initial is not None:
        in_state = (position < 0) & (position > -W) & (d < D)
        value += tl.load(initial + ((position + W - 1) * D + d), in_state, other=0.0)
    return value


@triton.jit
def apply_filter(values, documents, weights, bias_value, token_at, W: tl.constexpr):
    """The filter's result at the last of these positions, without inputs of other documents."""
    total = bias_value
    for k in tl.static_range(W):
        tap = values[-1 - k]
        if token_at is not None:
            tap = tl.where(documents[-1 - k] == documents[-1], tap, 0.0)
        total += weights[k].to(tl.float32) * tap
    return total


@triton.jit
def forward_kernel(
    x,
    kernel,
    bias,
    initial,
    positions,
    y,
    final,
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    TILE: tl.constexpr,
):
    FINE: tl.constexpr = x.dtype.element_ty == tl.float32
    tile, _, b, d = locate_program(T, D, TILE.BLOCK_D, TILE.GROUPS * TILE.ROWS, W)
    d_valid = d < D
    row, state = b.to(tl.int64) * T, b.to(tl.int64) * (W - 1) * D
    x, y = advance((x, y), row * D)
    final += state
    if initial is not None:
        initial += state
    token_at, document_at = positions[0], positions[1]
    if token_at is not None:
        token_at, document_at = token_at + row, document_at + row
    num_real, last_document = sequence_sizes(b, T, positions)
    tile_begin = tile * (TILE.GROUPS * TILE.ROWS) - (W - 1)
    begin = tile_begin + tl.arange(0, TILE.GROUPS)[:, None] * TILE.ROWS

    weights, bias_value = load_parameters(kernel, bias, d, D, W)

    values = ()
    tokens = ()
    documents = ()
    for j in tl.static_range(TILE.ROWS + W - 1):
        position = begin + j - (W - 1)
        t, document = load_token_and_document(position, T, token_at, document_at, False)
        offsets = t.to(tl.int64) * D + d
        values = values + (load_input(x, initial, position, offsets, num_real, d, D, W, False),)
        tokens = tokens + (t,)
        documents = documents + (document,)
    # The compiler does not move loads before stores: all loads come first.
    for j in tl.static_range(TILE.ROWS):
        position = begin + j
        total = apply_filter(
            values[j : j + W], documents[j : j + W], weights, bias_value, token_at, W
        )
        if SILU:
            total *= sigmoid(total, FINE)[0]
        offsets = tokens[j + W - 1].to(tl.int64) * D + d
        tl.store(y + offsets, total, (position >= 0) & (position < T) & d_valid)
        if tile_begin + TILE.GROUPS * TILE.ROWS > num_real - (W - 1):
            slot = position - num_real + W - 1
            in_state = (slot >= 0) & (slot < W - 1) & d_valid
            value = tl.where(documents[j + W - 1] == last_document, values[j + W - 1], 0.0)
            tl.store(final + (slot * D + d), value, in_state)
