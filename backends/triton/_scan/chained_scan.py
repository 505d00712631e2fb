"""A chained scan: a linear recurrence over concurrent tiles, in one pass over memory.

The tiles of some channels of a sequence, from the first token to the last, are a chain. A program
computes the effect of its tile on a state, as the pair (decay, total) of

    state_after = decay * state_before + total,

waits for the state after the previous tile, publishes its own state, and only then computes the
output of its tokens. Tokens are read from device memory once, and again from a cache. Each tile
adds the time of an L2 cache access to its chain.

States are passed in the array `carry`, where zero means that a state has not arrived: no flag and
no memory fence is needed. The bits of a float32 number are stored inverted. The only number whose
inverted bits are zero is a NaN that arithmetic does not produce.

A tile waits only for programs with smaller ids. The GPU starts programs in the order of their ids,
so these are running or finished. The order of all sums is fixed, so results are bit-identical for
equal inputs.
"""

import triton
import triton.language as tl

from .._runtime import search
from .._runtime.framework import run
from .._runtime.launch import Array, Launch, cdiv, like

# Cache policies for numbers that are read again, read for the last time, or only written: without
# them, streamed tensors evict tiles that programs are about to read again.
READ_AGAIN, READ_LAST = tl.constexpr("evict_last"), tl.constexpr("evict_first")
WRITTEN, DEFAULT_POLICY = tl.constexpr(".cs"), tl.constexpr("")
_EMPTY = tl.constexpr(0)
_NAN = tl.constexpr(0x7FC00000)


def launch_chained_scan(name, kernel, tilings, tensors, outputs, channel_sums=False):
    """Runs `kernel` once for each tile of each chain, with tiles from `tilings` (`search.py`).

    Its arguments are the tensors (or Nones), the outputs, of which the first is [B, T, D], the
    scratch memory, B, T, D, the number of tiles in a chain, and the tile's sizes. Scratch memory is
    `carry`; with `channel_sums`, float32 [tiles * B, D] precedes it, where a tile stores one sum
    for each channel. Returns the outputs, and with `channel_sums` the total [D] of these sums.
    """
    batch, length, width = outputs[0].shape

    def launch(tile):
        tile = tile.fitted(length, width)
        tiles = cdiv(length, tile.tokens)
        sums = [Array((tiles * batch, width), "float32")] if channel_sums else []
        carry = Array((max(1, tiles - 1), batch, width), "int32", zeros=True)
        programs = tiles * batch * cdiv(width, tile.BLOCK_D)
        results, numbers = (*outputs, *sums, carry), (batch, length, width, tiles)
        *arrays, _ = run(Launch(kernel, programs, tensors, results, numbers, tile.options))
        return (*arrays[:-1], arrays[-1].sum(0)) if channel_sums else tuple(arrays)

    sizes = {"batch": batch, "length": length, "width": width}
    return search.run(name, tilings.candidates(batch, width), launch, tensors, sizes)


def state_of(x):
    """The `Array` of a state of x [B, T, D], or of its gradient: [B, D] in float32."""
    batch, _, width = x.shape
    return Array((batch, width), "float32")


def new_outputs(x, *_):
    """The `Array`s of the outputs [B, T, D], in x's dtype, and of the final state."""
    return like(x), state_of(x)


@triton.jit
def locate_program(B, T, D, TILE: tl.constexpr, REVERSE: tl.constexpr):
    """The tile, the sequence, the channels and their mask, and two indices of the first token.

    The first index counts tokens of the sequence, the second one tokens of the batch.

    Args:
        REVERSE: True if the first token is the last one of the tile.
    """
    blocks = tl.cdiv(D, TILE.BLOCK_D)
    chain = tl.program_id(0) % (B * blocks)
    d = chain % blocks * TILE.BLOCK_D + tl.arange(0, TILE.BLOCK_D)
    tile, b = tl.program_id(0) // (B * blocks), chain // blocks
    d_valid = (d < D)[None, :]
    if REVERSE:
        start = T - 1 - tile * (TILE.GROUPS * TILE.ROWS)
    else:
        start = tile * (TILE.GROUPS * TILE.ROWS)
    return tile, b, d, d_valid, start, b.to(tl.int64) * T + start


@triton.jit
def compose(decay, total, next_decay, next_total):
    """Composes two consecutive steps into one."""
    return decay * next_decay, next_decay * total + next_total


