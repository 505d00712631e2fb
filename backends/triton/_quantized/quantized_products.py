"""RMSNorm(x) W of one row, with W of integers of 8 or 4 bits: see `norm_quantized_linear`.

Tensor cores multiply bytes, here m16n8k32: 16 x 32 numbers by 32 x 8. They want four channels of a
column in a word, where memory has four columns of a channel. So words are taken as they are: of the
32 numbers that are summed up, each channel has four, and the row's number of that channel stands in
one of them, in another one for each of four columns of the right operand. The other four of its
columns hold another byte of the row's numbers, or those of other channels.

Of 4 bits, a word has eight columns: even ones in the lower halves of its bytes, odd ones in the
upper. An instruction takes the even ones, 8 more than they are, as its first rows, and 16 times the
odd ones as the others. What is too much of either, zero points with it, is a multiple of the sum of
the row's numbers.

A tensor has one number for each thread, so that an operation on it is one of each thread, and `mma`
and `shfl` may be among these. In a warp, `lane % 4` and, where ACROSS is 4, `lane // 16` say which
channels; the others read neighboring words of one.
"""

import triton
import triton.language as tl

from .._device.pdl import wait_for_previous_launch
from .quantized_columns import of_all_threads
from .quantized_row import bytes_of_row, four_numbers, of_four_threads, permuted
from .quantized_weights import first_addresses, of_four_channels, scale_and_zero

CHANNELS_OF_A_WARP = 64  # in a step, 16 of each thread; where ACROSS is 4, twice as many
_CHANNELS_OF_A_WARP = tl.constexpr(CHANNELS_OF_A_WARP)
_UPPER_HALVES = tl.constexpr(0xF0F0F0F0 - 2**32)  # a mask of words, as int32
_ONES = tl.constexpr(0x01010101)


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
def _lower_halves_and_8(word):
    """The lower half of each byte, which has a sign, and 8: in one operation, (word & 15) ^ 8."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, 0x0f0f0f0f, 0x08080808, 0x6a;",
        "=r,r",
        [word],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _two_rows_of_bytes(weights, i: tl.constexpr, g: tl.constexpr, BITS: tl.constexpr):
    """Of the words from the i-th on, two; of 4 bits even columns of one, and odd ones, as above."""
    if BITS == 8:
        a, b = weights[i + 2 * g], weights[i + 2 * g + 1]
    else:
        a, b = _lower_halves_and_8(weights[i + g]), weights[i + g] & _UPPER_HALVES
    return a, b


@triton.jit
def _of_four_channels(
    weights,
    words,
    h: tl.constexpr,
    selections,
    sums,
    GROUPS: tl.constexpr,
    WORDS: tl.constexpr,
    BITS: tl.constexpr,
):
    """The sums of each round with the products of the h-th four of a thread's channels."""
    for i in tl.static_range(0, 4, 2):
        found = ()
        for m in tl.static_range(len(words)):
            word = words[m][h]
            zero = word * 0
            first = permuted(word, zero, selections[i])
            second = permuted(word, zero, selections[i + 1])
            for g in tl.static_range(GROUPS):
                a, b = _two_rows_of_bytes(weights, i * WORDS, g, BITS)
                c, d = _two_rows_of_bytes(weights, (i + 1) * WORDS, g, BITS)
                found = found + (_products(a, b, c, d, first, second, sums[m * GROUPS + g]),)
        sums = found
    return sums


@triton.jit
def _of_the_row(words, h: tl.constexpr, FOURS: tl.constexpr, before):
    """The sums of each round of the row alone, with those of FOURS fours of channels."""
    for i in tl.static_range(0, FOURS, 2):
        found = ()
        for m in tl.static_range(len(words)):
            ones = words[m][h] * 0 + _ONES
            second = words[m][h + i + 1] if FOURS > 1 else ones * 0
            found = found + (_products(ones, ones, ones, ones, words[m][h + i], second, before[m]),)
        before = found
    return before


@triton.jit
def _too_much(zero, of_row, i: tl.constexpr):
    """What the sum of the i-th of a thread's columns of 4 bits has too much, in units of it."""
    return zero * of_row if i % 2 else (zero + 8) * of_row


