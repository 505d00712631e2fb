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
    keys,
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
    weights = _pointer(table + 5 * row, WEIGHT, ALIGNMENT)
    gradients = _pointer(table + 5 * row + 1, GRADIENT, ALIGNMENT)
    momentums = _pointer(table + 5 * row + 2, tl.float32, ALIGNMENT)
    velocities = _pointer(table + 5 * row + 3, tl.float32, ALIGNMENT)
    count = tl.multiple_of(tl.load(table + 5 * row + 4), ALIGNMENT)
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
    first_key, second_key = tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)
    random = _hash(index.to(tl.uint32) + first_key.to(tl.uint32), second_key.to(tl.uint32))
    tl.store(momentums + index, momentum, valid)
    tl.store(velocities + index, velocity, valid)
    tl.store(weights + index, _stochastic_round(weight, random, WEIGHT), valid)


def update_weights(tensors, keys, rates, divisor, decays, coefficients):
    """Updates weights of one dtype in place, and their slots in float32.

    Args:
        tensors: `(weight, gradient, momentum, velocity)` of each weight, contiguous.
        keys: int32 [N, 2], the `rounding_keys` of each weight.
        rates: float32 [2]: learning rate × weight decay; bias-corrected learning rate.
        divisor: float32 scalar that divides the gradients, or None.
        decays: boolean, whether weights decay.
        coefficients: 1 - β₁, 1 - β₂ and ε. (In float32, 1 - 0.999 would be wrong by 0.0013 %.)
    """
    rows = [(*(x.data_ptr() for x in row), row[0].numel()) for row in tensors]
    table = torch.tensor(rows, dtype=torch.int64).to(keys.device, non_blocking=True)
    types = [_TYPES[x.dtype] for x in tensors[0][:2]]
    for alignment in (_ALIGNMENT, 1):
        aligned = (not any(x % _ALIGNMENT for x in row) for row in rows)
        counts = [r[-1] * (a == (alignment > 1)) for r, a in zip(rows, aligned, strict=True)]
        if any(counts):
            blocks = _list_blocks(tuple(counts), keys.device)
            options = {"WEIGHT": types[0], "GRADIENT": types[1], "DECAYS": decays}
            options |= {"ALIGNMENT": alignment, "BLOCK": _BLOCK, "num_warps": _WARPS}
            inputs = blocks, table, keys, rates, divisor
            run(Launch(adam_kernel, len(blocks), inputs, (), coefficients, options))


@functools.lru_cache(maxsize=32)
def _list_blocks(counts, device):
    """Returns the weight of each program and its block in that weight: int32 [P, 2]."""
    blocks = torch.tensor([cdiv(count, _BLOCK) for count in counts])
    weight = torch.arange(len(counts)).repeat_interleave(blocks)
    block = torch.arange(len(weight)) - (blocks.cumsum(0) - blocks)[weight]
    return torch.stack([weight, block], 1).int().to(device)
