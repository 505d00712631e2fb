"""A linear recurrence over tiles that run at the same time, in one pass over memory.

A program finds what its tile does to a state, the pair (decay, total) of
`after = decay * before + total`, waits for the state that the tile before it leaves, leaves its
own, and only then goes through its tokens for good: they are read from device memory once, and
again from a cache. To a chain of tiles, each adds the time of a trip to the L2 cache.

States travel through `carry`, float32 numbers as int32, filled with EMPTY at first: a number is
its own signal, and needs no fence. EMPTY is a NaN that no arithmetic makes.

A tile waits only for programs of a smaller number. The GPU starts programs in the order of their
numbers, so those run or have run. The order of all sums is fixed: the same inputs give the same
bits.
"""

import torch
import triton
import triton.language as tl

_EMPTY = tl.constexpr(-1)
_NAN = tl.constexpr(0x7FC00000)


def carry_between(tiles, batch, width, like):
    """Room for the states between the tiles of each chain."""
    return torch.full(
        (tiles - 1, batch, width), _EMPTY.value, dtype=torch.int32, device=like.device
    )


@triton.jit
def place(B, D, BLOCK_D: tl.constexpr):
    """Of this program: the tile, the row of the batch and the channels."""
    blocks = tl.cdiv(D, BLOCK_D)
    chain = tl.program_id(0) % (B * blocks)
    d = chain % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    return tl.program_id(0) // (B * blocks), chain // blocks, d


@triton.jit
def read_kind(token_kind, row, there):
    """The kinds of tokens, padding where there is none; None if all tokens go on."""
    kind = None
    if token_kind is not None:
        kind = tl.load(token_kind + row, there, other=2)
    return kind


@triton.jit
def _compose(decay, total, next_decay, next_total):
    return decay * next_decay, next_decay * total + next_total


@triton.jit
def _append(decay, total, last_decay, last_total, decay_2, total_2, last_decay_2, last_total_2):
    """Runs of groups, each as all but its last group and that one: a scan that excludes it."""
    decay, total = _compose(decay, total, last_decay, last_total)
    decay, total = _compose(decay, total, decay_2, total_2)
    return decay, total, last_decay_2, last_total_2


@triton.jit
def _leave(pointers, state, where):
    bits = state.to(tl.int32, bitcast=True)
    tl.store(pointers, tl.where(bits == _EMPTY, _NAN, bits), where)


@triton.jit
def _wait_for(pointers, inside):
    """Every thread polls the numbers that it needs itself, and all wait until all have come.

    Each number has one thread: tiles that wait are full ones, which have more of them than threads.
    Two threads that polled for the same one could leave with what they saw at different moments.
    """
    bits = tl.load(pointers, inside, other=0, volatile=True)
    while tl.max(tl.max((bits == _EMPTY).to(tl.int32), 1), 0) != 0:
        bits = tl.load(pointers, inside, other=0, volatile=True)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _hand_over(
    decay, total, first, last, carry, B, D, tile, tiles, b, d, GROUPS: tl.constexpr
):  # fmt: skip
    """The state before the tile, and after each group, given all that is done to it by then.

    first, last: [B, D], the state before the first tile, or None, and after the last one.
    """
    group = tl.arange(0, GROUPS)[:, None]
    end = group == GROUPS - 1
    inside = (group >= 0) & (d < D)[None, :]
    at = b * D + d[None, :] + group * 0
    slot = carry + tile.to(tl.int64) * B * D + at  # of the state after this tile
    if tile > 0:
        state = _wait_for(slot - B * D, inside)
    elif first is not None:
        state = tl.load(first + at, inside, other=0.0).to(tl.float32)
    else:
        state = tl.zeros_like(total)
    after = decay * state + total
    if tile < tiles - 1:
        _leave(slot, after, inside & end)
    else:
        tl.store(last + at, after, inside & end)
    return state, after


@triton.jit
def enter(
    decay, total, first, last, carry, B, D, tile, tiles, b, d, GROUPS: tl.constexpr
):  # fmt: skip
    """The state before each group, given what each group does to a state."""
    one, zero = tl.full(decay.shape, 1.0, tl.float32), tl.zeros_like(total)
    before_decay, before_total, decay, total = tl.associative_scan(
        (one, zero, decay, total), 0, _append
    )
    decay, total = _compose(before_decay, before_total, decay, total)
    state, _ = _hand_over(decay, total, first, last, carry, B, D, tile, tiles, b, d, GROUPS)
    return before_decay * state + before_total


@triton.jit
def enter_next(
    decay, total, first, last, carry, B, D, tile, tiles, b, d, GROUPS: tl.constexpr
):  # fmt: skip
    """A group to go on with, and the state before it: the group that follows, or the first one.

    That takes half the work of `enter`; whoever reads its tokens again need not stay with them.
    """
    decay, total = tl.associative_scan((decay, total), 0, _compose)
    state, after = _hand_over(decay, total, first, last, carry, B, D, tile, tiles, b, d, GROUPS)
    group = tl.arange(0, GROUPS)[:, None]
    end = group == GROUPS - 1
    return tl.where(end, 0, group + 1), tl.where(end, state, after)


@triton.jit
def output_before(h, first, start, row, b, d, inside, D):
    """h_{t-1} of the token t = start + row, where h points at the token `start`."""
    t = start + row
    before = tl.load(h + (row - 1) * D + d, (t > 0) & inside, other=0.0).to(tl.float32)
    if first is not None:
        before += tl.load(first + b * D + d + t * 0, (t == 0) & inside, other=0.0)
    return before
