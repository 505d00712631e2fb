"""A row of x as integers of 8 bits each, for products of bytes: see `quantized_products`.

A quantized row, as Keras has it, is integers of 8 bits. Other rows become fixed-point numbers of 16
or 24 bits, relative to the largest magnitude: two or three bytes with a sign each, of which the
first is worth 256 of the next.
"""

import triton
import triton.language as tl

from ...constants import ROW_EPSILON
from .._device.common import IN_INTERPRETER
from .._device.math import reciprocal_root

_ROW_EPSILON = tl.constexpr(ROW_EPSILON)
# Added to a float32, this rounds to integers, which are then the lowest bits of the sum.
_ROUNDS = tl.constexpr(12582912.0)
# What the largest magnitude becomes: 127 of the highest byte's units, so that rounding fits.
_LARGEST_OF_2 = tl.constexpr(127.0 * 2**8)
_LARGEST_OF_3 = tl.constexpr(127.0 * 2**16)
_UPPER_SHORT = tl.constexpr(0xFFFF0000 - 2**32)  # a mask of words, as int32
_SMALLEST = tl.constexpr(1e-30)  # of largest magnitudes: below, their inverse is infinite


@triton.jit
def _rounded(value, SHORT: tl.constexpr):
    """As the row's dtype holds it: bfloat16 if SHORT, else float32."""
    if SHORT:
        if IN_INTERPRETER:  # which does not round, but leaves bits out
            bits = value.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            value = bits.to(tl.float32, bitcast=True)
        else:
            value = value.to(tl.bfloat16).to(tl.float32)
    return value


@triton.jit
def _whole(value):
    return (value + _ROUNDS).to(tl.int32, bitcast=True)


