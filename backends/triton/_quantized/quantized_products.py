"""RMSNorm(x) W of one row, with W in integers of 8 or 4 bits: see `norm_quantized_linear`.

Tensor cores multiply bytes, here with m16n8k32: 16 x 32 numbers by 32 x 8. They expect four
channels of a column in a word, but in memory a word has four columns of a channel. Words are used
without transposing them: each channel takes four of the 32 numbers that are summed. In the right
operand, the row's number of that channel is at one of these four, at a different one in each of
four columns, and the others are zero. The other four columns of the right operand hold another byte
of the row's numbers, or the numbers of other channels.

A word of 4-bit weights has eight columns: even ones in the low nibbles of its bytes, odd ones in
the high nibbles. An instruction takes the even columns, plus 8, as its first rows, and 16 times the
odd columns as the others. The excess of either, which includes zero points, is a multiple of the
sum of the row's numbers, and is subtracted.

A tensor has one number per thread, so that each operation on it is one instruction of each thread,
and `mma` and `shfl` can be used as such. In a warp, `lane % 4` and, where ACROSS is 4, `lane // 16`
determine the channels; the other bits of the lane determine neighboring words of a channel.
"""

import triton
import triton.language as tl

from .._decoding.norm_linear_products import load_squares
from .._device.pdl import wait_for_previous_launch
from .quantized_columns import block_sum
from .quantized_row import (
    gather_four_lanes,
    instruct,
    load_four,
    permute_bytes,
    quantize_row,
)
from .quantized_weights import load_four_channels, scale_and_zero, weight_addresses

WARP_CHANNELS = 64  # a warp's channels in a step, 16 per thread; twice as many if ACROSS is 4
_WARP_CHANNELS = tl.constexpr(WARP_CHANNELS)
_HIGH_NIBBLES = tl.constexpr(0xF0F0F0F0 - 2**32)  # a mask of words, as int32
_ONES = tl.constexpr(0x01010101)


@triton.jit
def _mma(a, b, c, d, row, row_2, before):
    """Adds to `before` [4] the products of 16 rows of bytes: one `mma` with its operands."""
    return instruct(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        *((a, b, c, d, row, row_2) + before, False, 4),
    )


@triton.jit
def _zeros(like, COUNT: tl.constexpr):
    """Zeros as accumulators of COUNT `mma` instructions."""
    return ((like * 0,) * 4,) * COUNT


@triton.jit
def _low_nibbles_plus_8(word):
    """The signed low nibble of each byte, plus 8: (word & 15) ^ 8 in one instruction."""
    return instruct("lop3.b32 $0, $1, 0x0f0f0f0f, 0x08080808, 0x6a;", "=r,r", (word,), True)


@triton.jit
def _mma_rows(weights, i: tl.constexpr, g: tl.constexpr, BITS: tl.constexpr):
    """Two `mma` rows from the i-th word on: two words of 8 bits; of 4 bits, one word's nibbles."""
    if BITS == 8:
        a, b = weights[i + 2 * g], weights[i + 2 * g + 1]
    else:
        a, b = _low_nibbles_plus_8(weights[i + g]), weights[i + g] & _HIGH_NIBBLES
    return a, b


@triton.jit
def _multiply_four_channels(
    weights,
    words,
    h: tl.constexpr,
    selections,
    sums,
    PRODUCT: tl.constexpr,
):
    """Adds the products of the h-th four channels of a thread to the sums of each round."""
    for i in tl.static_range(0, 4, 2):
        new_sums = ()
        for m in tl.static_range(len(words)):
            word = words[m][h]
            zero = word * 0
            first = permute_bytes(word, zero, selections[i])
            second = permute_bytes(word, zero, selections[i + 1])
            for g in tl.static_range(PRODUCT.GROUPS):
                a, b = _mma_rows(weights, i * PRODUCT.WORDS, g, PRODUCT.BITS)
                c, d = _mma_rows(weights, (i + 1) * PRODUCT.WORDS, g, PRODUCT.BITS)
                before = sums[m * PRODUCT.GROUPS + g]
                new_sums = new_sums + (_mma(a, b, c, d, first, second, before),)
        sums = new_sums
    return sums


@triton.jit
def _sum_row(words, h: tl.constexpr, FOURS: tl.constexpr, before):
    """Adds FOURS groups of four channels of the row, without weights, to the row's sums."""
    for i in tl.static_range(0, FOURS, 2):
        new_sums = ()
        for m in tl.static_range(len(words)):
            ones = words[m][h] * 0 + _ONES
            second = words[m][h + i + 1] if FOURS > 1 else ones * 0
            new_sums = new_sums + (
                _mma(ones, ones, ones, ones, words[m][h + i], second, before[m]),
            )
        before = new_sums
    return before


@triton.jit
def _excess(zero, row_rounds, i: tl.constexpr):
    """The excess in the sum of a thread's i-th 4-bit column, from offset and zero point."""
    return zero * row_rounds if i % 2 else (zero + 8) * row_rounds


