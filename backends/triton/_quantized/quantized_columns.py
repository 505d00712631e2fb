"""Columns of a thread, and sums over the threads of a block: see `quantized_products`.

In each group of four consecutive threads, the first two hold sums of a word's columns with the part
of the row in the lower half of the warp, the other two with the part in the upper half.
"""

import triton
import triton.language as tl

from .quantized_row import instruct


@triton.jit
def _scale_total(total, thread, PRODUCT: tl.constexpr):
    """A thread's total in units of the row's lowest byte; 0 if its channels do not belong to it."""
    lower = (thread & 2) == 0  # has the sums of the lower half of the warp
    if PRODUCT.SETS == 2:
        total = tl.where(lower == ((thread & 16) == 0), total, total * 0)
    elif PRODUCT.LIMBS == 2:
        total = tl.where(lower, total * 256.0, total)
    elif PRODUCT.LIMBS == 3:
        total = tl.where(lower, total, total * (1.0 / 256))
    return total


@triton.jit
def _add_4(a, b, c, d, a_2, b_2, c_2, d_2):
    return a + a_2, b + b_2, c + c_2, d + d_2


@triton.jit
def _add_8(a, b, c, d, e, f, g, h, a_2, b_2, c_2, d_2, e_2, f_2, g_2, h_2):
    return a + a_2, b + b_2, c + c_2, d + d_2, e + e_2, f + f_2, g + g_2, h + h_2


@triton.jit
def _shuffle_half(value):
    """The value of the thread two lanes away, which has sums of the same columns."""
    word = value.to(tl.int32, bitcast=True)
    word = instruct("shfl.sync.bfly.b32 $0, $1, 2, 31, 0xffffffff;", "=r,r", (word,), False)
    return word.to(value.dtype, bitcast=True)


@triton.jit
def block_sum(sums, thread, PRODUCT: tl.constexpr):
    """Sums over the threads of a block: float32 [4 ACROSS] each, of the `column_indices`.

    Threads that are not neighbors exchange their sums first: in Triton 3.7.1, sums along an axis
    made of non-consecutive bits of the lane number were wrong.
    """
    # The sums of odd 4-bit columns are 16 times too large, unless blocks were scaled.
    SIXTEENTHS: tl.constexpr = PRODUCT.BITS == 4 and PRODUCT.BLOCK_SIZE == 0
    ROWS: tl.constexpr = PRODUCT.WARPS * PRODUCT.SETS
    partial = ()
    for u in tl.static_range(len(sums)):
        scaled = _scale_total(sums[u], thread, PRODUCT)
        pair_sum = scaled + _shuffle_half(scaled)
        partial = partial + (tl.reshape(pair_sum, (ROWS, 4 * PRODUCT.ACROSS)),)
    # Up to eight in one reduction, so that threads synchronize once.
    totals = ()
    if len(sums) == 4:
        totals = tl.reduce(partial, 0, _add_4)
    else:
        for u in tl.static_range(0, len(sums), 8):
            totals = totals + tl.reduce(partial[u : u + 8], 0, _add_8)
    results = ()
    for u in tl.static_range(len(sums)):
        total = totals[u].to(tl.float32)
        results = results + (total * (1.0 / 16) if SIXTEENTHS and u % 2 else total,)
    return results


@triton.jit
def column_indices(tile, PRODUCT: tl.constexpr):
    """The columns that `project_row` computes: a tuple of int32 [4 ACROSS], each column twice."""
    WORD_COLUMNS: tl.constexpr = 16 // PRODUCT.BITS  # columns of each half of a word
    slot = tl.arange(0, 4 * PRODUCT.ACROSS)
    half = (tile * PRODUCT.ACROSS + slot // 4) * (2 * PRODUCT.WORDS) + slot % 2
    results = ()
    for u in tl.static_range(PRODUCT.WORDS * WORD_COLUMNS):
        results = results + ((half + 2 * (u // WORD_COLUMNS)) * WORD_COLUMNS + u % WORD_COLUMNS,)
    return results
