"""A row of integers times W, of integers of 8 or 4 bits: see `norm_quantized_linear`."""

import triton
import triton.language as tl

from keras_recurrent.backends.constants import SMALLEST_BLOCK_OF_SCALES
from keras_recurrent.backends.triton._ahead import wait_for_launch_before
from keras_recurrent.backends.triton._common import IN_INTERPRETER, INTERPRETED

# They lie in one block. The interpreter, which has no loads under way, takes as long for each.
CHANNELS_AT_ONCE = 4 if INTERPRETED else SMALLEST_BLOCK_OF_SCALES
_CHANNELS = tl.constexpr(CHANNELS_AT_ONCE)
_QUADS = tl.constexpr(CHANNELS_AT_ONCE // 4)
# Masks of words, as int32.
_SIGNS_OF_4_BITS = tl.constexpr(0x88888888 - 2**32)
_LOWER_HALVES = tl.constexpr(0x0F0F0F0F)
_UPPER_HALVES = tl.constexpr(0xF0F0F0F0 - 2**32)
_ONES = tl.constexpr(0x01010101)
_UPPER_SHORT = tl.constexpr(0xFFFF0000 - 2**32)


@triton.jit
def _four_words(pointer):
    """The words at an address that is a multiple of 16 bytes.

    Of weights, which are read once. Through the read-only cache (ld.global.nc), the assembler would
    move loads behind the wait for the launch before.
    """
    if IN_INTERPRETER:
        a, b = tl.load(pointer), tl.load(pointer + 1)
        c, d = tl.load(pointer + 2), tl.load(pointer + 3)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "ld.global.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [pointer],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return a, b, c, d


@triton.jit
def _loaded(words, first, word, row_words, K: tl.constexpr, VECTORS: tl.constexpr):
    """Four words of each of the channels from the first on.

    Channels and columns behind the last ones are read as the last: the row has zeros for those
    channels, and sums of those columns are not written.
    """
    found = ()
    for i in tl.static_range(_CHANNELS):
        channel = words + tl.minimum(first + i, K - 1) * row_words
        if VECTORS:
            a, b, c, d = _four_words(channel + tl.minimum(word, row_words - 4))
        else:
            a = tl.load(channel + tl.minimum(word, row_words - 1))
            b = tl.load(channel + tl.minimum(word + 1, row_words - 1))
            c = tl.load(channel + tl.minimum(word + 2, row_words - 1))
            d = tl.load(channel + tl.minimum(word + 3, row_words - 1))
        found = found + (a, b, c, d)
    return found


@triton.jit
def _operand(word, SIGNED: tl.constexpr):
    """A word of four bytes as `_dp4a` takes it: in the interpreter, bytes along an axis behind."""
    if IN_INTERPRETER:
        word = word[:, :, None] << (24 - 8 * tl.arange(0, 4)[None, None, :])
        if not SIGNED:
            word = word.to(tl.uint32, bitcast=True)
        word = (word >> 24).to(tl.int32)
    return word


@triton.jit
def _row_words(row, first, LIMBS: tl.constexpr, PADDED: tl.constexpr):
    """Of each limb, the words of the channels from the first on."""
    words = ()
    for limb in tl.static_range(LIMBS):
        place = row + limb * PADDED + first
        if IN_INTERPRETER:
            words = words + (_operand(tl.load(place.to(tl.pointer_type(tl.int32))), True),)
        else:
            for i in tl.static_range(_QUADS // 2):
                # Two words at once, by a load whose layout the compiler hands on.
                both = tl.load((place + 8 * i).to(tl.pointer_type(tl.int64)))
                words = words + (both.to(tl.int32), (both >> 32).to(tl.int32))
    return words


@triton.jit
def _bytes_of(a, b, SELECT: tl.constexpr):
    """A word of four bytes of two words: each hexadecimal digit says which, the lowest first."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [a, b, SELECT],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _turned(a, b, c, d):
    """Words of four columns of a channel each, as words of four channels of a column each."""
    if IN_INTERPRETER:
        found = ()
        for i in tl.static_range(4):
            low = ((a >> (8 * i)) & 255) | (((b >> (8 * i)) & 255) << 8)
            high = ((c >> (8 * i)) & 255) | (((d >> (8 * i)) & 255) << 8)
            found = found + (low | (high << 16),)
    else:
        low, high = _bytes_of(a, b, 0x5140), _bytes_of(c, d, 0x5140)
        low_2, high_2 = _bytes_of(a, b, 0x7362), _bytes_of(c, d, 0x7362)
        found = (
            _bytes_of(low, high, 0x5410),
            _bytes_of(low, high, 0x7632),
            _bytes_of(low_2, high_2, 0x5410),
            _bytes_of(low_2, high_2, 0x7632),
        )
    return found


@triton.jit
def _dp4a(weights, row, before, SIGNED: tl.constexpr):
    """before, and the products of four bytes, of weights without a sign unless SIGNED."""
    INSTRUCTION: tl.constexpr = "dp4a.s32.s32" if SIGNED else "dp4a.u32.s32"
    if IN_INTERPRETER:
        found = before + tl.sum(weights * row, 2)
    else:
        found = tl.inline_asm_elementwise(
            INSTRUCTION + " $0, $1, $2, $3;",
            "=r,r,r,r",
            [weights, row, before],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return found


@triton.jit
def _products(weights, row, before, LIMBS: tl.constexpr, SIGNED: tl.constexpr):
    """before, and the products of some channels: int32, or float32 of three limbs."""
    found = before
    for q in tl.static_range(_QUADS):
        found = _dp4a(weights[q], row[q], found, SIGNED)
    if LIMBS > 1:
        found = found << 8
        for q in tl.static_range(_QUADS):
            found = _dp4a(weights[q], row[_QUADS + q], found, SIGNED)
    if LIMBS == 3:
        low = tl.zeros_like(found)
        for q in tl.static_range(_QUADS):
            low = _dp4a(weights[q], row[2 * _QUADS + q], low, SIGNED)
        found = found.to(tl.float32) * 256.0 + low.to(tl.float32)
    return found


@triton.jit
def _of_columns(
    tensor, place, column, columns, COUNT: tl.constexpr, VECTORS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Of a block, scales or zero points of a thread's columns: words, if VECTORS, or one each.

    WIDTH: how many of them 16 bytes hold.
    """
    found = ()
    if VECTORS:
        first = tensor + place + tl.minimum(column, columns - COUNT)
        for i in tl.static_range(COUNT // WIDTH):
            a, b, c, d = _four_words((first + WIDTH * i).to(tl.pointer_type(tl.int32)))
            found = found + (a, b, c, d)
    else:
        for i in tl.static_range(COUNT):
            found = found + (tl.load(tensor + place + tl.minimum(column + i, columns - 1)),)
    return found


@triton.jit
def _of_block(product, row_sum, scales, zeros, c: tl.constexpr, VECTORS: tl.constexpr):
    """Products of weights that exceed the true ones by 8, as a block's scale and zero point say."""
    if VECTORS:
        zero = (zeros[c // 4] << (24 - 8 * (c % 4))) >> 24
        bits = scales[c // 2] & _UPPER_SHORT if c % 2 else scales[c // 2] << 16
        scale = bits.to(tl.float32, bitcast=True)
    else:
        zero = zeros[c]
        scale = scales[c].to(tl.float32)
    return (product - (zero.to(tl.float32) + 8.0) * row_sum) * scale


@triton.jit
def _joined(columns, COUNT: tl.constexpr):
    """[..., COUNT] of as many tensors, 16 or 32, in their order."""
    LEVELS: tl.constexpr = 4 if COUNT == 16 else 5
    level = columns
    for i in tl.static_range(LEVELS):
        following = ()
        for j in tl.static_range(COUNT >> (i + 1)):
            following = following + (tl.join(level[j], level[j + (COUNT >> (i + 1))]),)
        level = following
    return level[0]


@triton.jit
def of_one_row(
    row,
    kernel,
    kernel_scale,
    kernel_zero,
    tile,
    columns,
    K: tl.constexpr,
    PADDED: tl.constexpr,
    LIMBS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    ACROSS: tl.constexpr,
    VECTORS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Sums of some columns [ACROSS * 128 / BITS], float32, as a row of bytes has them.

    A thread reads 16 bytes of a channel, of some channels that follow one another, all under way
    together, the first ones before the row is there. ACROSS threads read neighboring bytes, and
    LANES others the following channels. Words of four columns become words of four channels, which
    one instruction multiplies with four bytes of the row; its sums are exact. Without blocks, sums
    of a row of one limb stay integers to the end.
    """
    COUNT: tl.constexpr = 128 // BITS  # columns of a thread
    SPAN: tl.constexpr = LANES * _CHANNELS
    EXACT: tl.constexpr = LIMBS == 1 and BLOCK_SIZE == 0
    across = tile * ACROSS + tl.arange(0, ACROSS)[None, :]
    start = tl.arange(0, LANES)[:, None] * _CHANNELS + across * 0
    words = kernel.to(tl.pointer_type(tl.int32))
    row_words = columns // (32 // BITS)
    nothing = tl.zeros((LANES, ACROSS), tl.int32)
    total = ()
    for _ in tl.static_range(COUNT):
        total = total + (nothing if EXACT else nothing.to(tl.float32),)
    row_total = nothing
    following = _loaded(words, start, 4 * across, row_words, K, VECTORS)
    if AHEAD:
        wait_for_launch_before()
    for step in tl.static_range(PADDED // SPAN):
        first = start + step * SPAN
        loaded = following
        if step + 1 < PADDED // SPAN:
            following = _loaded(words, first + SPAN, 4 * across, row_words, K, VECTORS)
        if BLOCK_SIZE:
            place = tl.minimum(first // BLOCK_SIZE, (K - 1) // BLOCK_SIZE) * columns
            column = COUNT * across
            # Of bfloat16, as words hold no other ones, and of 8 bits.
            scales = _of_columns(kernel_scale, place, column, columns, COUNT, VECTORS, 8)
            zeros = _of_columns(kernel_zero, place, column, columns, COUNT, VECTORS, 16)
        limbs = _row_words(row, first, LIMBS, PADDED)
        turned = ()
        for q in tl.static_range(_QUADS):
            for i in tl.static_range(4):
                a, b = loaded[16 * q + i], loaded[16 * q + i + 4]
                c, d = loaded[16 * q + i + 8], loaded[16 * q + i + 12]
                turned = turned + _turned(a, b, c, d)
        if BITS == 4:
            ones = ()
            for _ in tl.static_range(_QUADS):
                ones = ones + (_operand(nothing + _ONES, False),)
            row_sum = _products(ones, limbs, nothing, LIMBS, False)
            if EXACT:
                row_total += row_sum
            else:
                row_sum = row_sum.to(tl.float32)
        sums = ()
        for c in tl.static_range(COUNT):
            weights = ()
            for q in tl.static_range(_QUADS):
                weight = turned[16 * q + c * BITS // 8]
                if BITS == 4:  # without a sign, more by 8; of odd columns 16 times that
                    weight = (weight ^ _SIGNS_OF_4_BITS) & (
                        _UPPER_HALVES if c % 2 else _LOWER_HALVES
                    )
                weights = weights + (_operand(weight, BITS == 8),)
            found = _products(weights, limbs, total[c] if EXACT else nothing, LIMBS, BITS == 8)
            if not EXACT:
                product = found.to(tl.float32)
                if BITS == 4:
                    if c % 2:
                        product *= 1.0 / 16
                    if BLOCK_SIZE:
                        product = _of_block(product, row_sum, scales, zeros, c, VECTORS)
                    else:
                        product -= 8.0 * row_sum
                found = total[c] + product
            sums = sums + (found,)
        total = sums
    if EXACT and BITS == 4:
        sums = ()
        for c in tl.static_range(COUNT):
            sums = sums + ((total[c] >> 4 if c % 2 else total[c]) - 8 * row_total,)
        total = sums
    lanes = tl.reshape(_joined(total, COUNT), (LANES, ACROSS, COUNT))
    return tl.reshape(tl.sum(lanes, 0), (ACROSS * COUNT,)).to(tl.float32)
