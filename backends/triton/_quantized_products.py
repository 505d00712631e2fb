"""RMSNorm(x) W for one row, W of integers of 8 or 4 bits: see `norm_quantized_linear`."""

import triton
import triton.language as tl

from keras_recurrent.backends.constants import ROW_EPSILON
from keras_recurrent.backends.triton._ahead import wait_for_launch_before
from keras_recurrent.backends.triton._common import IN_INTERPRETER

_ROW_EPSILON = tl.constexpr(ROW_EPSILON)
# Of float32: the exponent of 2^23, whose mantissa counts units, and that number and half.
_EXPONENT = tl.constexpr(0x4B000000)
_UNITS_FROM = tl.constexpr(8388608.0)
_ROUNDS = tl.constexpr(12582912.0)


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
def _scaled(x, scale, k, K: tl.constexpr):
    value = tl.load(x + k, k < K, other=0.0).to(tl.float32)
    if scale is not None:
        value *= tl.load(scale + k, k < K, other=0.0).to(tl.float32)
    return value


@triton.jit
def _factors(
    x,
    scale,
    epsilon,
    K: tl.constexpr,
    ROW: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SHORT: tl.constexpr,
):
    """What normalizes the row, and what then scales it to integers: both once for a program."""
    k = tl.arange(0, ROW)
    norm = 1.0
    factor = 1.0
    if NORM:
        value = tl.load(x + k, k < K, other=0.0).to(tl.float32)
        z = tl.sum(value * value, 0) / K + epsilon
        norm = tl.where(z == 0, 0.0, tl.div_rn(1.0, tl.sqrt_rn(tl.where(z == 0, 1.0, z))))
    if QUANTIZED:
        # Rounding keeps the order, so the largest number may be rounded in place of all.
        largest = _rounded(tl.max(tl.abs(_scaled(x, scale, k, K)), 0) * norm, SHORT)
        factor = _rounded(tl.div_rn(127.0, _rounded(largest + _ROW_EPSILON, SHORT)), SHORT)
    return norm, factor


@triton.jit
def of_one_row(
    x,
    scale,
    kernel,
    kernel_scale,
    kernel_zero,
    tile,
    epsilon,
    K: tl.constexpr,
    N: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SHORT: tl.constexpr,
    ROW: tl.constexpr,
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Some columns [WORDS * 32 / BITS] of RMSNorm(x) W, float32.

    Weights are read as words of 32 bits, which hold neighboring columns of one channel. A lane
    multiplies AT_ONCE channels that follow one another, whose weights are all under way together,
    the first ones before x is there, and adds up many such groups; lanes meet once, at the end. So
    a group lies in one block of channels, if W has blocks of their own scales and zero points.

    The bits of a weight, moved into the mantissa of 2^23, are a float that exceeds 2^23 by as many
    units as the bits say: less that and the zero point, it is the weight, exactly. This takes two
    instructions, one of them for integers, of which a GPU runs half as many as of those for floats.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    ROW_WORDS: tl.constexpr = N // PER_WORD
    GROUPS: tl.constexpr = (K + LANES * AT_ONCE - 1) // (LANES * AT_ONCE)
    WHOLE: tl.constexpr = K % (LANES * AT_ONCE) == 0 and ROW_WORDS % WORDS == 0
    SIGNS: tl.constexpr = 0x80808080 if BITS == 8 else 0x88888888
    MIDDLE: tl.constexpr = 2 ** (BITS - 1)  # what no sign adds to a weight
    PIECE: tl.constexpr = min(AT_ONCE, BITS // 2)  # channels whose products fit the registers
    step = tl.arange(0, PIECE)[:, None]
    lane = tl.arange(0, LANES)
    word = tile * WORDS + tl.arange(0, WORDS)
    # Of the columns in a word: how far their bits move right, so that they end below bit 23, and
    # what a unit of theirs is then.
    place = BITS * tl.arange(0, PER_WORD)[None, None, :]
    move = tl.where(place + BITS > 23, 16, 0)
    unit = (1 << (place - move)).to(tl.uint32)
    mask = (unit * (2**BITS - 1))[None, :, :, :]
    n = word[:, None] * PER_WORD + tl.arange(0, PER_WORD)[None, :]
    words = kernel.to(tl.pointer_type(tl.uint32))
    total = tl.zeros((LANES, WORDS, PER_WORD), tl.float32)
    norm = 1.0
    factor = 1.0
    for i in tl.static_range(GROUPS):
        first = (i * LANES + lane) * AT_ONCE
        loaded = ()
        for piece in tl.static_range(AT_ONCE // PIECE):
            k = first[None, :] + piece * PIECE + step
            places = words + k[:, :, None] * ROW_WORDS + word[None, None, :]
            if WHOLE:
                bits = tl.load(places)
            else:
                bits = tl.load(places, (k < K)[:, :, None] & (word < ROW_WORDS), other=0)
            loaded = loaded + (bits,)
        origin = unit.to(tl.float32) * MIDDLE
        if BLOCK_SIZE:
            block = (first // BLOCK_SIZE)[:, None, None] * N + n[None, :, :]
            valid = (first < K)[:, None, None] & (n < N)[None, :, :]
            zero = tl.load(kernel_zero + block, valid, other=0).to(tl.float32)
            block_scale = tl.load(kernel_scale + block, valid, other=0.0).to(tl.float32)
            origin = (zero + MIDDLE) * unit.to(tl.float32)
        origin += _UNITS_FROM
        if i == 0:
            if AHEAD:
                wait_for_launch_before()
            norm, factor = _factors(x, scale, epsilon, K, ROW, NORM, QUANTIZED, SHORT)
        products = tl.zeros((LANES, WORDS, PER_WORD), tl.float32)
        for piece in tl.static_range(AT_ONCE // PIECE):
            value = _scaled(x, scale, first[None, :] + piece * PIECE + step, K)
            if QUANTIZED:
                # The largest magnitude becomes 127, but for rounding.
                value = _rounded(_rounded(value * norm, SHORT) * factor, SHORT)
                value = tl.minimum(tl.maximum((value + _ROUNDS) - _ROUNDS, -127.0), 127.0)
            bits = ((loaded[piece] ^ SIGNS)[:, :, :, None] >> move[None, :, :, :]) & mask
            weight = (bits | _EXPONENT).to(tl.float32, bitcast=True) - origin[None, :, :, :]
            products += tl.sum(value[:, :, None, None] * weight, 0)
        total += products * block_scale if BLOCK_SIZE else products
    sums = tl.sum(total * (1.0 / unit.to(tl.float32)), 0)
    if BLOCK_SIZE == 0:
        divisor = tl.load(kernel_scale + n, n < N, other=1.0).to(tl.float32)
        sums = tl.div_rn(sums, divisor * factor)
    if NORM and not QUANTIZED:
        sums *= norm
    return sums, n
