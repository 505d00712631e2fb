"""The state of sliding window attention: a circular KV buffer of each document's last tokens.

The token at position p of its document is in slot p % C. position: int32 [B], the position of the
next token. end: int32 [B], the index after the last token among the S keys of a sequence.
"""

import triton
import triton.language as tl

from .._runtime.framework import run
from .._runtime.launch import Array, Launch, cdiv, dtype_name, next_power_of_2
from .attention_tiles import load_rows, store_rows

SLOTS = 32  # slots of a program


@triton.jit
def buffer_slots(s, b, position, end, C):
    """The slots of the tokens at indices s of sequence b, and a mask of those in the buffer."""
    next_position = tl.load(position + b)
    age = tl.load(end + b) - 1 - s
    slot = (next_position - 1 - age) % C
    return slot.to(tl.int64), (age >= 0) & (age < tl.minimum(next_position, C))


@triton.jit(do_not_specialize=["S", "C"])
def fill_buffers_kernel(
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
    slot_rows = slot.to(tl.int64) * G
    next_position = tl.load(position + b)
    age = (next_position - 1 - slot + C) % C
    s = (tl.load(end + b) - 1 - age).to(tl.int64)
    filled = (age < next_position) & (slot < C)
    row, buffer_base = b.to(tl.int64) * S * G + g, b.to(tl.int64) * C * G + g
    x = load_rows(keys, row, s * G, filled, K, BLOCK_K, tl.float32)
    store_rows(key, buffer_base, slot_rows, slot < C, x, K, BLOCK_K)
    x = load_rows(values, row, s * G, filled, V, BLOCK_V, tl.float32)
    store_rows(value, buffer_base, slot_rows, slot < C, x, V, BLOCK_V)


def fill_buffers(keys, values, position, end, capacity):
    """Buffers [B, capacity, G, ...] from keys and values [B, S, G, ...]; 0 in empty slots."""
    batch, num_positions, groups, _ = keys.shape
    buffers = [Array((batch, capacity, *x.shape[2:]), dtype_name(x)) for x in (keys, values)]
    programs = batch * groups * cdiv(capacity, SLOTS)
    options = {"K": keys.shape[3], "V": values.shape[3], "SLOTS": SLOTS}
    options |= {f"BLOCK_{name}": next_power_of_2(options[name]) for name in ("K", "V")}
    numbers = num_positions, groups, capacity
    inputs = keys, values, position, end
    return run(Launch(fill_buffers_kernel, programs, inputs, tuple(buffers), numbers, options))
