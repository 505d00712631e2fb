"""What the Triton kernels of linear attention share: sizes, and how they read a chunk of time."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from keras_recurrent.backends.triton import _common

_LARGEST_HEAD = 256
_SMALLEST_TILE = 32  # channels; what is larger may have a tail (flash-linear-attention, #1241)
_ENOUGH_PROGRAMS = 128  # about one for each multiprocessor of a large GPU
_SHORTEST_SEGMENT = 8  # chunks


def refusal(*tensors):
    """Why the kernels refuse q, k, v and others (or Nones); None if they accept them."""
    reason = _common.refusal(*tensors)
    if reason is not None:
        return reason
    for tensor in (tensors[0], tensors[2]):
        size = tensor.shape[3]
        if size > _LARGEST_HEAD:
            return f"takes heads of up to {_LARGEST_HEAD} channels, got {size}"
        if size > _SMALLEST_TILE and size % 2 and tensor.element_size() == 2:
            return f"Triton compiles odd tails of 16 bits wrongly on Hopper, got heads of {size}"
    return None


class Heads(NamedTuple):
    """Sizes of q: [B, T, H, K] and v: [B, T, H, V], and how numbers meet in products."""

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
        """Halves of 1, 2, 4 ... tokens make up a chunk."""
        return self.chunk.bit_length() - 1

    @property
    def state_shape(self):
        return self.batch, self.heads, self.keys, self.values

    @property
    def programs(self):
        """One for each chunk of each head."""
        return self.batch * self.heads * self.chunks

    @property
    def numbers(self):
        """As the kernels take them."""
        return self.length, self.heads, self.keys, self.values


class Blocks(NamedTuple):
    """How many channels of keys and of values a program works on at a time, and its options."""

    BLOCK_K: int
    BLOCK_V: int
    num_warps: int
    num_stages: int = 1
    maxnreg: int | None = None

    def options(self, sizes):
        """As a kernel takes them: less where there is less."""
        return {
            "BLOCK_K": block(sizes.keys, self.BLOCK_K),
            "BLOCK_V": block(sizes.values, self.BLOCK_V),
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.maxnreg,
        }


def heads_of(q, k, v, chunk=64, chunk_of_float32=32):
    """Tensors of bfloat16 take `chunk` tokens at a time, others as many as their parts allow."""
    short = all(x is None or x.dtype == torch.bfloat16 for x in (q, k, v))
    batch, length, heads, keys = q.shape
    return Heads(
        batch, length, heads, keys, v.shape[3], short, chunk if short else chunk_of_float32
    )


def block(size, largest):
    """A power of two that holds `size`, or the largest one."""
    return min(largest, max(16, triton.next_power_of_2(size)))


def segments_of(programs, chunks):
    """Into how many segments of how many chunks each to cut time, so that all of a GPU works."""
    segments = 1
    if programs < _ENOUGH_PROGRAMS:
        segments = max(1, min(2 * _ENOUGH_PROGRAMS // programs, chunks // _SHORTEST_SEGMENT))
    each = triton.cdiv(chunks, segments)
    return triton.cdiv(chunks, each), each


def sums_of_segments(segments, last, decays_shape):
    """Memory for what each segment but the last does to a state: totals and decays, or Nones."""
    if segments == 1:
        return None, None
    return (last.new_empty((segments - 1, *shape)) for shape in (last.shape, decays_shape))


@triton.jit
def real_tokens(chunk, token_kind, b, T, CHUNK: tl.constexpr):
    """Which tokens of a chunk are there and no padding, and which of them start afresh."""
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    real = t < T
    starts = tl.full((CHUNK,), False, tl.int1)
    if token_kind is not None:
        kind = tl.load(token_kind + b.to(tl.int64) * T + t, real, other=2)
        real = kind != 2
        starts = kind == 1
    return real, starts


@triton.jit
def read(tensor, row, real, d, D, H):
    """[CHUNK, BLOCK_D] as float32, of a tensor [.., H, D] from its first token on; else 0."""
    at = row[:, None] * (H * D) + d[None, :]
    return tl.load(tensor + at, real[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
