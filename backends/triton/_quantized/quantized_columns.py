"""Which columns threads have sums of, and what those of several come to: see `quantized_products`.

Of four threads that follow one another, the first two have sums of a word's columns with what the
lower half of the warp holds of the row, the others those of the same columns with the upper half's.
"""

import triton
import triton.language as tl


@triton.jit
def _own(total, thread, SETS: tl.constexpr, LIMBS: tl.constexpr):
    """A thread's total in units of the row's last byte; 0 if it is none of its channels'."""
    lower = (thread & 2) == 0  # has the sums of the lower half of the warp
    if SETS == 2:
        total = tl.where(lower == ((thread & 16) == 0), total, total * 0)
    elif LIMBS == 2:
        total = tl.where(lower, total * 256.0, total)
    elif LIMBS == 3:
        total = tl.where(lower, total, total * (1.0 / 256))
    return total


@triton.jit
def _added_4(a, b, c, d, a_2, b_2, c_2, d_2):
    return a + a_2, b + b_2, c + c_2, d + d_2


@triton.jit
def _added_8(a, b, c, d, e, f, g, h, a_2, b_2, c_2, d_2, e_2, f_2, g_2, h_2):
    return a + a_2, b + b_2, c + c_2, d + d_2, e + e_2, f + f_2, g + g_2, h + h_2


@triton.jit
def _other_half(value):
    """What the thread two lanes away has, which has sums of the same columns."""
    return tl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 2, 31, 0xffffffff;",
        "=r,r",
        [value.to(tl.int32, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    ).to(value.dtype, bitcast=True)


@triton.jit
def of_all_threads(
    sums,
    thread,
    WARPS: tl.constexpr,
    ACROSS: tl.constexpr,
    LIMBS: tl.constexpr,
    SIXTEENTHS: tl.constexpr,
):
    """The sums of threads that have the same columns, float32 [4 ACROSS] each: `columns_of`.

    SIXTEENTHS: whether those of odd columns are 16 times as large as they should be.

    Threads that are no neighbors exchange theirs before: in Triton 3.7.1 sums along an axis that is
    some bits of a lane's number were wrong where these bits did not follow one another.
    """
    parts = ()
    for u in tl.static_range(len(sums)):
        own = _own(sums[u], thread, 8 // ACROSS, LIMBS)
        both = own + _other_half(own)
        parts = parts + (tl.reshape(both, (WARPS * 8 // ACROSS, 4 * ACROSS)),)
    # Up to eight at once, so that threads wait for each other once.
    totals = ()
    if len(sums) == 4:
        totals = tl.reduce(parts, 0, _added_4)
    else:
        for u in tl.static_range(0, len(sums), 8):
            several = ()
            for i in tl.static_range(8):
                several = several + (parts[u + i],)
            totals = totals + tl.reduce(several, 0, _added_8)
    found = ()
    for u in tl.static_range(len(sums)):
        total = totals[u].to(tl.float32)
        found = found + (total * (1.0 / 16) if SIXTEENTHS and u % 2 else total,)
    return found


@triton.jit
def columns_of(tile, BITS: tl.constexpr, ACROSS: tl.constexpr, WORDS: tl.constexpr):
    """The columns that `of_one_row` makes: a tuple of int32 [4 ACROSS], each column twice."""
    OF_A_WORD: tl.constexpr = 16 // BITS  # columns, of each half of it
    place = tl.arange(0, 4 * ACROSS)
    half = (tile * ACROSS + place // 4) * (2 * WORDS) + place % 2
    found = ()
    for u in tl.static_range(WORDS * OF_A_WORD):
        found = found + ((half + 2 * (u // OF_A_WORD)) * OF_A_WORD + u % OF_A_WORD,)
    return found
