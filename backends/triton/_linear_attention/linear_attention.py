"""Shared code of the kernels of linear attention: sizes, tiles, segments, loads of a chunk."""

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from .._device import common
from .._device.tokens import PADDING, STARTS
from .._runtime import framework
from .._runtime.framework import run
from .._runtime.launch import Array, Launch, candidates_of, cdiv, dtype_name, like, next_power_of_2

_MAX_HEAD = 256
_SMALLEST_TILE = 32  # channels; larger heads may end inside a tile (flash-linear-attention, #1241)
_FULL_GPU_PROGRAMS = common.MULTIPROCESSORS
_SHORTEST_SEGMENT = 8  # chunks


def unsupported_reason(q, k, v, *others, **named):
    """Reason why the kernels cannot take these tensors, or None."""
    reason = framework.unsupported_reason(q, k, v, *others, **named)
    if reason is not None:
        return reason
    for tensor in (q, v):
        size = tensor.shape[3]
        if size > _MAX_HEAD:
            return f"takes heads of up to {_MAX_HEAD} channels, got {size}"
        if size > _SMALLEST_TILE and size % 2 and tensor.dtype.itemsize == 2:
            return (
                f"needs an even number of channels a head, got {size}: Triton compiles odd tails "
                "of 16-bit tensors wrongly on Hopper"
            )
    return None


class Sizes(NamedTuple):
    """The sizes of q: [B, T, H, K] and v: [B, T, H, V]; `short`: products take bfloat16."""

    batch: int
    length: int
    heads: int
    keys: int
    values: int
    short: bool
    chunk: int  # tokens

    @property
    def chunks(self):
        return cdiv(self.length, self.chunk)

    @property
    def levels(self):
        """Number of times that a chunk can be halved, down to single tokens."""
        return self.chunk.bit_length() - 1

    @property
    def state_shape(self):
        return self.batch, self.heads, self.keys, self.values

    @property
    def sums(self):
        """The shapes of the total and the decay of a segment, for all heads."""
        return self.state_shape, self.state_shape[:3]

    @property
    def programs(self):
        """Number of chunks of all heads, one program each."""
        return self.batch * self.heads * self.chunks

    @property
    def numbers(self):
        """T, H, K, V: the sizes in the order in which kernels take them."""
        return self.length, self.heads, self.keys, self.values


class Blocks(NamedTuple):
    """Channels of keys and of values that a program takes at a time, and its launch options."""

    BLOCK_K: int
    BLOCK_V: int
    num_warps: int
    num_stages: int = 1
    maxnreg: int | None = None

    def options(self, sizes):
        """Constants and options of a launch; blocks shrink for heads of few channels."""
        return _options(self, sizes.keys, sizes.values)


@functools.lru_cache(maxsize=1024)
def _options(blocks, keys, values):
    """`Blocks.options`, a dictionary that callers copy."""
    block_k, block_v = block(keys, blocks.BLOCK_K), block(values, blocks.BLOCK_V)
    return blocks._replace(BLOCK_K=block_k, BLOCK_V=block_v)._asdict()


candidate_blocks = candidates_of(Blocks)


def sizes_of(q, k, v, chunk=64, chunk_of_float32=32):
    """The `Sizes` of q, k (or None) and v. Only bfloat16 tensors are `short`.

    Other tensors get shorter chunks: the parts into which float32 is split (`products.py`) take
    registers and shared memory.
    """
    short = all(x is None or dtype_name(x) == "bfloat16" for x in (q, k, v))
    batch, length, heads, keys = q.shape
    return Sizes(
        batch, length, heads, keys, v.shape[3], short, chunk if short else chunk_of_float32
    )


def block(size, largest):
    """The smallest power of two that is at least `size` and 16, but at most `largest`."""
    return min(largest, max(16, next_power_of_2(size)))


def gradient_of_state(initial):
    """The float32 `Array` of the gradient of an initial state; None without an initial state."""
    return None if initial is None else like(initial).astype("float32")


class TimeSplit(NamedTuple):
    """Number of segments of the time axis, chunks of a segment, and subsegments of a segment.

    A subsegment has a total and a decay. All have the same number of chunks.
    """

    segments: int
    segment_chunks: int
    subsegments: int = 1


