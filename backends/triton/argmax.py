"""The argmax of each row: the first index of the largest number, as `torch.argmax`.

A number counts as -inf if its bit in `masks`, uint8 [B, N], is 0; the lowest bit is the first.
Several programs share a row. A second kernel combines their results, and may append the index to
recent ones. A number and its index are packed into one 64-bit integer, so the maximum does not
depend on the order of comparisons.
"""

import triton
import triton.language as tl

from ._device.order import LOWEST, packed, position_of
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._runtime.framework import decoding_step, pdl_options, run, step_unsupported_reason
from ._runtime.launch import Array, Launch, cdiv, next_power_of_2

_BLOCK, _WARPS = 2048, 4  # numbers and warps of a program
_MAX_PARTS = 1024  # partial results that one program combines


def unsupported(x, masks=None) -> str | None:
    if not 0 < x.shape[-1] <= _BLOCK * _MAX_PARTS:
        return f"takes rows of 1 to {_BLOCK * _MAX_PARTS} numbers, got {x.shape[-1]}"
    return step_unsupported_reason(x)


@triton.jit
def _partial_kernel(
    x, masks, best, V, N, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    launch_dependents(PDL)
    wait_for_previous_launch(PDL)
    row, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    index = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * V + index, index < V, other=0.0).to(tl.float32)
    if masks is not None:
        byte = tl.load(masks + row * N + index // 8, index < V, other=0)
        value = tl.where((byte >> (index % 8)) & 1 != 0, value, float("-inf"))
    tl.store(best + tl.program_id(0), tl.max(tl.where(index < V, packed(value, index), LOWEST), 0))


@triton.jit
def _combine_kernel(
    best,
    index,
    recent,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RECENT: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait_for_previous_launch(PDL)
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    key = tl.max(tl.load(best + row * PARTS + part, part < PARTS, other=LOWEST), 0)
    row_argmax = position_of(key)
    tl.store(index + row, row_argmax)
    if recent is not None:
        slot = tl.arange(0, RECENT)
        later = tl.load(recent + row * RECENT + slot + 1, slot < RECENT - 1, other=0)
        tl.debug_barrier()  # all are read before the first is overwritten
        tl.store(recent + row * RECENT + slot, tl.where(slot < RECENT - 1, later, row_argmax))


def results(x, masks=None):
    return (Array((x.shape[0],), "int32"),)


# Exported programs contain this name.
@decoding_step(unsupported, results, count=1, name="largest", on_jax=False)
def argmax(x, masks=None):
    best, options = _partial_argmax(x, masks)
    outputs = *results(x), None
    return run(Launch(_combine_kernel, x.shape[0], (best,), outputs, (), options))[:1]


def _partial_argmax(x, masks=None):
    """The packed maximum of each part of a row, and options of the kernel that combines them."""
    rows, width = x.shape
    parts = cdiv(width, _BLOCK)
    options = {"PARTS": parts, "BLOCK": _BLOCK, "num_warps": _WARPS, **pdl_options(x)}
    best = Array((rows, parts), "int64")
    sizes = width, 0 if masks is None else masks.shape[1]
    (best,) = run(Launch(_partial_kernel, rows * parts, (x, masks), (best,), sizes, options))
    options = {"PARTS": parts, "BLOCK": next_power_of_2(parts), "RECENT": 1, **pdl_options(x)}
    return best, options


def write_argmax(x, index, recent):
    """On torch: writes the argmax into index [B, 1], and appends it to the rows of recent [B, R].

    R is a power of 2. Each row of `recent` shifts by one and drops its first index.
    """
    best, options = _partial_argmax(x.contiguous())
    options["RECENT"] = recent.shape[1]
    run(Launch(_combine_kernel, x.shape[0], (best, index, recent), (), (), options))
