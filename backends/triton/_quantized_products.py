"""RMSNorm(x) W of one row, with W of integers of 8 or 4 bits: see `norm_quantized_linear`.

Tensor cores multiply bytes, here m16n8k32: 16 x 32 numbers by 32 x 8. They want four channels of a
column in a word, where memory has four columns of a channel. So words are taken as they are: of the
32 numbers that are summed up, each channel has four, and the row's number of that channel stands in
one of them, in another one for each of four columns of the right operand. The other four of its
columns hold another byte of the row's numbers, or those of other channels.

A tensor has one number for each thread, so that an operation on it is one of each thread, and `mma`
and `shfl` may be among these. In a warp, `lane % 4` and, where ACROSS is 4, `lane // 16` say which
channels; the others read neighboring words of one.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton._ahead import wait_for_launch_before
from keras_recurrent.backends.triton._quantized_row import (
    bytes_of_row,
    four_numbers,
    permuted,
    words_at,
)

CHANNELS_OF_A_WARP = 64  # in a step, 16 of each thread; where ACROSS is 4, twice as many
_CHANNELS_OF_A_WARP = tl.constexpr(CHANNELS_OF_A_WARP)
_UPPER_SHORT = tl.constexpr(0xFFFF0000 - 2**32)  # masks of words, as int32
_UPPER_HALVES = tl.constexpr(0xF0F0F0F0 - 2**32)
_SIXTEENS = tl.constexpr(0x10101010)


@triton.jit
def _weight_words(pointer, WORDS: tl.constexpr):
    """Words of weights, which are read once.

    Through the read-only cache (ld.global.nc), the assembler would move loads behind the wait for
    the launch before.
    """
    return words_at(pointer, WORDS, "ld.global.L1::no_allocate.L2::128B")


@triton.jit
def _weights_of_four(
    kernel,
    channel,
    word,
    row_words,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Words of each of four channels from one on.

    Channels and columns behind the last ones are read as the last: the row has zeros for those
    channels, and sums of those columns are not written.
    """
    words = kernel.to(tl.pointer_type(tl.int32))
    found = ()
    for i in tl.static_range(4):
        place = words + tl.minimum(channel + i, K - 1) * row_words
        if VECTORS:
            found = found + _weight_words(place + tl.minimum(word, row_words - WORDS), WORDS)
        else:
            for w in tl.static_range(WORDS):
                found = found + (tl.load(place + tl.minimum(word + w, row_words - 1)),)
    return found


