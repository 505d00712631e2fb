"""The row x as signed bytes, for products of bytes: see `quantized_products`.

A row that Keras quantizes, too, becomes integers of 8 bits. Other rows become fixed-point numbers
of 16 or 24 bits relative to the largest magnitude: two or three signed bytes (limbs), the highest
first; one unit of a limb is 256 units of the next.
"""

import triton
import triton.language as tl

from ...constants import ROW_EPSILON
from .._device.common import IN_INTERPRETER, load_float32
from .._device.math import reciprocal_root

_ROW_EPSILON = tl.constexpr(ROW_EPSILON)
# Adding this to a float32 rounds it to an integer, which is then in the lowest bits of the sum.
_ROUNDING_OFFSET = tl.constexpr(12582912.0)
# Fixed-point value of the largest magnitude: 127 units of the highest byte, so that rounding fits.
_MAX_OF_2_LIMBS = tl.constexpr(127.0 * 2**8)
_MAX_OF_3_LIMBS = tl.constexpr(127.0 * 2**16)
_HIGH_HALF = tl.constexpr(0xFFFF0000 - 2**32)  # a mask of words, as int32
_SMALLEST_MAX = tl.constexpr(1e-30)  # smallest maximum: below it, the inverse is infinite


@triton.jit
def instruct(
    ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    operands,
    PURE: tl.constexpr,
    COUNT: tl.constexpr = 1,
):
    """Runs an instruction of PTX in each thread; returns its word, or the tuple of COUNT words."""
    return tl.inline_asm_elementwise(
        ASM, CONSTRAINTS, operands, tl.int32 if COUNT == 1 else (tl.int32,) * COUNT, PURE, 1
    )


@triton.jit
def _round_to_dtype(value, SHORT: tl.constexpr):
    """Rounds to the row's dtype: bfloat16 if SHORT, else float32."""
    if SHORT:
        if IN_INTERPRETER:  # it truncates instead of rounding
            bits = value.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            value = bits.to(tl.float32, bitcast=True)
        else:
            value = value.to(tl.bfloat16).to(tl.float32)
    return value


@triton.jit
def _round_to_int(value):
    """Rounds to an integer in the lowest bits; the other bits are left as they come."""
    return (value + _ROUNDING_OFFSET).to(tl.int32, bitcast=True)


