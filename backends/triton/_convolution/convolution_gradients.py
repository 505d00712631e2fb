"""Backward kernel of `causal_conv1d`.

A program goes through positions with the gradients of the next W outputs in registers. For the
gradient of an activation it starts W - 1 positions earlier, and computes the filter's results
again.
"""

import triton
import triton.language as tl

from .._device.common import advance
from .._device.math import sigmoid
from .convolution_forward import apply_filter, load_input, load_parameters
from .convolution_positions import (
    load_token_and_document,
    locate_program,
    sequence_sizes,
    token_offsets,
)

_STAGES = tl.constexpr(4)  # pipeline stages, of which one is computed while the others are loaded


@triton.jit
def _load_gradient(
    dy,
    z,
    position,
    offsets,
    num_real,
    d_valid,
    SILU: tl.constexpr,
    FINE: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Loads the gradient of the filter's results z; 0 outside the real tokens."""
    valid = d_valid
    if not INSIDE:
        valid = d_valid & (position >= 0) & (position < num_real)
    gradient = tl.load(dy + offsets, valid, other=0.0).to(tl.float32)
    if SILU:
        s, not_s = sigmoid(z, FINE)
        gradient *= s * (1.0 + z * not_s)
    return gradient


@triton.jit
def _load_position(
    values,
    documents,
    gradients,
    tokens,
    i,
    begin,
    d,
    T,
    D,
    sequence,
    filter,
    WITH_GRADIENT: tl.constexpr,
    W: tl.constexpr,
    SILU: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Appends the position `begin` + i to tuples of inputs, documents, gradients and tokens.

    The gradient, of the filter's result at the position, depends on the last W inputs.
    """
    dy, x, initial, token_at, document_at, num_real = sequence
    weights, bias_value = filter
    position, origin = begin + i, begin.to(tl.int64) * D + d
    t, document = load_token_and_document(position, T, token_at, document_at, INSIDE)
    offsets = token_offsets(origin, i, t, D, d, token_at)
    values = values + (load_input(x, initial, position, offsets, num_real, d, D, W, INSIDE),)
    documents = documents + (document,)
    if WITH_GRADIENT:
        z = bias_value
        if SILU:
            z = apply_filter(values, documents, weights, bias_value, token_at, W)
        FINE: tl.constexpr = x.dtype.element_ty == tl.float32
        gradient = _load_gradient(dy, z, position, offsets, num_real, d < D, SILU, FINE, INSIDE)
        gradients, tokens = gradients + (gradient,), tokens + (t,)
    return values, documents, gradients, tokens


@triton.jit
def _sequence_gradients(
    pointers,
    results,
    begin,
    d,
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Processes STEPS * ROWS positions from `begin` [GROUPS, 1] on; pointers are a sequence's.

    INSIDE: all positions that are read are real tokens, whose inputs are not in the final state.
    """
    dy, d_final, x, kernel, bias, initial, token_at, document_at, num_real, last_document = pointers
    dx, d_parameters, d_initial = results
    HISTORY: tl.constexpr = W - 1 if SILU else 0  # inputs that the first z needs
    d_valid = d < D
    origin = begin.to(tl.int64) * D + d
    weights, bias_value = load_parameters(kernel, bias, d, D, W)
    sums = ()
    for _ in tl.static_range(W):
        sums = sums + (tl.zeros((TILE.GROUPS, TILE.BLOCK_D), tl.float32),)
    d_bias = tl.zeros((TILE.GROUPS, TILE.BLOCK_D), tl.float32)

    sequence, filter = (dy, x, initial, token_at, document_at, num_real), (weights, bias_value)
    values, documents, gradients, tokens = (), (), (), ()
    for j in tl.static_range(HISTORY + W - 1):
        values, documents, gradients, tokens = _load_position(
            *(values, documents, gradients, tokens, j - HISTORY, begin, d, T, D, sequence, filter),
            *(j >= HISTORY, W, SILU, INSIDE),
        )
    values, documents = values[HISTORY:], documents[HISTORY:]
    num_steps = STEPS
    if not INSIDE:  # the steps of the last tile may end early
        num_steps = tl.minimum(STEPS, tl.cdiv(T - tl.min(begin), TILE.ROWS))
    # Loads are not pipelined with tables of positions, where registers would spill, nor with
    # states, where shared memory would be needed.
    STATES: tl.constexpr = initial is not None or d_final is not None
    STAGES: tl.constexpr = 1 if token_at is not None or (STATES and not INSIDE) else _STAGES
    for step in tl.range(0, num_steps, num_stages=STAGES):
        for j in tl.static_range(TILE.ROWS):
            i = step * TILE.ROWS + j + W - 1
            values, documents, gradients, tokens = _load_position(
                *(values, documents, gradients, tokens, i, begin, d, T, D, sequence, filter),
                *(True, W, SILU, INSIDE),
            )
        # The compiler does not move loads before stores: all loads of a step come first.
        for j in tl.static_range(TILE.ROWS):
            i = step * TILE.ROWS + j
            position = begin + i
            d_value = tl.zeros((TILE.GROUPS, TILE.BLOCK_D), tl.float32)
            if not INSIDE and d_final is not None:
                slot = position - num_real + W - 1
                in_state = (slot >= 0) & (slot < W - 1) & (documents[j] == last_document) & d_valid
                d_value = tl.load(d_final + (slot * D + d), in_state, other=0.0)
            new_sums = ()
            for k in tl.static_range(W):
                gradient = gradients[j + k]
                if token_at is not None:
                    gradient = tl.where(documents[j + k] == documents[j], gradient, 0.0)
                d_value += weights[k].to(tl.float32) * gradient
                new_sums = new_sums + (sums[k] + values[j] * gradient,)
            sums = new_sums
            d_bias += gradients[j]
            offsets = token_offsets(origin, i, tokens[j], D, d, token_at)
            if INSIDE:
                tl.store(dx + offsets, d_value, d_valid)
            else:
                tl.store(dx + offsets, d_value, (position >= 0) & (position < T) & d_valid)
                slot = position + W - 1
                tl.store(d_initial + (slot * D + d), d_value, (position < 0) & d_valid)
        values, gradients = values[TILE.ROWS :], gradients[TILE.ROWS :]
        tokens, documents = tokens[TILE.ROWS :], documents[TILE.ROWS :]

    for k in tl.static_range(W):
        tl.store(d_parameters + (W - 1 - k) * D + d, tl.sum(sums[k], 0)[None, :], d_valid)
    tl.store(d_parameters + W * D + d, tl.sum(d_bias, 0)[None, :], d_valid)


@triton.jit
def backward_kernel(
    dy,
    d_final,
    x,
    kernel,
    bias,
    initial,
    positions,
    dx,
    d_parameters,
    d_initial,
    T,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Stores dx and d_initial, and each program's sums of the gradients of kernel and bias.

    A group of a tile processes STEPS * ROWS positions. It also reads the W - 1 positions after
    them, and, for the gradient of an activation, the W - 1 positions before them.
    d_parameters: [B, tiles, W + 1, D], W lines for the kernel and one for the bias.
    """
    GROUP_POSITIONS: tl.constexpr = STEPS * TILE.ROWS  # positions whose dx a group stores
    tile, tiles, b, d = locate_program(T, D, TILE.BLOCK_D, TILE.GROUPS * GROUP_POSITIONS, W)
    row, state = b.to(tl.int64) * T, b.to(tl.int64) * (W - 1) * D
    x, dy, dx = advance((x, dy, dx), row * D)
    d_initial += state
    if d_final is not None:
        d_final += state
    if initial is not None:
        initial += state
    token_at, document_at = positions[0], positions[1]
    if token_at is not None:
        token_at, document_at = token_at + row, document_at + row
    d_parameters += (b.to(tl.int64) * tiles + tile) * (W + 1) * D
    num_real, last_document = sequence_sizes(b, T, positions)

    first = tile * (TILE.GROUPS * GROUP_POSITIONS) - (W - 1)
    begin = first + tl.arange(0, TILE.GROUPS)[:, None] * GROUP_POSITIONS
    pointers = dy, d_final, x, kernel, bias, initial, token_at, document_at, num_real, last_document
    results = dx, d_parameters, d_initial
    if (first >= W - 1) & (first + TILE.GROUPS * GROUP_POSITIONS + W - 1 <= num_real):
        _sequence_gradients(pointers, results, begin, d, T, D, W, SILU, TILE, STEPS, True)
    else:
        _sequence_gradients(pointers, results, begin, d, T, D, W, SILU, TILE, STEPS, False)
