"""Adam for weights in 16 bits with slots in float32: one launch for many weights, on torch.

A launch takes a table of addresses, as the launch of one kernel per weight takes longer than the
update of a small weight. Computes the update of `keras_recurrent/optimizers/updates.py`.
"""

import functools

import torch
import triton
import triton.language as tl

from .._runtime.framework import run
from .._runtime.launch import Launch, cdiv

_BLOCK, _WARPS = 2048, 8  # elements and warps of a program
_ALIGNMENT = 16  # bytes of an address, and elements of a weight, for vectorized loads
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _hash(x, key):
    """The hash of `stochastic_rounding.py`, of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = x ^ key
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _stochastic_round(x, random, DTYPE: tl.constexpr):
    """Rounds float32 to a 16-bit type with 32 random bits for each element."""
    bits = x.to(tl.uint32, bitcast=True)
    if DTYPE.is_bf16():
        rounded = ((bits + (random >> 16)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        rounded = ((bits + (random >> 19)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        uniform = (random >> 8).to(tl.float32) * 5.9604644775390625e-8
        multiples = tl.floor(x * 16777216.0 + uniform) * 5.9604644775390625e-8
        rounded = tl.where(tl.abs(x) < 6.103515625e-5, multiples, rounded)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(is_finite, rounded, x).to(DTYPE)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(DTYPE)), ALIGNMENT)


@triton.jit
def adam_kernel(
    blocks,
    table,
    step,
    rates,
    divisor,
    new_share_1,
    new_share_2,
    epsilon,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    DECAYS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    row = table + 6 * row
    weights = _pointer(row, WEIGHT, ALIGNMENT)
    gradients = _pointer(row + 1, GRADIENT, ALIGNMENT)
    momentums = _pointer(row + 2, tl.float32, ALIGNMENT)
    velocities = _pointer(row + 3, tl.float32, ALIGNMENT)
    count = tl.multiple_of(tl.load(row + 4), ALIGNMENT)
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = index < count

    gradient = tl.load(gradients + index, valid, other=0.0).to(tl.float32)
    if divisor is not None:
        gradient *= 1 / tl.load(divisor)
    momentum = tl.load(momentums + index, valid, other=0.0)
    velocity = tl.load(velocities + index, valid, other=0.0)
    weight = tl.load(weights + index, valid, other=0.0).to(tl.float32)
    momentum += (gradient - momentum) * new_share_1
    velocity += (gradient * gradient - velocity) * new_share_2
    if DECAYS:
        weight -= weight * tl.load(rates)
    weight -= tl.load(rates + 1) * momentum / (tl.sqrt(velocity) + epsilon)
    # The keys are those of `rounding_keys`.
    key = _hash(_hash(tl.load(step).to(tl.uint32), 0) ^ tl.load(row + 5).to(tl.uint32), 0)
    random = _hash(index.to(tl.uint32) + key, _hash(key ^ 0x9E3779B9, 0))
    tl.store(momentums + index, momentum, valid)
    tl.store(velocities + index, velocity, valid)
    tl.store(weights + index, _stochastic_round(weight, random, WEIGHT), valid)


def update_weights(tensors, indices, step, rates, divisor, decays, coefficients):
    """Updates weights of one dtype in place, and their slots in float32.

    Args:
        tensors: lists of weights, gradients, momentums and velocities, all contiguous.
        indices: list of integers, the `index` of each weight in `rounding_keys`.
        step: integer scalar, the `step` in `rounding_keys`.
        rates: float32 [2]: learning rate × weight decay; bias-corrected learning rate.
        divisor: float32 scalar that divides the gradients, or None.
        decays: boolean, whether weights decay.
        coefficients: 1 - β₁, 1 - β₂ and ε. (In float32, 1 - 0.999 would be wrong by 0.0013 %.)
    """
    columns = [[x.data_ptr() for x in column] for column in tensors]
    sizes = [weight.numel() for weight in tensors[0]]
    table = torch.tensor([*columns, sizes, indices]).T.contiguous()
    is_aligned = (table[:, :5] % _ALIGNMENT == 0).all(1)
    inputs = table.to(step.device, non_blocking=True), step, rates, divisor
    types = {"WEIGHT": _TYPES[tensors[0][0].dtype], "GRADIENT": _TYPES[tensors[1][0].dtype]}
    for alignment, rows in ((_ALIGNMENT, is_aligned), (1, ~is_aligned)):
        counts = (table[:, 4] * rows).tolist()
        if any(counts):
            blocks = _list_blocks(tuple(counts), step.device)
            options = {**types, "DECAYS": decays, "ALIGNMENT": alignment, "BLOCK": _BLOCK}
            options["num_warps"] = _WARPS
            run(Launch(adam_kernel, len(blocks), (blocks, *inputs), (), coefficients, options))


@functools.lru_cache(maxsize=32)
def _list_blocks(counts, device):
    """Returns the weight of each program and its block in that weight: int32 [P, 2]."""
    blocks = torch.tensor([cdiv(count, _BLOCK) for count in counts])
    weight = torch.arange(len(counts)).repeat_interleave(blocks)
    block = torch.arange(len(weight)) - (blocks.cumsum(0) - blocks)[weight]
    return torch.stack([weight, block], 1).int().to(device)