def max_segments(programs, chunks, full=_FULL_GPU_PROGRAMS):
    """Maximum number of segments: one if programs fill the GPU, else all segments stay long."""
    if programs >= full:
        return 1
    return max(1, min(2 * _FULL_GPU_PROGRAMS // programs, chunks // _SHORTEST_SEGMENT))


def even_split(programs, chunks):
    """The `TimeSplit` into as many segments as fill the GPU."""
    segment_chunks = cdiv(chunks, max_segments(programs, chunks))
    return TimeSplit(cdiv(chunks, segment_chunks), segment_chunks)


def walk_segments(
    kernel, sizes, programs, tensors, outputs, options, *, numbers=(), sums=None, split=None,
    sum_options=None,
):  # fmt: skip
    """Runs a kernel that goes through the chunks of each segment; returns its outputs.

    The kernel's arguments are the tensors, a total and a decay of each subsegment of all segments
    but the last, the outputs, T, H, K, V, the numbers, the number of all chunks, and the number of
    chunks of a segment. With several segments, a first launch writes only totals and decays. In a
    second launch, each segment computes its initial state from them.

    Args:
        sizes: the `Sizes` of the tensors.
        programs: integer, number of programs of a segment.
        numbers: tuple of further arguments of the kernel.
        sums: shapes of a total and a decay. None: `Sizes.sums`.
        split: a `TimeSplit`. None: `even_split`.
        sum_options: dictionary of options that replace those of the same name in the first launch.
    """

    segments, segment_chunks, subsegments = split or even_split(programs, sizes.chunks)
    numbers = *sizes.numbers, *numbers, sizes.chunks, segment_chunks

    def walk(count, inputs, outputs, options=options):
        return run(Launch(kernel, programs * count, inputs, outputs, numbers, options))

    segment_sums = None, None
    if segments > 1:
        computed = (segments - 1) * subsegments
        arrays = (Array((computed, *shape), "float32") for shape in sums or sizes.sums)
        written = *arrays, *[None] * len(outputs)
        segment_sums = walk(computed, tensors, written, options | (sum_options or {}))[:2]
    return walk(segments, (*tensors, *segment_sums), outputs)


@triton.jit
def locate_segment(tiles, chunks, segment_chunks, ALL: tl.constexpr, subsegments=1):
    """Returns the number of segments, this program's segment and head, and the number of heads.

    Heads are counted over the batch. ALL: the launch goes through all segments; otherwise it goes
    through the subsegments of all segments but the last, and the second value is a subsegment.
    """
    segments = tl.cdiv(chunks, segment_chunks)
    computed = segments if ALL else (segments - 1) * subsegments
    segment = tl.program_id(0) // tiles % computed
    head = tl.program_id(0) // tiles // computed
    return segments, segment, head, tl.num_programs(0) // tiles // computed


@triton.jit
def state_before_segment(
    initial, totals, decays, offsets, valid, place, d, K, V, AXIS: tl.constexpr
):
    """The state before a segment, in float32, from the initial one and earlier segments, or Nones.

    totals, decays: [segments, heads, K, V] and [segments, heads, K]. offsets, valid: addresses of a
    tile of the state, and a mask. place: the results of `locate_segment`. AXIS: the axis along
    which decays are equal.
    """
    _, segment, head, heads = place
    state = tl.zeros(offsets.shape, tl.float32)
    if initial is not None:
        state = tl.load(initial + head.to(tl.int64) * K * V + offsets, valid, other=0.0)
        state = state.to(tl.float32)
    if totals is not None:
        for s in range(segment):
            line = (s * heads + head).to(tl.int64) * K
            segment_decay = tl.load(decays + line + d, d < K, other=0.0)
            total = tl.load(totals + line * V + offsets, valid, other=0.0)
            state = tl.expand_dims(segment_decay, AXIS) * state + total
    return state


@triton.jit
def store_after_segment(
    state, decay, final, totals, decays, offsets, valid, place, d, K, V, ALL: tl.constexpr
):
    """Stores the final state, or, unless ALL, the total and the decay of a segment."""
    segments, segment, head, heads = place
    if not ALL:
        line = (segment * heads + head).to(tl.int64) * K
        tl.store(totals + line * V + offsets, state, valid)
        tl.store(decays + line + d, decay, d < K)
    elif final is not None and segment == segments - 1:
        tl.store(final + head.to(tl.int64) * K * V + offsets, state, valid)


@triton.jit
def real_tokens(chunk, token_kind, b, T, CHUNK: tl.constexpr):
    """Masks of the tokens of a chunk that exist and are not padding, and that start a document."""
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    real = t < T
    starts = tl.full((CHUNK,), False, tl.int1)
    if token_kind is not None:
        kind = tl.load(token_kind + b.to(tl.int64) * T + t, real, other=PADDING)
        real = kind != PADDING
        starts = kind == STARTS
    return real, starts


@triton.jit
def load_tokens(tensor, row, real, d, D, H):
    """Loads [CHUNK, BLOCK_D] in float32; 0 for padding and beyond the tensor.

    tensor: a pointer into [B, T, H, D] to the chunk's first token.
    """
    offsets = row[:, None] * (H * D) + d[None, :]
    return tl.load(tensor + offsets, real[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
