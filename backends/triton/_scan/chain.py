"""A linear recurrence over tiles that run at the same time, in one pass over memory.

The tiles of some channels of a row, from the first token to the last, are a chain. A program
computes what its tile does to a state, as the pair (decay, total) of

    state_after = decay * state_before + total,

waits for the state that the tile before it leaves, publishes its own, and only then computes the
output of its tokens. They are read from device memory once, and again from a cache. Each tile adds
the time of a trip to the L2 cache to its chain.

States travel through the array `carry`, whose zeros say that nothing has arrived: no flag and no
memory fence is needed. The bits of a float32 number are stored inverted. Those that would be zero
then are of a NaN that arithmetic does not produce.

A tile waits only for programs with smaller numbers. The GPU starts programs in the order of their
numbers, so those are running or done. The order of all sums is fixed: the same inputs give the same
bits.
"""

import triton
import triton.language as tl

from .._runtime import search
from .._runtime.framework import run
from .._runtime.launch import Array, Launch, like

# What caches are told of numbers that are read again, read for the last time, and only written:
# else tensors that go by push tiles out of them that programs are about to read again.
READ_AGAIN, READ_LAST = tl.constexpr("evict_last"), tl.constexpr("evict_first")
WRITTEN, NOTHING_SAID = tl.constexpr(".cs"), tl.constexpr("")
_EMPTY = tl.constexpr(0)
_NAN = tl.constexpr(0x7FC00000)


def launch_chains(name, kernel, tilings, tensors, outputs, channel_sums=False):
    """Runs `kernel` once for each tile of each chain, with tiles from `tilings` (`search.py`).

    Its arguments are the tensors (or Nones), the outputs, of which the first is [B, T, D], the
    scratch memory, B, T, D, the number of tiles in a chain, and the tile's sizes. Scratch memory is
    `carry`, and before it, with `channel_sums`, float32 [tiles * B, D], where a tile stores one sum
    for each channel. Returns the outputs, and with `channel_sums` the total [D] of these sums.
    """
    batch, length, width = outputs[0].shape

    def launch(tile):
        tile = tile.fitted(length, width)
        tiles = triton.cdiv(length, tile.tokens)
        sums = [Array((tiles * batch, width), "float32")] if channel_sums else []
        carry = Array((max(1, tiles - 1), batch, width), "int32", zeros=True)
        programs = tiles * batch * triton.cdiv(width, tile.BLOCK_D)
        *found, _ = run(
            Launch(
                kernel,
                programs,
                tensors,
                (*outputs, *sums, carry),
                (batch, length, width, tiles),
                tile._asdict(),
            )
        )
        return (*found[:-1], found[-1].sum(0)) if channel_sums else tuple(found)

    sizes = {"batch": batch, "length": length, "width": width}
    return search.run(name, tilings.candidates(batch, width), launch, tensors, sizes)


def state_of(x):
    """[B, D] in float32: the final state of x [B, T, D], or the gradient of the initial one."""
    batch, _, width = x.shape
    return Array((batch, width), "float32")


def new_outputs(x):
    """[B, T, D] in x's dtype for the outputs, and the final state."""
    return like(x), state_of(x)


@triton.jit
def locate_program(B, D, BLOCK_D: tl.constexpr):
    """The tile, the row of the batch and the channels of this program."""
    blocks = tl.cdiv(D, BLOCK_D)
    chain = tl.program_id(0) % (B * blocks)
    d = chain % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    return tl.program_id(0) // (B * blocks), chain // blocks, d


@triton.jit
def _compose(decay, total, next_decay, next_total):
    """One step after another, as one step."""
    return decay * next_decay, next_decay * total + next_total


@triton.jit
def _append(decay, total, last_decay, last_total, decay_2, total_2, last_decay_2, last_total_2):
    """The operator of an exclusive scan over groups.

    An operand is a run of groups: the step of all but its last group, and that of its last group.
    """
    decay, total = _compose(decay, total, last_decay, last_total)
    decay, total = _compose(decay, total, decay_2, total_2)
    return decay, total, last_decay_2, last_total_2


@triton.jit
def _publish(pointers, state, valid):
    bits = ~state.to(tl.int32, bitcast=True)
    tl.store(pointers, tl.where(bits == _EMPTY, ~_NAN, bits), valid)


@triton.jit
def _wait_for(pointers, valid):
    """The published numbers, once all of them have arrived.

    Each number must be polled by exactly one thread: of two that poll the same one, one may leave
    before it arrived and the other after. That holds because tiles that wait are full ones, which
    have at least as many numbers as threads, even where rows have no more than 16 channels.
    """
    bits = tl.load(pointers, valid, other=-1, volatile=True)
    while tl.max(tl.max((bits == _EMPTY).to(tl.int32), 1), 0) != 0:
        bits = tl.load(pointers, valid, other=-1, volatile=True)
    return (~bits).to(tl.float32, bitcast=True)


@triton.jit
def _receive_and_publish(
    decay, total, initial, final, carry, B, D, tile, tiles, b, d, GROUPS: tl.constexpr
):  # fmt: skip
    """The states before the tile and after each group.

    decay, total: what the tile does to a state up to the end of each group.
    initial, final: [B, D], the states before the first tile (or None) and after the last one.
    """
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
def states_before_groups(
    decay, total, initial, final, carry, B, D, tile, tiles, b, d, GROUPS: tl.constexpr
):  # fmt: skip
    """The state before each group, given what each group does to a state."""
    one, zero = tl.full(decay.shape, 1.0, tl.float32), tl.zeros_like(total)
    decay_before, total_before, decay, total = tl.associative_scan(
        (one, zero, decay, total), 0, _append
    )
    decay, total = _compose(decay_before, total_before, decay, total)
    state_before, _ = _receive_and_publish(
        decay, total, initial, final, carry, B, D, tile, tiles, b, d, GROUPS
    )
    return decay_before * state_before + total_before


@triton.jit
def states_before_next_groups(
    decay, total, initial, final, carry, B, D, tile, tiles, b, d, GROUPS: tl.constexpr
):  # fmt: skip
    """Returns the next group's index, so that a thread may go on there, and the state before it.

    The last group's next one is the first. This scan takes half the work of that in
    `states_before_groups`, which a thread needs that keeps its tokens in registers.
    """
    decay, total = tl.associative_scan((decay, total), 0, _compose)
    state_before, state_after = _receive_and_publish(
        decay, total, initial, final, carry, B, D, tile, tiles, b, d, GROUPS
    )
    group = tl.arange(0, GROUPS)[:, None]
    is_last = group == GROUPS - 1
    return tl.where(is_last, 0, group + 1), tl.where(is_last, state_before, state_after)


@triton.jit
def load_previous_output(h, initial, start, row, b, d, d_valid, D):
    """h_{t-1} of the token t = start + row, where h points at the token `start`."""
    t = start + row
    previous = tl.load(h + (row - 1) * D + d, (t > 0) & d_valid, other=0.0).to(tl.float32)
    if initial is not None:
        previous += tl.load(initial + b.to(tl.int64) * D + d + t * 0, (t == 0) & d_valid, other=0.0)
    return previous