@triton.jit
def _combine_rounds(rounds, BETWEEN: tl.constexpr):
    """Combines the totals of rounds; one unit of a round is BETWEEN units of the next."""
    total = rounds[0]
    for m in tl.static_range(1, len(rounds)):
        total = total * BETWEEN + rounds[m]
    return total


@triton.jit
def _order_columns(four, BITS: tl.constexpr):
    """Reorders four sums from instruction order to column order; it is its own inverse.

    With 4 bits, an instruction has the sums of two even columns before two odd ones.
    """
    return four if BITS == 8 else (four[0], four[2], four[1], four[3])


@triton.jit
def _column_sums(sums, row_sums, PRODUCT: tl.constexpr):
    """A thread's sums in the order of columns: int32 for one limb, else float32."""
    BETWEEN: tl.constexpr = 256.0 if PRODUCT.SETS == 2 else 65536.0
    columns = ()
    for g in tl.static_range(PRODUCT.GROUPS):
        for i in tl.static_range(4):
            rounds = ()
            for m in tl.static_range(len(row_sums)):
                total = _order_columns(sums[m * PRODUCT.GROUPS + g], PRODUCT.BITS)[i]
                if PRODUCT.BITS == 4:
                    total -= _excess(0, row_sums[m][0], i)
                rounds = rounds + (total if PRODUCT.LIMBS == 1 else total.to(tl.float32),)
            columns = columns + (_combine_rounds(rounds, BETWEEN),)
    return columns


@triton.jit
def _add_block(sums, row_sums, numbers, totals, PRODUCT: tl.constexpr):
    """Adds a block of channels, times its scales, to the totals of a thread's columns, float32.

    64 products of a 16-bit number and the difference of a 4-bit and an 8-bit number fit in int32;
    with 24-bit numbers they do not. Sums of odd columns are 16 times too large, and shifted right.
    """
    BETWEEN: tl.constexpr = 256 if PRODUCT.SETS == 2 else 65536
    new_totals = ()
    for g in tl.static_range(PRODUCT.GROUPS):
        for i in tl.static_range(4):
            scale, zero = scale_and_zero(numbers[g][0], numbers[g][1], i)
            rounds, row_rounds = (), ()
            for m in tl.static_range(len(row_sums)):
                rounds = rounds + (_order_columns(sums[m * PRODUCT.GROUPS + g], 4)[i],)
                row_rounds = row_rounds + (row_sums[m][0],)
            if PRODUCT.LIMBS < 3:
                excess = _excess(zero, _combine_rounds(row_rounds, BETWEEN), i)
                total = _combine_rounds(rounds, BETWEEN) >> 4 * (i % 2)
                total = (total - excess).to(tl.float32)
            else:
                corrected = ()
                for m in tl.static_range(len(row_sums)):
                    difference = (rounds[m] >> 4 * (i % 2)) - _excess(zero, row_rounds[m], i)
                    corrected = corrected + (difference.to(tl.float32),)
                total = _combine_rounds(corrected, BETWEEN * 1.0)
            new_totals = new_totals + (totals[4 * g + i] + total * scale,)
    return new_totals


@triton.jit
def _load_steps(tensor, channel, PRODUCT: tl.constexpr):
    """Loads a thread's four numbers of each step, from its first channel on."""
    values = ()
    for step in tl.static_range(PRODUCT.STEPS):
        step_channel = channel + step * PRODUCT.SPAN
        values = values + load_four(tensor, step_channel, PRODUCT.K, PRODUCT.WHOLE)
    return values


@triton.jit
def _sum_row_of_step(words, row_sums, PRODUCT: tl.constexpr):
    """Adds a step to the sums of the row. Also returns its sums in the blocks of the step."""
    block_row_sums = ()
    if PRODUCT.BITS == 4:
        for h in tl.static_range(0, 4, PRODUCT.FOURS):
            if PRODUCT.BLOCK_SIZE:
                row_sums = _zeros(words[0][0], PRODUCT.ROUNDS)
            row_sums = _sum_row(words, h, PRODUCT.FOURS, row_sums)
            block_row_sums = block_row_sums + (row_sums,)
    return row_sums, block_row_sums


