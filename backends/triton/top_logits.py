"""The largest logits of each row in descending order, and the logarithm of the sum of exp of all.

Several programs share a row: each finds the largest numbers of its part one after the other, and
the sum of exp relative to the first. A second kernel combines the parts. Numbers are packed with
their indices as in `argmax`, so that the result does not depend on the order of comparisons.
"""

import triton
import triton.language as tl

from ._device.math import exp
from ._device.order import LOWEST, number_of, packed, position_of
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._runtime.framework import decoding_step, pdl_options, run, step_unsupported_reason
from ._runtime.launch import Array, Launch, cdiv, next_power_of_2

_BLOCK, _WARPS = 2048, 4  # numbers and warps of a program
_MAX_COUNT = 16
_MAX_PER_WARP = 512  # candidates that one warp combines, without a barrier
_MAX_CANDIDATES = 4096  # numbers that one program combines


def unsupported(x, count) -> str | None:
    if not 0 < count <= _MAX_COUNT:
        return f"takes a `count` of 1 to {_MAX_COUNT}, got {count}"
    largest = _BLOCK * (_MAX_CANDIDATES // _MAX_COUNT)
    if not count <= x.shape[-1] <= largest:
        return f"takes rows of `count` to {largest} numbers, got {x.shape[-1]}"
    return step_unsupported_reason(x)


@triton.jit
def _partial_kernel(
    x,
    best,
    highest,
    total,
    V,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait_for_previous_launch(PDL)
    row, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    index = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * V + index, index < V, other=float("-inf")).to(tl.float32)
    key = tl.where(index < V, packed(value, index), LOWEST)
    peak = tl.max(value, 0)
    # A part may consist of -inf only.
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(highest + tl.program_id(0), peak)
    tl.store(total + tl.program_id(0), tl.sum(exp(value - shift, True), 0))
    for i in range(COUNT):
        largest = tl.max(key, 0)
        tl.store(best + tl.program_id(0) * COUNT + i, largest)
        key = tl.where(key == largest, LOWEST, key)


@triton.jit
def _combine_kernel(
    best,
    highest,
    total,
    values,
    indices,
    log_sum,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait_for_previous_launch(PDL)
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK_PARTS)
    peaks = tl.load(highest + row * PARTS + part, part < PARTS, other=float("-inf"))
    sums = tl.load(total + row * PARTS + part, part < PARTS, other=0.0)
    peak = tl.max(peaks, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(log_sum + row, shift + tl.log(tl.sum(sums * exp(peaks - shift, True), 0)))
    candidate = tl.arange(0, BLOCK)
    valid = candidate < PARTS * COUNT
    key = tl.load(best + row * PARTS * COUNT + candidate, valid, other=LOWEST)
    for i in range(COUNT):
        largest = tl.max(key, 0)
        tl.store(values + row * COUNT + i, number_of(largest))
        tl.store(indices + row * COUNT + i, position_of(largest))
        key = tl.where(key == largest, LOWEST, key)


def results(x, count):
    row = (x.shape[0], count)
    return Array(row, "float32"), Array(row, "int32"), Array(row[:1], "float32")


@decoding_step(unsupported, results, count=3, on_jax=False)
def top_logits(x, count: int):
    rows, width = x.shape
    parts = cdiv(width, _BLOCK)
    options = {"PARTS": parts, "COUNT": count, **pdl_options(x)}
    sums = Array((rows, parts), "float32")
    partial = Array((rows, parts, count), "int64"), sums, sums
    tile = {"BLOCK": _BLOCK, "num_warps": _WARPS}
    partial = run(Launch(_partial_kernel, rows * parts, (x,), partial, (width,), options | tile))
    options["BLOCK"] = block = next_power_of_2(parts * count)
    options["num_warps"] = 1 if block <= _MAX_PER_WARP else _WARPS
    options["BLOCK_PARTS"] = next_power_of_2(parts)
    return run(Launch(_combine_kernel, rows, partial, results(x, count), (), options))
