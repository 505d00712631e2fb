"""Positions of the real tokens of a sequence, on which kernels of `causal_conv1d` work.

A real token's position is the number of real tokens before it in its sequence. The state has the
positions -W+1 to -1 of document 0, and padding has the positions after the real tokens. A small
kernel tabulates the token and the document of each position.
"""

import triton
import triton.language as tl

from .._device.tokens import PADDING, STARTS
from .._runtime.framework import run
from .._runtime.launch import Array, Launch, next_power_of_2

_BLOCK = 4096  # tokens that a program of the table reads at once


def tabulate_positions(token_kind):
    """The results of `positions_kernel`; Nones without kinds, where positions are tokens."""
    if token_kind is None:
        return (None,) * 4
    batch, length = token_kind.shape
    shapes = [(batch, length)] * 2 + [(batch,)] * 2
    outputs = tuple(Array(shape, "int32") for shape in shapes)
    options = {"BLOCK": min(_BLOCK, next_power_of_2(length))}
    return run(Launch(positions_kernel, batch, (token_kind,), outputs, (length,), options))


@triton.jit
def positions_kernel(
    token_kind, token_at, document_at, real_counts, start_counts, T, BLOCK: tl.constexpr
):
    """Stores the token and document of each position, [B, T], and two counts per sequence, [B].

    real_counts: real tokens. start_counts: tokens that start a document.
    """
    b = tl.program_id(0)
    row = b.to(tl.int64) * T
    num_real = 0
    num_starts = 0
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        kind = tl.load(token_kind + row + t, t < T, other=PADDING)
        real = (kind != PADDING).to(tl.int32)
        starts = (kind == STARTS).to(tl.int32)
        num_real_t = num_real + tl.cumsum(real, 0)
        position = tl.where(kind != PADDING, num_real_t - 1, T - 1 - (t - num_real_t))
        tl.store(token_at + row + position, t, t < T)
        tl.store(document_at + row + position, num_starts + tl.cumsum(starts, 0), t < T)
        num_real += tl.sum(real, 0)
        num_starts += tl.sum(starts, 0)
    tl.store(real_counts + b, num_real)
    tl.store(start_counts + b, num_starts)


@triton.jit
def locate_program(T, D, BLOCK_D: tl.constexpr, TILE: tl.constexpr, W: tl.constexpr):
    """The tile of TILE positions, the number of tiles, the sequence in the batch, the channels.

    A launch has one dimension: the other dimensions of a grid end at 65,535.
    """
    blocks, tiles = tl.cdiv(D, BLOCK_D), tl.cdiv(T + W - 1, TILE)
    rest = tl.program_id(0) // blocks
    d = (tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    return rest % tiles, tiles, rest // tiles, d


@triton.jit
def load_token_and_document(position, T, token_at, document_at, INSIDE: tl.constexpr):
    """Loads the token and the document at each position.

    token_at, document_at: pointers to the tables of a sequence.
    """
    t, document = position, position * 0
    if token_at is not None:
        valid = None if INSIDE else (position >= 0) & (position < T)
        other = None if INSIDE else 0
        t = tl.load(token_at + position, valid, other)
        document = tl.load(document_at + position, valid, other)
    return t, document


@triton.jit
def token_offsets(origin, i, t, D, d, token_at):
    """The offsets of tokens t; without tables, positions are tokens, i after those at `origin`."""
    if token_at is None:
        offsets = origin + i * D
    else:
        offsets = t.to(tl.int64) * D + d
    return offsets


@triton.jit
def sequence_sizes(b, T, positions):
    """The number of real tokens of a sequence, and the index of its last document.

    positions: the results of `positions_kernel`, or Nones.
    """
    num_real, last_document = T, 0
    if positions[2] is not None:
        num_real, last_document = tl.load(positions[2] + b), tl.load(positions[3] + b)
    return num_real, last_document