@triton.jit
def _together(of_rounds, BETWEEN: tl.constexpr):
    """What rounds are worth together, each BETWEEN times the next."""
    total = of_rounds[0]
    for m in tl.static_range(1, len(of_rounds)):
        total = total * BETWEEN + of_rounds[m]
    return total


@triton.jit
def _in_order(four, BITS: tl.constexpr):
    """Four sums in the order of columns; the other way round as well.

    Instructions have those of two even columns of 4 bits before those of two odd ones.
    """
    return four if BITS == 8 else (four[0], four[2], four[1], four[3])


@triton.jit
def _of_threads_columns(
    sums,
    row_sums,
    SETS: tl.constexpr,
    LIMBS: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
):
    """A thread's sums in the order of columns: int32 of one limb, else float32."""
    BETWEEN: tl.constexpr = 256.0 if SETS == 2 else 65536.0
    found = ()
    for g in tl.static_range(GROUPS):
        for i in tl.static_range(4):
            of_rounds = ()
            for m in tl.static_range(len(row_sums)):
                total = _in_order(sums[m * GROUPS + g], BITS)[i]
                if BITS == 4:
                    total -= _too_much(0, row_sums[m][0], i)
                of_rounds = of_rounds + (total if LIMBS == 1 else total.to(tl.float32),)
            found = found + (_together(of_rounds, BETWEEN),)
    return found