@triton.jit
def _add_and_max(a, b, a_2, b_2):
    return a + a_2, tl.maximum(b, b_2, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_sum_and_max(squares, largest):
    """The sum of squares and the maximum of magnitudes over a block; the maximum keeps NaN."""
    if IN_INTERPRETER:  # its maximum ignores NaN
        squares, largest = tl.sum(squares, 0), tl.max(largest, 0) + tl.sum(largest * 0.0, 0)
    else:
        squares, largest = tl.reduce((squares, largest), 0, _add_and_max)
    return squares, largest


@triton.jit
def row_scales(squares, largest, epsilon, SHORT: tl.constexpr, PRODUCT: tl.constexpr):
    """Returns the norm's factor, the factor from numbers to integers, and the lowest byte's unit.

    Integers cannot be NaN or infinite: if a number of the row is, the unit is NaN.
    """
    norm = 1.0
    if PRODUCT.NORM:
        mean = squares / PRODUCT.K + epsilon
        if SHORT and not PRODUCT.QUANTIZED:
            # One instruction on the critical path, with an error of 2e-7.
            norm = tl.where(mean > 0.0, tl.rsqrt(mean), mean * 0.0)
        else:
            norm = reciprocal_root(mean)
    nan_or_zero = largest * 0.0
    if PRODUCT.QUANTIZED:
        # Rounding is monotonic, so rounding the maximum gives the maximum of rounded numbers.
        largest = _round_to_dtype(largest * norm, SHORT)
        factor = _round_to_dtype(
            tl.div_rn(127.0, _round_to_dtype(largest + _ROW_EPSILON, SHORT)), SHORT
        )
        unit = tl.div_rn(1.0, factor)
    else:
        limit: tl.constexpr = _MAX_OF_2_LIMBS if PRODUCT.LIMBS == 2 else _MAX_OF_3_LIMBS
        largest = tl.maximum(largest, _SMALLEST_MAX)
        factor = limit / largest
        unit = largest * (1.0 / limit) * norm
    return norm, factor, unit + nan_or_zero


@triton.jit
def quantize(value, norm, factor, SHORT: tl.constexpr, PRODUCT: tl.constexpr):
    """LIMBS bytes of each number, highest first, each in the lowest bits of an int32."""
    if PRODUCT.QUANTIZED:
        value = _round_to_dtype(_round_to_dtype(value * norm, SHORT) * factor, SHORT)
        limbs = (_round_to_int(tl.minimum(tl.maximum(value, -127.0), 127.0)),)
    else:
        high = value * factor
        last = ()
        if PRODUCT.LIMBS == 3:
            value = high
            high = (value * (1.0 / 256) + _ROUNDING_OFFSET) - _ROUNDING_OFFSET
            last = (_round_to_int(tl.minimum(value - high * 256.0, 127.0)),)
        # The lower byte is signed: 128 is added before the split, and its highest bit flipped.
        bits = _round_to_int(high + 128.0)
        limbs = (bits >> 8, bits ^ 128) + last
    return limbs


@triton.jit
def load_words(pointer, WORDS: tl.constexpr, LOAD: tl.constexpr):
    """Loads one, two or four words from an aligned address in one instruction LOAD."""
    if WORDS == 1:
        words = (instruct(LOAD + ".b32 $0, [$1];", "=r,l", (pointer,), False),)
    elif WORDS == 2:
        words = instruct(LOAD + ".v2.b32 {$0, $1}, [$2];", "=r,=r,l", (pointer,), False, 2)
    else:
        instruction: tl.constexpr = LOAD + ".v4.b32 {$0, $1, $2, $3}, [$4];"
        words = instruct(instruction, "=r,=r,=r,=r,l", (pointer,), False, 4)
    return words


@triton.jit
def load_four(tensor, column, K: tl.constexpr, WHOLE: tl.constexpr):
    """Loads four consecutive numbers as float32; 0 from the K-th on."""
    if WHOLE:
        first = tensor + tl.minimum(column, K - 4)
        if tensor.dtype.element_ty == tl.bfloat16:
            a, b = load_words(first, 2, "ld.global")
            words = a << 16, a & _HIGH_HALF, b << 16, b & _HIGH_HALF
        else:
            words = load_words(first, 4, "ld.global")
        numbers = [word.to(tl.float32, bitcast=True) for word in words]
        numbers = [tl.where(column < K, number, 0.0) for number in numbers]
    else:
        numbers = [load_float32(tensor, column + i, column + i < K) for i in (0, 1, 2, 3)]
    return numbers


@triton.jit
def permute_bytes(a, b, select):
    """A word of four bytes of a and b; hexadecimal digits of `select` choose them, lowest first."""
    return instruct("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", (a, b, select), True)


@triton.jit
def _shuffle_word(word, lane):
    """The word of another lane of the warp."""
    return instruct("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", (word, lane), False)


@triton.jit
def quantize_row(
    values,
    factors,
    row_squares,
    epsilon,
    lane,
    SHORT: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Quantizes the row. Returns, per step and round, a word of a thread's four channels; the unit.

    In a round, the halves of a warp hold one byte of different channels (SETS is 2), or two bytes
    of the same channels. values, factors: numbers of the row, and their factors or (). row_squares:
    a tuple of the result of `load_squares`, or (): the squares of `values` are summed.
    """
    squares, largest = lane * 0.0, lane * 0.0
    scaled = ()
    for i in tl.static_range(4 * PRODUCT.STEPS):
        squares += values[i] * values[i]
        number = values[i] * factors[i] if len(factors) > 0 else values[i]
        largest = tl.maximum(largest, tl.abs(number), propagate_nan=tl.PropagateNan.ALL)
        scaled = scaled + (number,)
    squares, largest = block_sum_and_max(squares, largest)
    squares *= PRODUCT.SETS / 2  # with one set, two threads have each value
    if len(row_squares) > 0:
        squares = tl.sum(row_squares[0])
    norm, factor, unit = row_scales(squares, largest, epsilon, SHORT, PRODUCT)
    row_words = ()
    for step in tl.static_range(PRODUCT.STEPS):
        words, step_words = (), ()
        numbers = scaled[4 * step : 4 * step + 4]
        four = [quantize(number, norm, factor, SHORT, PRODUCT) for number in numbers]
        for limb in tl.static_range(PRODUCT.LIMBS):
            low = permute_bytes(four[0][limb], four[1][limb], 0x40)
            high = permute_bytes(four[2][limb], four[3][limb], 0x40)
            words = words + (permute_bytes(low, high, 0x5410),)
        for m in tl.static_range(PRODUCT.ROUNDS):
            if PRODUCT.SETS == 2:
                word = words[m]
            elif 2 * m + 1 < PRODUCT.LIMBS:
                word = tl.where(lane < 16, words[2 * m], words[2 * m + 1])
            else:
                word = tl.where(lane < 16, words[2 * m], 0)
            step_words = step_words + (word,)
        row_words = row_words + (step_words,)
    return row_words, unit


@triton.jit
def gather_four_lanes(words, lane):
    """Gathers from four lanes, per round, the words of the 16 channels that a thread multiplies."""
    return [[_shuffle_word(word, (lane & 19) | (4 * h)) for h in (0, 1, 2, 3)] for word in words]