@triton.jit
def _append(decay, total, last_decay, last_total, decay_2, total_2, last_decay_2, last_total_2):
    """The operator of an exclusive scan over groups.

    An operand describes consecutive groups: the step of all but the last group, and that of the
    last group.
    """
    decay, total = compose(decay, total, last_decay, last_total)
    decay, total = compose(decay, total, decay_2, total_2)
    return decay, total, last_decay_2, last_total_2


@triton.jit
def _publish(pointers, state, valid):
    bits = ~state.to(tl.int32, bitcast=True)
    tl.store(pointers, tl.where(bits == _EMPTY, ~_NAN, bits), valid)


@triton.jit
def _wait_for(pointers, valid):
    """Waits until all published numbers have arrived, and returns them.

    Each number must be polled by exactly one thread: of two threads that poll the same number, one
    may leave before it has arrived and the other after. This holds because tiles that wait are full
    ones, which have at least as many numbers as threads, even with only 16 channels.
    """
    bits = tl.load(pointers, valid, other=-1, volatile=True)
    while tl.max(tl.max((bits == _EMPTY).to(tl.int32), 1), 0) != 0:
        bits = tl.load(pointers, valid, other=-1, volatile=True)
    return (~bits).to(tl.float32, bitcast=True)


@triton.jit
def _receive_and_publish(decay, total, chain, GROUPS: tl.constexpr):
    """Receives the state before the tile and publishes the one after it.

    Returns the states before the tile and after each group.
    decay, total: the effect of the tile on a state up to the end of each group.
    chain: pointers and the program's place in its chain; `initial`, `final`: [B, D], the states
    before the first tile (or None) and after the last one.
    """
    initial, final, carry, B, D, tile, tiles, b, d = chain
    group = tl.arange(0, GROUPS)[:, None]
    is_last = group == GROUPS - 1
    valid = (group >= 0) & (d < D)[None, :]
    offsets = d[None, :] + group * 0
    row = b.to(tl.int64) * D
    states = carry + row + offsets
    slot = states + tile.to(tl.int64) * B * D  # of the state after this tile
    if tile > 0:
        state_before = _wait_for(states + (tile.to(tl.int64) - 1) * B * D, valid)
    elif initial is not None:
        state_before = tl.load(initial + row + offsets, valid, other=0.0).to(tl.float32)
    else:
        state_before = tl.zeros_like(total)
    state_after = decay * state_before + total
    if tile < tiles - 1:
        _publish(slot, state_after, valid & is_last)
    else:
        tl.store(final + row + offsets, state_after, valid & is_last)
    return state_before, state_after


@triton.jit
def states_before_groups(decay, total, chain, GROUPS: tl.constexpr):
    """The state before each group, from the effect of each group on a state."""
    one, zero = tl.full(decay.shape, 1.0, tl.float32), tl.zeros_like(total)
    decay_before, total_before, decay, total = tl.associative_scan(
        (one, zero, decay, total), 0, _append
    )
    decay, total = compose(decay_before, total_before, decay, total)
    state_before, _ = _receive_and_publish(decay, total, chain, GROUPS)
    return decay_before * state_before + total_before


@triton.jit
def states_before_next_groups(decay, total, chain, GROUPS: tl.constexpr):
    """Returns the next group's index, where a thread may continue, and the state before it.

    The first group follows the last one. This scan takes half the work of the one in
    `states_before_groups`, which is needed if a thread keeps its tokens in registers.
    """
    decay, total = tl.associative_scan((decay, total), 0, compose)
    state_before, state_after = _receive_and_publish(decay, total, chain, GROUPS)
    group = tl.arange(0, GROUPS)[:, None]
    is_last = group == GROUPS - 1
    return tl.where(is_last, 0, group + 1), tl.where(is_last, state_before, state_after)


@triton.jit
def load_previous_output(h, initial, start, row, b, d, d_valid, D):
    """Loads h_{t-1} for the tokens t = start + row; h points to the token `start`."""
    t = start + row
    previous = tl.load(h + (row - 1) * D + d, (t > 0) & d_valid, other=0.0).to(tl.float32)
    if initial is not None:
        previous += tl.load(initial + b.to(tl.int64) * D + d + t * 0, (t == 0) & d_valid, other=0.0)
    return previous
