"""The place of the largest number of each row, the first one of several, as `torch.argmax`.

Parts of a row are divided among programs; a second kernel takes the best part, and may write its
place behind others. A number and its place are one integer of 64 bits, so that a maximum is the
same in any order.
"""

import triton
import triton.language as tl

from .._device.pdl import launch_dependents, wait_for_previous_launch
from .._runtime.framework import forward_operation, pdl_options, run, step_unsupported_reason
from .._runtime.launch import Array, Launch

_BLOCK, _WARPS = 2048, 4  # numbers of a program
_MOST_PARTS = 1024  # which one program compares
_LAST = tl.constexpr(2**31 - 1)
_PLACES = tl.constexpr(2**31)
_NONE = tl.constexpr(-(2**63))


def unsupported(x) -> str | None:
    """Reason why this implementation cannot take these arguments, or None."""
    if not 0 < x.shape[-1] <= _BLOCK * _MOST_PARTS:
        return f"takes rows of 1 to {_BLOCK * _MOST_PARTS} numbers, got {x.shape[-1]}"
    return step_unsupported_reason(x)


@triton.jit
def _parts_kernel(x, best, V, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        launch_dependents()
        wait_for_previous_launch()
    row, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    place = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * V + place, place < V, other=0.0).to(tl.float32)
    # Integers in the order of the numbers: NaN above all, and no -0.
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    order = tl.where(value == value, tl.where(bits < 0, bits ^ _LAST, bits), _LAST)
    # Of equal numbers the first place is the largest integer: `^ _LAST` counts from the end.
    pair = order.to(tl.int64) * _PLACES + (place ^ _LAST).to(tl.int64)
    tl.store(best + tl.program_id(0), tl.max(tl.where(place < V, pair, _NONE), 0))


@triton.jit
def _whole_kernel(
    best,
    index,
    recent,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RECENT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
        wait_for_previous_launch()
    row, part = tl.program_id(0), tl.arange(0, BLOCK)
    pair = tl.max(tl.load(best + row * PARTS + part, part < PARTS, other=_NONE), 0)
    found = (pair & _LAST).to(tl.int32) ^ _LAST
    tl.store(index + row, found)
    if recent is not None:
        at = tl.arange(0, RECENT)
        later = tl.load(recent + row * RECENT + at + 1, at < RECENT - 1, other=0)
        tl.debug_barrier()  # all are read before the first is written over
        tl.store(recent + row * RECENT + at, tl.where(at < RECENT - 1, later, found))


def results(x):
    return (Array((x.shape[0],), "int32"),)


def forward(x):
    best, options = _best_of_parts(x)
    outputs = *results(x), None
    return run(Launch(_whole_kernel, x.shape[0], (best,), outputs, (), options))[:1]


def _best_of_parts(x):
    """The best number of each part of a row with its place, and the options of what goes on."""
    rows, width = x.shape
    parts = triton.cdiv(width, _BLOCK)
    options = {"PARTS": parts, "BLOCK": _BLOCK, "num_warps": _WARPS, **pdl_options(x)}
    best = Array((rows, parts), "int64")
    (best,) = run(Launch(_parts_kernel, rows * parts, (x,), (best,), (width,), options))
    options = {
        "PARTS": parts,
        "BLOCK": triton.next_power_of_2(parts),
        "RECENT": 1,
        **pdl_options(x),
    }
    return best, options


_largest = forward_operation("largest", forward, results, count=1)


def largest(x):
    """x: [B, V]. Returns int32 [B]: of each row the place of its first NaN, or largest number."""
    return _largest(x)


def write_largest(x, index, recent):
    """On torch: writes the places over index [B, 1], and behind the others of recent [B, R].

    R is a power of 2. The first one of each row of `recent` is dropped.
    """
    best, options = _best_of_parts(x.contiguous())
    options["RECENT"] = recent.shape[1]
    run(Launch(_whole_kernel, x.shape[0], (best, index, recent), (), (), options))
