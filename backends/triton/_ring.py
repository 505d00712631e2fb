"""The ring of a document's last tokens, as in `backends/torch/_ring.py`, in one go over both parts.

The token at position p lies in slot p mod C. position, end: int32 [B], the position of the token to
come, and the place in the row behind the last one.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton._attention_tiles import read, write

SLOTS = 32


@triton.jit
def kept_slots(s, b, position, end, C):
    """In which slots the tokens at places s of a row lie, and which of them are kept at all."""
    to_come = tl.load(position + b)
    age = tl.load(end + b) - 1 - s
    slot = (to_come - 1 - age) % C
    return slot.to(tl.int64), (age >= 0) & (age < tl.minimum(to_come, C))


@triton.jit(do_not_specialize=["S", "C"])
def to_rings_kernel(
    keys,
    values,
    position,
    end,
    key,
    value,
    S,
    G,
    C,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SLOTS: tl.constexpr,
):
    blocks = tl.cdiv(C, SLOTS)
    b, g = tl.program_id(0) // blocks // G, tl.program_id(0) // blocks % G
    slot = tl.program_id(0) % blocks * SLOTS + tl.arange(0, SLOTS)
    at = slot.to(tl.int64) * G
    to_come = tl.load(position + b)
    age = (to_come - 1 - slot + C) % C
    s = (tl.load(end + b) - 1 - age).to(tl.int64)
    filled = (age < to_come) & (slot < C)
    row, ring = b.to(tl.int64) * S * G + g, b.to(tl.int64) * C * G + g
    x = read(keys, row, s * G, filled, K, BLOCK_K, tl.float32)
    write(key, ring, at, slot < C, x, K, BLOCK_K)
    x = read(values, row, s * G, filled, V, BLOCK_V, tl.float32)
    write(value, ring, at, slot < C, x, V, BLOCK_V)


def to_rings(keys, values, position, end, capacity):
    """Of rows [B, S, G, ...], the rings [B, capacity, G, ...]."""
    batch, places, groups, _ = keys.shape
    rings = [x.new_empty(batch, capacity, *x.shape[2:]) for x in (keys, values)]
    sizes = keys.shape[3], values.shape[3]
    if capacity:
        to_rings_kernel[(batch * groups * triton.cdiv(capacity, SLOTS),)](
            keys,
            values,
            position,
            end,
            *rings,
            places,
            groups,
            capacity,
            *sizes,
            *(triton.next_power_of_2(n) for n in sizes),
            SLOTS=SLOTS,
        )
    return rings
