"""What the kernels of linear attention share: sizes, tiles, and how they load a chunk of tokens."""

from typing import NamedTuple

import triton
import triton.language as tl

from .._device import common
from .._device.tokens import PADDING, STARTS
from .._runtime import framework
from .._runtime.framework import run
from .._runtime.launch import Array, Launch, dtype_name, like

_LARGEST_HEAD = 256
_SMALLEST_TILE = 32  # channels; larger heads may end within a tile (flash-linear-attention, #1241)
_ENOUGH_PROGRAMS = common.MULTIPROCESSORS
_SHORTEST_SEGMENT = 8  # chunks


def unsupported_reason(*tensors):
    """Reason why the kernels cannot take tensors, of which q, k, v are the first, or None."""
    reason = framework.unsupported_reason(*tensors)
    if reason is not None:
        return reason
    for tensor in (tensors[0], tensors[2]):
        size = tensor.shape[3]
        if size > _LARGEST_HEAD:
            return f"takes heads of up to {_LARGEST_HEAD} channels, got {size}"
        if size > _SMALLEST_TILE and size % 2 and tensor.dtype.itemsize == 2:
            return (
                f"needs an even number of channels a head, got {size}: Triton compiles odd tails "
                "of 16-bit tensors wrongly on Hopper"
            )
    return None


class Sizes(NamedTuple):
    """Those of q: [B, T, H, K] and v: [B, T, H, V], and `short`, the precision of products."""

    batch: int
    length: int
    heads: int
    keys: int
    values: int
    short: bool
    chunk: int  # tokens

    @property
    def chunks(self):
        return triton.cdiv(self.length, self.chunk)

    @property
    def levels(self):
        """How often a chunk can be halved, down to single tokens."""
        return self.chunk.bit_length() - 1

    @property
    def state_shape(self):
        return self.batch, self.heads, self.keys, self.values

    @property
    def programs(self):
        """How many chunks all heads have, of which each is a program's."""
        return self.batch * self.heads * self.chunks

    @property
    def numbers(self):
        """T, H, K, V: the sizes in the order in which kernels take them."""
        return self.length, self.heads, self.keys, self.values


class Blocks(NamedTuple):
    """How many channels of keys and of values a program takes at a time, and its launch options."""

    BLOCK_K: int
    BLOCK_V: int
    num_warps: int
    num_stages: int = 1
    maxnreg: int | None = None

    def options(self, sizes):
        """Arguments of a launch; blocks shrink for heads of few channels."""
        return {
            "BLOCK_K": block(sizes.keys, self.BLOCK_K),
            "BLOCK_V": block(sizes.values, self.BLOCK_V),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.maxnreg,
        }


def sizes_of(q, k, v, chunk=64, chunk_of_float32=32):
    """The `Sizes` of q, k (or None) and v. Only bfloat16 tensors are `short`.

    Others get shorter chunks, as the parts that float32 is split into (`products.py`) need room.
    """
    short = all(x is None or dtype_name(x) == "bfloat16" for x in (q, k, v))
    batch, length, heads, keys = q.shape
    return Sizes(
        batch, length, heads, keys, v.shape[3], short, chunk if short else chunk_of_float32
    )


def block(size, largest):
    """The smallest power of two from 16 on that holds `size`, at most `largest`."""
    return min(largest, max(16, triton.next_power_of_2(size)))


def gradient_of_state(initial):
    """The `Array` for the gradient of an initial state, in float32; None where there is none."""
    return None if initial is None else like(initial).with_dtype("float32")


class Cut(NamedTuple):
    """How many segments time is cut into, the chunks of each, and in how many pieces each has sums.

    Pieces have the same number of chunks.
    """

    segments: int
    segment_chunks: int
    pieces: int = 1


def most_segments(programs, chunks):
    """How many segments time may be cut into: one where programs fill the GPU, else none short."""
    if programs >= _ENOUGH_PROGRAMS:
        return 1
    return max(1, min(2 * _ENOUGH_PROGRAMS // programs, chunks // _SHORTEST_SEGMENT))


def segments_of(programs, chunks):
    """The `Cut` of time into so many segments, so that the whole GPU works."""
    segment_chunks = triton.cdiv(chunks, most_segments(programs, chunks))
    return Cut(triton.cdiv(chunks, segment_chunks), segment_chunks)


def walk_segments(
    kernel, chunks, programs, tensors, outputs, sums, numbers, options, cut=None, of_sums=None
):
    """Runs a kernel that goes through the chunks of each segment; returns what it writes.

    Its arguments are the tensors, a total and a decay of each piece of all segments but the last,
    the outputs, the numbers, and how many chunks there are in all and in a segment. With several
    segments, a first launch writes the totals and decays alone, from which each segment of a second
    one finds the state that it starts from.

    Args:
        programs: how many programs go through a segment.
        sums: the shapes of a piece's total and decay, for all heads.
        cut: a `Cut`; None for that of `segments_of`.
        of_sums: options of the first launch in place of others.
    """

    segments, segment_chunks, pieces = cut or segments_of(programs, chunks)
    numbers = *numbers, chunks, segment_chunks

    def walk(count, inputs, outputs, options=options):
        return run(Launch(kernel, programs * count, inputs, outputs, numbers, options))

    found = None, None
    if segments > 1:
        computed = (segments - 1) * pieces
        arrays = (Array((computed, *shape), "float32") for shape in sums)
        written = *arrays, *[None] * len(outputs)
        found = walk(computed, tensors, written, options | (of_sums or {}))[:2]
    return walk(segments, (*tensors, *found), outputs)


@triton.jit
def locate_segment(tiles, chunks, segment_chunks, ALL: tl.constexpr, pieces=1):
    """How many segments there are, this program's one, its head, and how many heads, of all rows.

    ALL: whether the launch goes through all segments, or through the pieces of all but the last;
        then the program's one is a piece.
    """
    segments = tl.cdiv(chunks, segment_chunks)
    computed = segments if ALL else (segments - 1) * pieces
    segment = tl.program_id(0) // tiles % computed
    head = tl.program_id(0) // tiles // computed
    return segments, segment, head, tl.num_programs(0) // tiles // computed


@triton.jit
def real_tokens(chunk, token_kind, b, T, CHUNK: tl.constexpr):
    """Which tokens of a chunk exist and are no padding, and which of them start a document."""
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
    """[CHUNK, BLOCK_D] in float32; 0 for padding and beyond the tensor.

    tensor: a pointer into [B, T, H, D] to the chunk's first token.
    """
    offsets = row[:, None] * (H * D) + d[None, :]
    return tl.load(tensor + offsets, real[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