@triton.jit
def _of_a_block(
    sums,
    row_sums,
    numbers,
    totals,
    SETS: tl.constexpr,
    LIMBS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The totals of a thread's columns with the sums of a block of channels, float32.

    64 products of 16 bits by the difference of a number of 4 bits and one of 8 fit an int32; of 24
    bits they do not. Sums of odd columns are 16 times as large, and shifted back.
    """
    BETWEEN: tl.constexpr = 256 if SETS == 2 else 65536
    found = ()
    for g in tl.static_range(GROUPS):
        for i in tl.static_range(4):
            scale, zero = scale_and_zero(numbers[g][0], numbers[g][1], i)
            of_rounds, of_row = (), ()
            for m in tl.static_range(len(row_sums)):
                of_rounds = of_rounds + (_in_order(sums[m * GROUPS + g], 4)[i],)
                of_row = of_row + (row_sums[m][0],)
            if LIMBS < 3:
                too_much = _too_much(zero, _together(of_row, BETWEEN), i)
                total = _together(of_rounds, BETWEEN) >> 4 * (i % 2)
                total = (total - too_much).to(tl.float32)
            else:
                exact = ()
                for m in tl.static_range(len(row_sums)):
                    right = (of_rounds[m] >> 4 * (i % 2)) - _too_much(zero, of_row[m], i)
                    exact = exact + (right.to(tl.float32),)
                total = _together(exact, BETWEEN * 1.0)
            found = found + (totals[4 * g + i] + total * scale,)
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
    PDL: tl.constexpr,
):
    """The sums of the columns n, map after map, float32, what one is worth, and the residual.

    Pieces are a step of a map each, maps of a step one after another. Weights of DEPTH of them are
    under way together, the first ones before the row is there; later ones take the registers of
    those that were multiplied. A thread makes integers of four channels in a step. Without blocks,
    sums of each byte of the row are exact.
    """
    SHORT: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    SETS: tl.constexpr = 8 // ACROSS
    ROUNDS: tl.constexpr = LIMBS if SETS == 2 else (LIMBS + 1) // 2
    SPAN: tl.constexpr = WARPS * SETS * _CHANNELS_OF_A_WARP
    GROUPS: tl.constexpr = WORDS * 4 // BITS  # a thread's instructions with one pair of channels
    # How many times four channels of a thread have one scale and zero point.
    FOURS: tl.constexpr = BLOCK_SIZE // 16 if BLOCK_SIZE > 0 and BLOCK_SIZE < 64 else 4
    MAPS: tl.constexpr = len(kernels)
    PIECES: tl.constexpr = MAPS * STEPS
    thread = tl.arange(0, WARPS * 32)
    lane = thread % 32
    # A thread has fours of channels from this one on, 16 apart.
    channel = thread // 32 * SETS * _CHANNELS_OF_A_WARP + lane % 4 * 4
    if SETS == 2:
        channel += lane // 16 * _CHANNELS_OF_A_WARP
    reader = lane // 4 % ACROSS
    word = (tile * ACROSS + reader) * WORDS
    column = word * 8 + lane % 2 * 4  # the first of which it has scales of blocks
    first = ()
    for of_map in tl.static_range(MAPS):
        first = first + (
            first_addresses(
                *(kernels[of_map], kernel_scales[of_map], kernel_zeros[of_map]),
                *(channel, word, column, columns, BITS, BLOCK_SIZE, WORDS, VECTORS),
            ),
        )
    under_way = ()  # of each of the next pieces, the four times four channels of a thread
    for piece in tl.static_range(min(DEPTH, PIECES)):
        fours = ()
        for h in tl.static_range(4):
            fours = fours + (
                of_four_channels(
                    *(first[piece % MAPS], channel, columns, piece // MAPS * SPAN, h),
                    *(K, SPAN, BITS, BLOCK_SIZE, WORDS),
                ),
            )
        under_way = under_way + (fours,)
    own = channel + lane // 4 % 4 * 16  # those of which it makes integers
    factors = ()
    if scale is not None:
        for step in tl.static_range(STEPS):
            factors = factors + four_numbers(scale, own + step * SPAN, K, WHOLE)
    if PDL:
        wait_for_previous_launch()
    before = ()
    for u in tl.static_range(len(n)):
        number = 0.0
        if residual is not None:
            number = tl.load(residual + n[u], n[u] < columns, other=0.0)
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
    sums, totals, row_sums = (), (), _nothing(lane, ROUNDS)
    for _ in tl.static_range(MAPS):
        sums = sums + (_nothing(lane, GROUPS * ROUNDS),)
        of_columns = ()
        for _ in tl.static_range(4 * GROUPS):
            of_columns = of_columns + (lane * 0.0,)
        totals = totals + (of_columns,)
    for step in tl.static_range(STEPS):
        words = of_four_threads(row[step], lane)
        of_blocks = ()  # the row's sums in those of the step
        if BITS == 4:
            for h in tl.static_range(0, 4, FOURS):
                if BLOCK_SIZE:
                    row_sums = _nothing(lane, ROUNDS)
                row_sums = _of_the_row(words, h, FOURS, row_sums)
                of_blocks = of_blocks + (row_sums,)
        next_sums, next_totals = (), ()
        for of_map in tl.static_range(MAPS):
            fours, following = under_way[0], ()
            of_sums, of_totals = sums[of_map], totals[of_map]
            for h in tl.static_range(4):
                of_sums = _of_four_channels(
                    fours[h][0], words, h, selections, of_sums, GROUPS, WORDS, BITS
                )
                if step * MAPS + of_map + DEPTH < PIECES:
                    following = following + (
                        of_four_channels(
                            *(first[(of_map + DEPTH) % MAPS], channel, columns),
                            *((step + (of_map + DEPTH) // MAPS) * SPAN, h, K, SPAN),
                            *(BITS, BLOCK_SIZE, WORDS),
                        ),
                    )
                if BLOCK_SIZE > 0 and h % FOURS == FOURS - 1:
                    of_totals = _of_a_block(
                        *(of_sums, of_blocks[h // FOURS], fours[h // FOURS * FOURS][1], of_totals),
                        *(SETS, LIMBS, GROUPS),
                    )
                    of_sums = _nothing(lane, GROUPS * ROUNDS)
            next_sums, next_totals = next_sums + (of_sums,), next_totals + (of_totals,)
            later = ()
            for ahead in tl.static_range(1, len(under_way)):
                later = later + (under_way[ahead],)
            under_way = later + (following,)
        sums, totals = next_sums, next_totals
    found = ()
    for of_map in tl.static_range(MAPS):
        if BLOCK_SIZE:
            found = found + totals[of_map]
        else:
            found = found + _of_threads_columns(sums[of_map], row_sums, SETS, LIMBS, GROUPS, BITS)
    SIXTEENTHS: tl.constexpr = BITS == 4 and BLOCK_SIZE == 0
    return of_all_threads(found, thread, WARPS, ACROSS, LIMBS, SIXTEENTHS), unit, before