@triton.jit
def _sum_and_largest(a, b, a_2, b_2):
    return a + a_2, tl.maximum(b, b_2, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def of_all(squares, largest):
    """The sum of the first and the largest of the second, which is NaN if one of them is."""
    if IN_INTERPRETER:  # whose maximum leaves NaN out
        squares, largest = tl.sum(squares, 0), tl.max(largest, 0) + tl.sum(largest * 0.0, 0)
    else:
        squares, largest = tl.reduce((squares, largest), 0, _sum_and_largest)
    return squares, largest


@triton.jit
def measured(
    squares,
    largest,
    epsilon,
    K: tl.constexpr,
    NORM: tl.constexpr,
    LIMBS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """The norm's factor, that of the integers, and what one of the last byte is worth.

    Integers hold neither NaN nor infinity: the last is NaN if a number of the row is one of them.
    """
    norm = 1.0
    if NORM:
        mean = squares / K + epsilon
        if SHORT and not QUANTIZED:  # what others wait for takes one instruction, wrong by 2e-7
            norm = tl.where(mean > 0.0, tl.rsqrt(mean), mean * 0.0)
        else:
            norm = reciprocal_root(mean)
    flaw = largest * 0.0
    if QUANTIZED:
        # Rounding keeps the order, so the largest number may be rounded in place of all.
        largest = _rounded(largest * norm, SHORT)
        factor = _rounded(tl.div_rn(127.0, _rounded(largest + _ROW_EPSILON, SHORT)), SHORT)
        unit = tl.div_rn(1.0, factor)
    else:
        most: tl.constexpr = _LARGEST_OF_2 if LIMBS == 2 else _LARGEST_OF_3
        largest = tl.maximum(largest, _SMALLEST)
        factor = most / largest
        unit = largest * (1.0 / most) * norm
    return norm, factor, unit + flaw


@triton.jit
def integers(
    value, norm, factor, LIMBS: tl.constexpr, QUANTIZED: tl.constexpr, SHORT: tl.constexpr
):  # fmt: skip
    """LIMBS bytes of each number, the first one first, in the lowest bits of as many int32."""
    if QUANTIZED:
        value = _rounded(_rounded(value * norm, SHORT) * factor, SHORT)
        found = (_whole(tl.minimum(tl.maximum(value, -127.0), 127.0)),)
    else:
        high = value * factor
        last = ()
        if LIMBS == 3:
            value = high
            high = (value * (1.0 / 256) + _ROUNDS) - _ROUNDS
            last = (_whole(tl.minimum(value - high * 256.0, 127.0)),)
        # The lower byte has a sign: 128 more for the upper one, and its own highest bit flipped.
        bits = _whole(high + 128.0)
        found = (bits >> 8, bits ^ 128) + last
    return found


@triton.jit
def words_at(pointer, WORDS: tl.constexpr, LOAD: tl.constexpr):
    """One, two or four words at an address that is a multiple of their size, by an instruction."""
    if WORDS == 1:
        found = (
            tl.inline_asm_elementwise(
                LOAD + ".b32 $0, [$1];", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
            ),
        )
    elif WORDS == 2:
        found = tl.inline_asm_elementwise(
            LOAD + ".v2.b32 {$0, $1}, [$2];",
            "=r,=r,l",
            [pointer],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        found = tl.inline_asm_elementwise(
            LOAD + ".v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [pointer],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return found


@triton.jit
def four_numbers(tensor, place, K: tl.constexpr, WHOLE: tl.constexpr):
    """Four numbers that follow one another, float32; 0 behind the K-th."""
    found = ()
    if WHOLE:
        first = tensor + tl.minimum(place, K - 4)
        if tensor.dtype.element_ty == tl.bfloat16:
            a, b = words_at(first, 2, "ld.global")
            words = a << 16, a & _UPPER_SHORT, b << 16, b & _UPPER_SHORT
        else:
            words = words_at(first, 4, "ld.global")
        for i in tl.static_range(4):
            number = words[i].to(tl.float32, bitcast=True)
            found = found + (tl.where(place < K, number, 0.0),)
    else:
        for i in tl.static_range(4):
            number = tl.load(tensor + place + i, place + i < K, other=0.0)
            found = found + (number.to(tl.float32),)
    return found


@triton.jit
def permuted(a, b, select):
    """A word of four bytes of two words: each hexadecimal digit says which, the lowest first."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [a, b, select],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _of_lane(word, lane):
    """The word that another lane of the warp has."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
        "=r,r,r",
        [word, lane],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def bytes_of_row(
    values,
    factors,
    epsilon,
    lane,
    K: tl.constexpr,
    NORM: tl.constexpr,
    STEPS: tl.constexpr,
    SETS: tl.constexpr,
    LIMBS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Of each step, of each round a word of a thread's own four channels, and the unit.

    In a round, the halves of a warp hold one byte of different channels, or, with one set of them,
    two bytes. factors: of the norm, or ().
    """
    ROUNDS: tl.constexpr = LIMBS if SETS == 2 else (LIMBS + 1) // 2
    squares, largest = lane * 0.0, lane * 0.0
    scaled = ()
    for i in tl.static_range(4 * STEPS):
        squares += values[i] * values[i]
        number = values[i] * factors[i] if len(factors) > 0 else values[i]
        largest = tl.maximum(largest, tl.abs(number), propagate_nan=tl.PropagateNan.ALL)
        scaled = scaled + (number,)
    squares, largest = of_all(squares, largest)
    squares *= SETS / 2  # with one set, each value is one of two threads
    norm, factor, unit = measured(*(squares, largest, epsilon, K, NORM, LIMBS, QUANTIZED, SHORT))
    found = ()
    for step in tl.static_range(STEPS):
        words, four, of_step = (), (), ()
        for i in tl.static_range(4):
            number = scaled[4 * step + i]
            four = four + (integers(number, norm, factor, LIMBS, QUANTIZED, SHORT),)
        for limb in tl.static_range(LIMBS):
            low = permuted(four[0][limb], four[1][limb], 0x40)
            high = permuted(four[2][limb], four[3][limb], 0x40)
            words = words + (permuted(low, high, 0x5410),)
        for m in tl.static_range(ROUNDS):
            if SETS == 2:
                word = words[m]
            elif 2 * m + 1 < LIMBS:
                word = tl.where(lane < 16, words[2 * m], words[2 * m + 1])
            else:
                word = tl.where(lane < 16, words[2 * m], 0)
            of_step = of_step + (word,)
        found = found + (of_step,)
    return found, unit


@triton.jit
def of_four_threads(words, lane):
    """Of each round, the words of the 16 channels that a thread multiplies: each made one."""
    found = ()
    for m in tl.static_range(len(words)):
        of_round = ()
        for h in tl.static_range(4):
            of_round = of_round + (_of_lane(words[m], (lane & 19) | (4 * h)),)
        found = found + (of_round,)
    return found
