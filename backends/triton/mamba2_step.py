"""One decoding step of Mamba-2 between its linear layers.  Dao and Gu 2024, arXiv:2405.21060.

For one sequence, a program of the first launch convolves a block of channels, and a program of the
last launch applies skip, gate and norm to a group of channels. Between these launches,
`lightning_step` updates the memory. All arithmetic is float32.
"""

import triton
import triton.language as tl

from . import lightning_step
from ._device.common import load_float32
from ._device.math import exp, reciprocal_root, silu, softplus
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._device.tokens import CONTINUES, PADDING, STARTS
from ._runtime.framework import decoding_step, pdl_options, run, step_unsupported_reason
from ._runtime.launch import Array, Launch, cdiv, like, next_power_of_2

_BLOCK = 128  # channels of a program that convolves
_OUTPUT_BLOCK = 1024  # channels of a program without a norm
_MAX_GROUP = 16384  # channels of a norm, which the registers of one program hold


def unsupported(z, bc, memory, norm_scale=None, **others) -> str | None:
    keys = memory.shape[2]
    if keys > lightning_step.MAX_KEYS:
        return f"takes keys of up to {lightning_step.MAX_KEYS} channels, got {keys}"
    group = z.shape[1] * 2 * keys // bc.shape[1]
    if norm_scale is not None and group > _MAX_GROUP:
        return f"takes norms of up to {_MAX_GROUP} channels, got {group}"
    return step_unsupported_reason(z, bc, memory, norm_scale, **others)


@triton.jit
def _convolve(
    inputs, window, weights, token_kind, next_window, row, d, D, W: tl.constexpr, PDL: tl.constexpr
):
    """Returns silu of the convolution at channels d of a row, and a mask, False at padding.

    Writes the next window.
    """
    kernel, bias = weights
    valid = d < D
    at_start = tl.zeros(d.shape, tl.float32)
    if bias is not None:
        at_start = load_float32(bias, d, valid)
    total = at_start
    slots = window + row * ((W - 1) * D) + d
    last_inputs = ()
    for i in tl.static_range(W - 1):
        last_inputs = last_inputs + (load_float32(slots, i * D, valid),)
        total += last_inputs[i] * load_float32(kernel, i * D + d, valid)
    weight = load_float32(kernel, (W - 1) * D + d, valid)
    wait_for_previous_launch(PDL)
    kind = CONTINUES
    if token_kind is not None:
        kind = tl.load(token_kind + row)
    real = valid & (kind != PADDING)
    newest = load_float32(inputs, row * D + d, real)
    next_slots = next_window + row * ((W - 1) * D) + d
    for i in tl.static_range(W - 1):
        moved = newest
        if i < W - 2:
            moved = tl.where(kind == STARTS, 0.0, last_inputs[i + 1])
        tl.store(next_slots + i * D, tl.where(real, moved, last_inputs[i]), valid)
    return silu(tl.where(kind == STARTS, at_start, total) + weight * newest), real


