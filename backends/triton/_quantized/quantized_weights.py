"""Loads of weights, scales and zero points of `norm_quantized_linear`: see `quantized_products`.

A weight tile is the part of one weight that a program multiplies in a step. Its weights, scales and
zero points of blocks are loaded before the row is available, as many tiles as registers can hold.
"""

import triton
import triton.language as tl

from .quantized_row import load_words, permute_bytes

_HIGH_HALF = tl.constexpr(0xFFFF0000 - 2**32)  # a mask of words, as int32


@triton.jit
def _stream_words(pointer, WORDS: tl.constexpr):
    """Loads words of weights, each of which is read once.

    With loads through the read-only cache (ld.global.nc), the assembler would move them after the
    wait for the previous launch.
    """
    return load_words(pointer, WORDS, "ld.global.L1::no_allocate.L2::128B")


@triton.jit
def _addresses(tensor, column, columns, VECTOR: tl.constexpr, COUNT: tl.constexpr):
    """Addresses of COUNT elements of a row from `column` on, one for every VECTOR elements.

    Beyond the last column, the last elements are read again; sums of such columns are not stored.
    """
    addresses = ()
    for i in tl.static_range(0, COUNT, VECTOR):
        addresses = addresses + (tensor + tl.minimum(column + i, columns - VECTOR),)
    return addresses


@triton.jit
def weight_addresses(
    weights, i: tl.constexpr, channel, word, column, columns, PRODUCT: tl.constexpr
):
    """Addresses of a thread's words in its first channel, and of their scales and zero points.

    Args:
        weights: tuples of kernels, of their scales and of their zero points.
        i: integer, index of the weight in each tuple.
    """
    kernels, scales, zeros = weights
    VECTOR: tl.constexpr = 4 if PRODUCT.VECTORS else 1
    row_words = columns // (32 // PRODUCT.BITS)
    words = kernels[i].to(tl.pointer_type(tl.int32)) + channel * row_words
    words = _addresses(
        *(words, word, row_words, PRODUCT.WORDS if PRODUCT.VECTORS else 1, PRODUCT.WORDS)
    )
    numbers = ()
    if PRODUCT.BLOCK_SIZE:
        block_offset = channel // PRODUCT.BLOCK_SIZE * columns
        for w in tl.static_range(PRODUCT.WORDS):
            word_scales = _addresses(scales[i] + block_offset, column + 8 * w, columns, VECTOR, 4)
            word_zeros = _addresses(zeros[i] + block_offset, column + 8 * w, columns, VECTOR, 4)
            numbers = numbers + ((word_scales, word_zeros),)
    return words, numbers


@triton.jit
def _row_address(
    address,
    channel,
    offset: tl.constexpr,
    within,
    row_words,
    K: tl.constexpr,
    WITHIN: tl.constexpr,
):
    """The address of channel `channel + offset + within`, from that of `channel`.

    within: the channel's index among the 64 of a warp. WITHIN: all channels of the step are below
    K. Otherwise channels beyond it read other ones, for which the row has zeros.
    """
    if WITHIN:
        address += offset * row_words
    elif K % 64 == 0:
        address += (tl.minimum(channel + offset, K - 64 + channel % 64) - channel) * row_words
    else:
        within = tl.minimum(channel + offset + within, K - 1) - channel
    return address + within * row_words


@triton.jit
def _load_columns(addresses, rows, COUNT: tl.constexpr):
    """Loads four scales or zero points, `rows` elements after `addresses`, as COUNT words.

    With four addresses, the numbers are loaded one by one instead.
    """
    if len(addresses) == 1:
        columns = _stream_words(addresses[0] + rows, COUNT)
    else:
        columns = [tl.load(address + rows) for address in addresses]
    return columns


@triton.jit
def load_four_channels(
    addresses, channel, columns, TILE: tl.constexpr, h: tl.constexpr, PRODUCT: tl.constexpr
):
    """Loads a thread's words of the h-th four of its channels in a weight tile.

    Where these channels begin a block, also loads its scales and zero points, a pair per word.
    """
    offset: tl.constexpr = TILE // len(addresses) * PRODUCT.SPAN
    words_at, numbers_at = addresses[TILE % len(addresses)]
    K: tl.constexpr = PRODUCT.K
    BLOCK_SIZE: tl.constexpr = PRODUCT.BLOCK_SIZE
    WITHIN: tl.constexpr = offset + PRODUCT.SPAN <= K
    row_words = columns // (32 // PRODUCT.BITS)
    words, numbers = (), ()
    for i in tl.static_range(4):
        for w in tl.static_range(len(words_at)):
            address = _row_address(words_at[w], channel, offset, 16 * h + i, row_words, K, WITHIN)
            words = words + _stream_words(address, PRODUCT.WORDS // len(words_at))
    if BLOCK_SIZE > 0 and h * 16 % min(BLOCK_SIZE, 64) == 0:
        if WITHIN and BLOCK_SIZE <= PRODUCT.SPAN:
            blocks = (offset + 16 * h) // BLOCK_SIZE
        else:
            blocks = tl.minimum((channel + offset + 16 * h) // BLOCK_SIZE, (K - 1) // BLOCK_SIZE)
            blocks -= channel // BLOCK_SIZE
        for w in tl.static_range(PRODUCT.WORDS):
            scales = _load_columns(numbers_at[w][0], blocks * columns, 2)
            zeros = _load_columns(numbers_at[w][1], blocks * columns, 1)
            numbers = numbers + ((scales, zeros),)
    return words, numbers


@triton.jit
def scale_and_zero(scales, zeros, i: tl.constexpr):
    """The i-th of four scales in float32 and zero points in int32, from words or single numbers."""
    if len(scales) == 2:
        bits = scales[i // 2] & _HIGH_HALF if i % 2 else scales[i // 2] << 16
        # A selector of 8 or more repeats the sign of a byte.
        scale = bits.to(tl.float32, bitcast=True)
        zero = permute_bytes(zeros[0], zeros[0], 0x8880 + 0x1111 * i)
    else:
        scale, zero = scales[i].to(tl.float32), zeros[i].to(tl.int32)
    return scale, zero