@triton.jit
def _multiply_tile(
    weights,
    words,
    block_row_sums,
    selections,
    sums,
    totals,
    addresses,
    channel,
    columns,
    NEXT_TILE: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Adds the products of a weight tile to its sums, or, of blocks, to its totals.

    Also returns the weights of the next tile, which are loaded between the products.
    """
    next_weights = ()
    for h in tl.static_range(4):
        sums = _multiply_four_channels(weights[h][0], words, h, selections, sums, PRODUCT)
        if len(addresses) * PRODUCT.STEPS > NEXT_TILE:
            four = load_four_channels(addresses, channel, columns, NEXT_TILE, h, PRODUCT)
            next_weights = next_weights + (four,)
        if PRODUCT.BLOCK_SIZE > 0 and h % PRODUCT.FOURS == PRODUCT.FOURS - 1:
            numbers = weights[h // PRODUCT.FOURS * PRODUCT.FOURS][1]
            totals = _add_block(sums, block_row_sums[h // PRODUCT.FOURS], numbers, totals, PRODUCT)
            sums = _zeros(channel, PRODUCT.GROUPS * PRODUCT.ROUNDS)
    return sums, totals, next_weights


@triton.jit
def _multiply_row(pending, row, lane, addresses, channel, columns, PRODUCT: tl.constexpr):
    """Multiplies the words of the row by all weight tiles, the first of which are `pending`.

    Returns a thread's sums of the columns of each weight, in float32, or int32 for one limb.
    """
    PROJECTIONS: tl.constexpr = len(addresses)
    # Selectors for `permute_bytes`: they move a byte to the position of this thread's column, and
    # set the other bytes to 0.
    selections = [0x4444 - ((4 - i) << (lane // 4 % 4 * 4)) for i in (0, 1, 2, 3)]
    row_sums = _zeros(lane, PRODUCT.ROUNDS)
    sums = (_zeros(lane, PRODUCT.GROUPS * PRODUCT.ROUNDS),) * PROJECTIONS
    totals = ((lane * 0.0,) * (4 * PRODUCT.GROUPS),) * PROJECTIONS
    for step in tl.static_range(PRODUCT.STEPS):
        words = gather_four_lanes(row[step], lane)
        row_sums, block_row_sums = _sum_row_of_step(words, row_sums, PRODUCT)
        next_sums, next_totals = (), ()
        for projection in tl.static_range(PROJECTIONS):
            new_sums, new_totals, next_weights = _multiply_tile(
                *(pending[0], words, block_row_sums, selections),
                *(sums[projection], totals[projection], addresses, channel, columns),
                *(step * PROJECTIONS + projection + PRODUCT.DEPTH, PRODUCT),
            )
            next_sums, next_totals = next_sums + (new_sums,), next_totals + (new_totals,)
            pending = pending[1:] + (next_weights,)
        sums, totals = next_sums, next_totals
    column_sums = ()
    for projection in tl.static_range(PROJECTIONS):
        if PRODUCT.BLOCK_SIZE:
            column_sums = column_sums + totals[projection]
        else:
            column_sums = column_sums + _column_sums(sums[projection], row_sums, PRODUCT)
    return column_sums


@triton.jit
def project_row(
    x,
    scale,
    squares,
    weights,
    residual,
    tile,
    n,
    columns,
    epsilon,
    PRODUCT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Returns the sums of the columns n of each weight in float32, their unit, and the residual.

    A weight tile is one step of one weight; all weights of a step come before the next step. The
    loads of DEPTH tiles are pending at a time, the first of them before the row is available; later
    loads reuse the registers of tiles that were multiplied. In a step, a thread quantizes four
    channels of the row. Without blocks, the sums over each byte of the row are exact.
    """
    SHORT: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    thread = tl.arange(0, PRODUCT.WARPS * 32)
    lane = thread % 32
    # The first of a thread's channels: fours of channels, 16 apart.
    channel = thread // 32 * PRODUCT.SETS * _WARP_CHANNELS + lane % 4 * 4
    if PRODUCT.SETS == 2:
        channel += lane // 16 * _WARP_CHANNELS
    column_thread = lane // 4 % PRODUCT.ACROSS
    word = (tile * PRODUCT.ACROSS + column_thread) * PRODUCT.WORDS
    column = word * 8 + lane % 2 * 4  # the first column whose block scales the thread loads
    addresses = ()
    for i in tl.static_range(len(weights[0])):
        weight = weight_addresses(weights, i, channel, word, column, columns, PRODUCT)
        addresses = addresses + (weight,)
    pending = ()  # the next weight tiles: four times four channels of a thread each
    for weight_tile in tl.static_range(min(PRODUCT.DEPTH, len(addresses) * PRODUCT.STEPS)):
        fours = [
            load_four_channels(addresses, channel, columns, weight_tile, h, PRODUCT)
            for h in (0, 1, 2, 3)
        ]
        pending = pending + (fours,)
    row_channel = channel + lane // 4 % 4 * 16  # the first channel that the thread quantizes
    factors = ()
    if scale is not None:
        factors = _load_steps(scale, row_channel, PRODUCT)
    wait_for_previous_launch(PDL)
    residuals = ()
    if residual is not None:
        residuals = [tl.load(residual + column, column < columns, other=0.0) for column in n]
    values = _load_steps(x, row_channel, PRODUCT)
    row_squares = ()
    if squares is not None:
        row_squares = (load_squares(squares, tl.arange(0, 1), 1, PRODUCT.NUM_SQUARES),)
    row, unit = quantize_row(values, factors, row_squares, epsilon, lane, SHORT, PRODUCT)
    sums = _multiply_row(pending, row, lane, addresses, channel, columns, PRODUCT)
    return block_sum(sums, thread, PRODUCT), unit, residuals