@triton.jit
def _inputs_kernel(
    x,
    bc,
    dt,
    x_window,
    bc_window,
    x_weights,
    bc_weights,
    a_log,
    dt_bias,
    token_kind,
    convolved,
    value,
    query,
    key,
    log_decay,
    next_x_window,
    next_bc_window,
    D,
    S,
    P: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convolves x and bc, and computes inputs of `lightning_step`. D, S: the widths of x and bc."""
    launch_dependents(PDL)
    x_tiles = tl.cdiv(D, BLOCK)
    tiles = x_tiles + tl.cdiv(S, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    if tile < x_tiles:
        d = tile * BLOCK + tl.arange(0, BLOCK)
        head = d // P
        rate = exp(load_float32(a_log, head, d < D), True)
        bias = load_float32(dt_bias, head, d < D)
        y, real = _convolve(x, x_window, x_weights, token_kind, next_x_window, row, d, D, W, PDL)
        delta = softplus(load_float32(dt, row * (D // P) + head, real) + bias)
        tl.store(convolved + row * D + d, y, d < D)
        tl.store(value + row * D + d, y * delta, d < D)
        tl.store(log_decay + row * (D // P) + head, -delta * rate, (d < D) & (d % P == 0))
    else:
        d = (tile - x_tiles) * BLOCK + tl.arange(0, BLOCK)
        y, _ = _convolve(bc, bc_window, bc_weights, token_kind, next_bc_window, row, d, S, W, PDL)
        offsets = row * (S // 2) + d // (2 * N) * N + d % N
        is_query = d % (2 * N) >= N
        tl.store(query + offsets, y, (d < S) & is_query)
        tl.store(key + offsets, y, (d < S) & ~is_query)


@triton.jit
def _output_kernel(
    o,
    x,
    z,
    skip,
    norm_scale,
    token_kind,
    y,
    D,
    epsilon,
    P: tl.constexpr,
    C: tl.constexpr,
    NORM_AFTER_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Applies skip, gate and norm. C: the number of channels of a program."""
    launch_dependents(PDL)
    tiles = tl.cdiv(D, C)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.arange(0, BLOCK)
    d = tl.program_id(0) % tiles * C + c
    valid = (c < C) & (d < D)
    factor = load_float32(skip, d // P, valid)
    if norm_scale is not None:
        scale = load_float32(norm_scale, d, valid)
    wait_for_previous_launch(PDL)
    output = load_float32(o, row * D + d, valid)
    output += factor * load_float32(x, row * D + d, valid)
    real = valid
    if token_kind is not None:
        real = valid & (tl.load(token_kind + row) != PADDING)
    gate = silu(load_float32(z, row * D + d, real))
    if NORM_AFTER_GATE:
        output *= gate
    if norm_scale is not None:
        output *= reciprocal_root(tl.sum(output * output, 0) / C + epsilon) * scale
    if not NORM_AFTER_GATE:
        output *= gate
    tl.store(y + row * D + d, output, valid)


def results(z, x, bc, dt, x_window, bc_window, memory, *_, **_options):
    states = x_window, bc_window, memory
    return like(z), *(Array(tuple(state.shape), "float32") for state in states)


@decoding_step(unsupported, results, count=4, updates=("x_window", "bc_window", "memory"))
def mamba2_step(
    z,
    x,
    bc,
    dt,
    x_window,
    bc_window,
    memory,
    x_kernel,
    bc_kernel,
    a_log,
    dt_bias,
    skip,
    x_bias=None,
    bc_bias=None,
    norm_scale=None,
    token_kind=None,
    epsilon: float | None = None,
    norm_after_gate: bool = True,
):
    batch, heads, keys, values = memory.shape
    width, shared = x.shape[1], bc.shape[1]
    groups = shared // (2 * keys)
    output, *windows, _ = results(z, x, bc, dt, x_window, bc_window, memory)
    inner, keys_shape = Array((batch, heads, values), "float32"), (batch, groups, keys)
    outputs = inner, inner, *[Array(keys_shape, "float32")] * 2, Array((batch, heads), "float32")
    weights = (x_kernel, x_bias), (bc_kernel, bc_bias)
    tensors = x, bc, dt, x_window, bc_window, *weights, a_log, dt_bias, token_kind
    options = {"P": values, "N": keys, "W": x_kernel.shape[0], "BLOCK": _BLOCK, **pdl_options(x)}
    programs = batch * (cdiv(width, _BLOCK) + cdiv(shared, _BLOCK))
    arguments = programs, tensors, (*outputs, *windows), (width, shared), options
    launch = Launch(_inputs_kernel, *arguments, updates=((3, 5), (4, 6)))
    convolved, v, q, k, log_decay, *windows = run(launch)
    o, _, memory = lightning_step.forward(q, k, v, memory, log_decay, token_kind=token_kind)
    channels = _OUTPUT_BLOCK if norm_scale is None else width // groups
    options = {"P": values, "C": channels, "NORM_AFTER_GATE": norm_after_gate, **pdl_options(x)}
    options |= {"BLOCK": next_power_of_2(channels), "num_warps": 4 if channels <= 2048 else 8}
    tensors, numbers = (o, convolved, z, skip, norm_scale, token_kind), (width, epsilon or 0.0)
    launch = Launch(
        _output_kernel, batch * cdiv(width, channels), tensors, (output,), numbers, options
    )
    return *run(launch), *windows, memory
