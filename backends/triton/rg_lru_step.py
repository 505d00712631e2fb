"""One decoding step of Griffin's recurrent block between its linear layers: convolution and RG-LRU.

De et al. 2024, arXiv:2402.19427. A program computes some channels of one block of one row, from the
convolution of all channels of the block. For several rows, `_decoding/rg_lru_step_batch.py` does.
All arithmetic is float32.
"""

import triton
import triton.language as tl

from ._decoding.rg_lru_step_batch import DECAY_EXPONENT, batch_kernel, tile_options
from ._device.common import load_float32
from ._device.math import decay, gelu, sigmoid, softplus
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._device.tokens import CONTINUES, PADDING, STARTS, select_by_kind
from ._runtime.framework import decoding_step, pdl_options, run, step_unsupported_reason
from ._runtime.launch import Array, Launch, cdiv, dtype_name, like, next_power_of_2

_BLOCK_N, _WARPS = 32, 4
_MAX_CHANNELS = 512  # of a block; a program holds them and two tiles of gate weights


def unsupported(kernel_a, **others) -> str | None:
    if kernel_a.shape[1] > _MAX_CHANNELS:
        return f"takes blocks of up to {_MAX_CHANNELS} channels, got {kernel_a.shape[1]}"
    return step_unsupported_reason(kernel_a, **others)


@triton.jit
def _convolve_previous(last_inputs, conv_kernel, conv_bias, row, d, valid, D, W: tl.constexpr):
    """The convolution of previous inputs at channels d of a row, without its newest input.

    Returns two versions: for a token that starts a document, and for one that continues it.
    """
    bias = load_float32(conv_bias, d, valid)
    total = bias
    for i in tl.static_range(W - 1):
        previous = load_float32(last_inputs, row * ((W - 1) * D) + i * D + d, valid)
        total += previous * load_float32(conv_kernel, i * D + d, valid)
    return bias, total


@triton.jit
def _kernel(
    x,
    gate,
    last_inputs,
    hidden,
    parameters,
    token_kind,
    output,
    next_inputs,
    next_hidden,
    D,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    conv_kernel, conv_bias, kernel_a, bias_a, kernel_x, bias_x, a_logit = parameters
    TILES: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // TILES % (D // C)
    row = (tl.program_id(0) // TILES // (D // C)).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    # Weights and the previous token's state are loaded before the wait.
    weight_offsets = block.to(tl.int64) * (C * C) + c[:, None] * C + n[None, :]
    valid = (c < C)[:, None] & (n < C)[None, :]
    weight_a = tl.load(kernel_a + weight_offsets, valid, other=0.0)
    weight_x = tl.load(kernel_x + weight_offsets, valid, other=0.0)
    d, channel = block * C + c, block * C + n
    at_start, continued = _convolve_previous(
        last_inputs, conv_kernel, conv_bias, row, d, c < C, D, W
    )
    channel_start, channel_later = _convolve_previous(
        last_inputs, conv_kernel, conv_bias, row, channel, n < C, D, W
    )
    weight = load_float32(conv_kernel, (W - 1) * D + d, c < C)
    channel_weight = load_float32(conv_kernel, (W - 1) * D + channel, n < C)
    gate_bias_a = load_float32(bias_a, channel, n < C)
    gate_bias_x = load_float32(bias_x, channel, n < C)
    log_a = -DECAY_EXPONENT * softplus(-load_float32(a_logit, channel, n < C))
    h = load_float32(hidden, row * D + channel, n < C)
    i = tl.arange(0, BLOCK_W)[:, None]
    slot_offsets = row * ((W - 1) * D) + i * D + channel[None, :]
    slot_valid = (i < W - 1) & (n < C)[None, :]
    previous = load_float32(last_inputs, slot_offsets, slot_valid)
    moved = load_float32(last_inputs, slot_offsets + D, slot_valid & (i < W - 2))
    wait_for_previous_launch(PDL)
    kind = CONTINUES
    if token_kind is not None:
        kind = tl.load(token_kind + row)
    newest = load_float32(x, row * D + d, c < C)
    channel_newest = load_float32(x, row * D + channel, n < C)
    value = load_float32(gate, row * D + channel, n < C)
    real = kind != PADDING
    inputs = tl.where(kind == STARTS, at_start, continued) + tl.where(real, newest, 0.0) * weight
    convolved = tl.where(kind == STARTS, channel_start, channel_later)
    convolved += tl.where(real, channel_newest, 0.0) * channel_weight
    gate_a = tl.sum(inputs[:, None] * weight_a.to(tl.float32), 0) + gate_bias_a
    gate_x = tl.sum(inputs[:, None] * weight_x.to(tl.float32), 0) + gate_bias_x
    a, complement = decay(log_a * sigmoid(gate_a, True)[0], True)
    gated = sigmoid(gate_x, True)[0] * convolved
    h = select_by_kind(kind, a * h + tl.sqrt_rn(complement) * gated, gated, h)
    tl.store(next_hidden + row * D + channel, h, n < C)
    tl.store(output + row * D + channel, gelu(tl.where(real, value, 0.0)) * h, n < C)
    moved = tl.where(kind == STARTS, 0.0, moved)
    moved = tl.where(i == W - 2, channel_newest[None, :], moved)
    tl.store(next_inputs + slot_offsets, tl.where(real, moved, previous), slot_valid)


def results(x, gate, window, hidden, *_):
    return like(x), *(Array(tuple(state.shape), "float32") for state in (window, hidden))


@decoding_step(unsupported, results, count=3, updates=("hidden",))
def rg_lru_step(
    x,
    gate,
    window,
    hidden,
    conv_kernel,
    conv_bias,
    kernel_a,
    bias_a,
    kernel_x,
    bias_x,
    a_logit,
    token_kind=None,
):
    parameters = conv_kernel, conv_bias, kernel_a, bias_a, kernel_x, bias_x, a_logit
    tensors = x, gate, window, hidden, parameters, token_kind
    rows, width = x.shape
    blocks, channels = kernel_a.shape[:2]
    options = {"W": conv_kernel.shape[0], "C": channels, **pdl_options(x)}
    if rows == 1:
        kernel, numbers, count = _kernel, (width,), 1
        options |= {"BLOCK_N": min(_BLOCK_N, next_power_of_2(channels))}
        options |= {"BLOCK_C": next_power_of_2(channels), "num_warps": _WARPS}
        options |= {"BLOCK_W": next_power_of_2(conv_kernel.shape[0] - 1)}
    else:
        kernel, numbers = batch_kernel, (rows, width)
        short = {dtype_name(kernel) for kernel in (kernel_a, kernel_x)} == {"bfloat16"}
        options |= tile_options(rows, channels) | {"SHORT": short}
        count = cdiv(rows, options["BLOCK_B"])
    programs = count * blocks * cdiv(channels, options["BLOCK_N"])
    outputs = results(*tensors)
    # The window is not updated in place: other programs read it for their channels.
    return run(Launch(kernel, programs, tensors, outputs, numbers, options, updates=((3, 2),)))