@triton.jit
def _weights(
    kernel,
    channel,
    word,
    row_words,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Words of the 16 channels that a thread has in a step."""
    found = ()
    for h in tl.static_range(4):
        found = found + _weights_of_four(
            kernel, channel + 16 * h, word, row_words, K, WORDS, VECTORS
        )
    return found


@triton.jit
def _products(a, b, c, d, row, row_2, before):
    """before [4], and the products of 16 rows of bytes, as one instruction's operands lie."""
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        [a, b, c, d, row, row_2, before[0], before[1], before[2], before[3]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _nothing(like, COUNT: tl.constexpr):
    """Zeros of COUNT instructions."""
    zero = like * 0
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + ((zero, zero, zero, zero),)
    return found


@triton.jit
def _two_rows_of_bytes(weights, i: tl.constexpr, g: tl.constexpr, BITS: tl.constexpr):
    """Of the words from the i-th on, two; of 4 bits 16 times even columns of one, and odd ones."""
    if BITS == 8:
        a, b = weights[i + 2 * g], weights[i + 2 * g + 1]
    else:
        a, b = (weights[i + g] << 4) & _UPPER_HALVES, weights[i + g] & _UPPER_HALVES
    return a, b


@triton.jit
def _of_two_channels(
    weights,
    row,
    i: tl.constexpr,
    h: tl.constexpr,
    selections,
    sums,
    row_sums,
    GROUPS: tl.constexpr,
    ROUNDS: tl.constexpr,
    WORDS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The sums, and 16 times those of the row alone, with the products of a thread's two channels.

    The i-th and the one behind it of the h-th four of a step.
    """
    found, of_row = (), ()
    for m in tl.static_range(ROUNDS):
        word = row[4 * m + h]
        zero = word * 0
        first, second = permuted(word, zero, selections[i]), permuted(word, zero, selections[i + 1])
        for g in tl.static_range(GROUPS):
            a, b = _two_rows_of_bytes(weights, (4 * h + i) * WORDS, g, BITS)
            c, d = _two_rows_of_bytes(weights, (4 * h + i + 1) * WORDS, g, BITS)
            found = found + (_products(a, b, c, d, first, second, sums[m * GROUPS + g]),)
        if BLOCK_SIZE:
            ones = zero + _SIXTEENS
            of_row = of_row + (_products(ones, ones, ones, ones, first, second, row_sums[m]),)
    return found, of_row


@triton.jit
def _of_columns(tensor, place, column, columns, VECTORS: tl.constexpr, WORDS: tl.constexpr):
    """Four scales or zero points of a block: in words, if VECTORS, or one each."""
    found = ()
    if VECTORS:
        first = tensor + place + tl.minimum(column, columns - 4)
        found = _weight_words(first, WORDS)
    else:
        for i in tl.static_range(4):
            found = found + (tl.load(tensor + place + tl.minimum(column + i, columns - 1)),)
    return found


@triton.jit
def _scale_and_zero(scales, zeros, i: tl.constexpr, VECTORS: tl.constexpr):
    """The i-th of four, float32 and int32."""
    if VECTORS:
        bits = scales[i // 2] & _UPPER_SHORT if i % 2 else scales[i // 2] << 16
        scale, zero = bits.to(tl.float32, bitcast=True), (zeros[0] << (24 - 8 * i)) >> 24
    else:
        scale, zero = scales[i].to(tl.float32), zeros[i].to(tl.int32)
    return scale, zero


@triton.jit
def _worth(thread, m: tl.constexpr, SETS: tl.constexpr, LIMBS: tl.constexpr):
    """What sums of a round are worth, for a thread that has them, and 0 for others, float32."""
    lower = (thread & 2) == 0  # has those of the lower half of the warp
    if SETS == 2:
        worth = tl.where(lower == ((thread & 16) == 0), 256.0 ** (LIMBS - 1 - m), 0.0)
    else:
        second = 256.0 ** (LIMBS - 2 - 2 * m) if 2 * m + 1 < LIMBS else 0.0
        worth = tl.where(lower, 256.0 ** (LIMBS - 1 - 2 * m), second)
    return worth


@triton.jit
def _in_order(four, BITS: tl.constexpr):
    """Four sums in the order of columns; the other way round as well.

    Instructions have those of two even columns of 4 bits before those of two odd ones.
    """
    return four if BITS == 8 else (four[0], four[2], four[1], four[3])


@triton.jit
def _of_threads_columns(
    sums, thread, SETS: tl.constexpr, LIMBS: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """A thread's sums in the order of columns: int32 of one limb, else float32."""
    found = ()
    for g in tl.static_range(GROUPS):
        four = ()
        for i in tl.static_range(4):
            if LIMBS == 1:
                total = tl.where(_worth(thread, 0, SETS, LIMBS) > 0, sums[g][i], 0)
            else:
                total = sums[g][i].to(tl.float32) * _worth(thread, 0, SETS, LIMBS)
            for m in tl.static_range(1, len(sums) // GROUPS):
                worth = _worth(thread, m, SETS, LIMBS)
                total += sums[m * GROUPS + g][i].to(tl.float32) * worth
            four = four + (total,)
        found = found + _in_order(four, BITS)
    return found


@triton.jit
def _of_a_block(
    sums,
    row_sums,
    scales,
    zeros,
    totals,
    thread,
    SETS: tl.constexpr,
    LIMBS: tl.constexpr,
    GROUPS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """The totals of a thread's columns with the sums of a block of channels, float32."""
    exact = ()
    for m in tl.static_range(len(row_sums)):
        for g in tl.static_range(GROUPS):
            of_zeros = ()
            for i in tl.static_range(4):
                _, zero = _scale_and_zero(scales[g], zeros[g], i, VECTORS)
                of_zeros = of_zeros + (zero * row_sums[m][0],)
            of_zeros = _in_order(of_zeros, 4)
            four = ()
            for i in tl.static_range(4):
                four = four + (sums[m * GROUPS + g][i] - of_zeros[i],)
            exact = exact + (four,)
    exact = _of_threads_columns(exact, thread, SETS, LIMBS, GROUPS, 4)
    found = ()
    for u in tl.static_range(4 * GROUPS):
        factor, _ = _scale_and_zero(scales[u // 4], zeros[u // 4], u % 4, VECTORS)
        found = found + (totals[u] + exact[u].to(tl.float32) * factor,)
    return found


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
def _of_all_threads(sums, WARPS: tl.constexpr, ACROSS: tl.constexpr):
    """The sums of threads that have the same columns, float32 [4 ACROSS] each: `columns_of`.

    Threads that are no neighbors exchange theirs before: in Triton 3.7.1 sums along an axis that is
    some bits of a lane's number were wrong where these bits did not follow one another.
    """
    parts = ()
    for u in tl.static_range(len(sums)):
        both = sums[u] + _other_half(sums[u])
        parts = parts + (tl.reshape(both, (WARPS * 8 // ACROSS, 4 * ACROSS)),)
    # All at once, so that threads wait for each other once.
    if len(sums) == 4:
        parts = tl.reduce(parts, 0, _added_4)
    else:
        parts = tl.reduce(parts, 0, _added_8)
    found = ()
    for u in tl.static_range(len(sums)):
        found = found + (parts[u].to(tl.float32),)
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


@triton.jit
def of_one_row(
    x,
    scale,
    kernels,
    kernel_scales,
    kernel_zeros,
    residual,
    tile,
    n,
    columns,
    epsilon,
    K: tl.constexpr,
    NORM: tl.constexpr,
    LIMBS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WARPS: tl.constexpr,
    ACROSS: tl.constexpr,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
    DEPTH: tl.constexpr,
    VECTORS: tl.constexpr,
    WHOLE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The sums of the columns n of each map, float32, what one is worth, and the residual.

    Weights of DEPTH steps are under way together, the first ones before the row is there; later
    ones take the registers of those that were multiplied. A thread makes integers
    of four channels in a step. Without blocks, sums of each byte of the row are exact.
    """
    SHORT: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    SETS: tl.constexpr = 8 // ACROSS
    ROUNDS: tl.constexpr = LIMBS if SETS == 2 else (LIMBS + 1) // 2
    SPAN: tl.constexpr = WARPS * SETS * _CHANNELS_OF_A_WARP
    GROUPS: tl.constexpr = WORDS * 4 // BITS  # a thread's instructions with one pair of channels
    # How many times four channels of a thread have one scale and zero point.
    FOURS: tl.constexpr = BLOCK_SIZE // 16 if BLOCK_SIZE > 0 and BLOCK_SIZE < 64 else 4
    MAPS: tl.constexpr = len(kernels)
    thread = tl.arange(0, WARPS * 32)
    lane = thread % 32
    # A thread has fours of channels from this one on, 16 apart.
    channel = thread // 32 * SETS * _CHANNELS_OF_A_WARP + lane % 4 * 4
    if SETS == 2:
        channel += lane // 16 * _CHANNELS_OF_A_WARP
    across = tile * ACROSS + lane // 4 % ACROSS
    row_words = columns // (32 // BITS)
    under_way = ()  # the weights of the next steps
    for piece in tl.static_range(min(DEPTH, MAPS * STEPS)):
        under_way = under_way + (
            _weights(
                *(kernels[piece // STEPS], channel + piece % STEPS * SPAN, WORDS * across),
                *(row_words, K, WORDS, VECTORS),
            ),
        )
    own = channel + lane // 4 % 4 * 16  # those of which it makes integers
    factors = ()
    if scale is not None:
        for step in tl.static_range(STEPS):
            factors = factors + four_numbers(scale, own + step * SPAN, K, WHOLE)
    if AHEAD:
        wait_for_launch_before()
    before = ()
    for u in tl.static_range(len(n)):
        number = 0.0
        if residual is not None:
            number = tl.load(residual + n[u], n[u] < columns, other=0.0).to(tl.float32)
        before = before + (number,)
    values = ()
    for step in tl.static_range(STEPS):
        values = values + four_numbers(x, own + step * SPAN, K, WHOLE)
    row, unit = bytes_of_row(
        *(values, factors, epsilon, lane),
        *(K, NORM, STEPS, SETS, LIMBS, QUANTIZED, SHORT),
    )
    # Digits that say which byte of a word comes to the place of this thread's column, 0 to others.
    selections = ()
    for i in tl.static_range(4):
        selections = selections + (0x4444 - ((4 - i) << (lane // 4 % 4 * 4)),)
    results = ()
    for of_map in tl.static_range(MAPS):
        sums, row_sums = _nothing(lane, GROUPS * ROUNDS), _nothing(lane, ROUNDS)
        totals = ()
        for _ in tl.static_range(4 * GROUPS):
            totals = totals + (lane * 0.0,)
        for step in tl.static_range(STEPS):
            loaded, following = under_way[0], ()
            for h in tl.static_range(4):
                here = channel + 16 * h
                if BLOCK_SIZE:  # noqa: SIM102
                    if h % FOURS == 0:
                        block = (here + step * SPAN) // BLOCK_SIZE
                        place = tl.minimum(block, (K - 1) // BLOCK_SIZE) * columns
                        scales, zeros = (), ()
                        for w in tl.static_range(WORDS):
                            column = 8 * (WORDS * across + w) + lane % 2 * 4
                            given = kernel_scales[of_map], kernel_zeros[of_map]
                            scales += (_of_columns(given[0], place, column, columns, VECTORS, 2),)
                            zeros += (_of_columns(given[1], place, column, columns, VECTORS, 1),)
                for i in tl.static_range(0, 4, 2):
                    sums, row_sums = _of_two_channels(
                        *(loaded, row[step], i, h, selections, sums, row_sums),
                        *(GROUPS, ROUNDS, WORDS, BITS, BLOCK_SIZE),
                    )
                if of_map * STEPS + step + DEPTH < MAPS * STEPS:
                    following = following + _weights_of_four(
                        kernels[of_map + (step + DEPTH) // STEPS],
                        *(here + (step + DEPTH) % STEPS * SPAN, WORDS * across),
                        *(row_words, K, WORDS, VECTORS),
                    )
                if BLOCK_SIZE:  # noqa: SIM102
                    if h % FOURS == FOURS - 1:
                        totals = _of_a_block(
                            *(sums, row_sums, scales, zeros, totals, thread),
                            *(SETS, LIMBS, GROUPS, VECTORS),
                        )
                        sums, row_sums = _nothing(lane, GROUPS * ROUNDS), _nothing(lane, ROUNDS)
            later = ()
            for piece in tl.static_range(1, len(under_way)):
                later = later + (under_way[piece],)
            under_way = later + (following,)
        if BLOCK_SIZE == 0:
            totals = _of_threads_columns(sums, thread, SETS, LIMBS, GROUPS, BITS)
        results = results + (_of_all_threads(totals, WARPS, ACROSS),)
    if BITS == 4:
        unit *= 1.0 / 16
    return results, unit, before
