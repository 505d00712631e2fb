"""`rg_lru_step` for several rows, whose gates are multiplied on tensor cores.

A program computes some channels of one block for several rows. It reads the gate weights once for
all of them, while the kernel for one row would read them for each row.
"""

import triton
import triton.language as tl

from ... import constants
from .._device.common import load_float32
from .._device.math import decay, gelu, sigmoid, softplus
from .._device.pdl import launch_dependents, wait_for_previous_launch
from .._device.products import operand, product
from .._device.tokens import CONTINUES, PADDING, STARTS, read_kind, select_by_kind
from .._runtime.launch import next_power_of_2

DECAY_EXPONENT = tl.constexpr(constants.DECAY_EXPONENT)
_FEW_ROWS = {"BLOCK_B": 16, "BLOCK_C": 256, "BLOCK_N": 32, "num_warps": 4}
# Tiles of 64 rows would make products asynchronous (`products.py`).
_MANY_ROWS = {"BLOCK_B": 16, "BLOCK_C": 64, "BLOCK_N": 128, "num_warps": 4}


def tile_options(rows, channels):
    """The constants and launch options for `rows` rows and blocks of `channels` channels."""
    tile = _FEW_ROWS if rows <= _FEW_ROWS["BLOCK_B"] else _MANY_ROWS
    max_block = next_power_of_2(max(16, channels))
    return tile | {name: min(tile[name], max_block) for name in ("BLOCK_C", "BLOCK_N")}


@triton.jit
def _convolve_previous(
    last_inputs, conv_kernel, conv_bias, weight_offsets, row, d, valid, D, W: tl.constexpr
):
    """The convolution of previous inputs at channels d of rows, without the newest input.

    Returns two versions: for tokens that start a document, [1, channels], and for tokens that
    continue one, [rows, channels].
    """
    bias = load_float32(conv_bias, d, weight_offsets)[None, :]
    total = tl.where(valid, bias, 0.0)
    for i in tl.static_range(W - 1):
        offsets = row[:, None] * ((W - 1) * D) + i * D + d[None, :]
        total += (
            load_float32(last_inputs, offsets, valid)
            * load_float32(conv_kernel, i * D + d, weight_offsets)[None, :]
        )
    return bias, total


@triton.jit
def _float32_product(inputs, weight, total, rest, SHORT: tl.constexpr):
    """total + rest + inputs weight, with the precision of float32, which three bfloat16 parts have.

    Tensor cores truncate what is below the last place of a sum. The two smaller parts are summed
    separately, in `rest`, so that they are not truncated against the large one.
    """
    if SHORT:
        part = operand(inputs, True)
        total = product(part, weight, total, True)
        for _ in tl.static_range(2):
            inputs -= part.to(tl.float32)
            part = operand(inputs, True)
            rest = product(part, weight, rest, True)
    else:
        total = product(inputs, weight.to(tl.float32), total, False)
    return total, rest


@triton.jit
def batch_kernel(
    x,
    gate,
    last_inputs,
    hidden,
    parameters,
    token_kind,
    output,
    next_inputs,
    next_hidden,
    rows,
    D,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHORT: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    conv_kernel, conv_bias, kernel_a, bias_a, kernel_x, bias_x, a_logit = parameters
    TILES: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // TILES % (D // C)
    row = tl.program_id(0) // TILES // (D // C) * BLOCK_B + tl.arange(0, BLOCK_B).to(tl.int64)
    n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = block * C + n
    offsets = row[:, None] * D + channel[None, :]
    valid_outputs = (row < rows)[:, None] & (n < C)[None, :]
    kind = tl.full((BLOCK_B,), CONTINUES, tl.int8)
    gate_a = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    gate_x = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    rest_a = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    rest_x = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    for i in tl.static_range((C + BLOCK_C - 1) // BLOCK_C):
        c = i * BLOCK_C + tl.arange(0, BLOCK_C)
        d = block * C + c
        valid = (row < rows)[:, None] & (c < C)[None, :]
        weight_offsets = block.to(tl.int64) * (C * C) + c[:, None] * C + n[None, :]
        square = (c < C)[:, None] & (n < C)[None, :]
        # Weights and the previous token's state are loaded before the wait.
        weight_a = tl.load(kernel_a + weight_offsets, square, other=0.0)
        weight_x = tl.load(kernel_x + weight_offsets, square, other=0.0)
        at_start, continued = _convolve_previous(
            last_inputs, conv_kernel, conv_bias, c < C, row, d, valid, D, W
        )
        if i == 0:
            wait_for_previous_launch(PDL)
            if token_kind is not None:
                kind = read_kind(token_kind, row, row < rows)
        weight = load_float32(conv_kernel, (W - 1) * D + d, c < C)[None, :]
        newest = load_float32(x, row[:, None] * D + d[None, :], valid)
        newest = tl.where((kind != PADDING)[:, None], newest, 0.0)
        inputs = tl.where((kind == STARTS)[:, None], at_start, continued) + newest * weight
        gate_a, rest_a = _float32_product(inputs, weight_a, gate_a, rest_a, SHORT)
        gate_x, rest_x = _float32_product(inputs, weight_x, gate_x, rest_x, SHORT)
    kind = kind[:, None]
    real = kind != PADDING
    newest = load_float32(x, offsets, valid_outputs)
    at_start, continued = _convolve_previous(
        last_inputs, conv_kernel, conv_bias, n < C, row, channel, valid_outputs, D, W
    )
    weight = load_float32(conv_kernel, (W - 1) * D + channel, n < C)[None, :]
    convolved = tl.where(kind == STARTS, at_start, continued) + tl.where(real, newest, 0.0) * weight
    gate_a += rest_a + load_float32(bias_a, channel, n < C)[None, :]
    gate_x += rest_x + load_float32(bias_x, channel, n < C)[None, :]
    log_a = -DECAY_EXPONENT * softplus(-load_float32(a_logit, channel, n < C))[None, :]
    a, complement = decay(log_a * sigmoid(gate_a, True)[0], True)
    gated = sigmoid(gate_x, True)[0] * convolved
    h = load_float32(hidden, offsets, valid_outputs)
    h = select_by_kind(kind, a * h + tl.sqrt_rn(complement) * gated, gated, h)
    tl.store(next_hidden + offsets, h, valid_outputs)
    value = tl.where(real, load_float32(gate, offsets, valid_outputs), 0.0)
    tl.store(output + offsets, gelu(value) * h, valid_outputs)
    for i in tl.static_range(W - 1):
        slot_offsets = row[:, None] * ((W - 1) * D) + i * D + channel[None, :]
        moved = newest
        if i < W - 2:
            moved = tl.where(
                kind == STARTS, 0.0, load_float32(last_inputs, slot_offsets + D, valid_outputs)
            )
        stored = load_float32(last_inputs, slot_offsets, valid_outputs)
        tl.store(next_inputs + slot_offsets, tl.where(real, moved, stored), valid_outputs)
