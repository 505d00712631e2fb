"""What a program of `norm_quantized_linear` reads of its maps: see `quantized_products`.

A piece is what a program multiplies in a step of one map. Loads of its weights, and of its scales
and zero points of blocks, are under way before the row is there, as many pieces as registers hold.
"""

import triton
import triton.language as tl

from .quantized_row import permuted, words_at

_UPPER_SHORT = tl.constexpr(0xFFFF0000 - 2**32)  # a mask of words, as int32


@triton.jit
def _words_read_once(pointer, WORDS: tl.constexpr):
    """Words of weights.

    Through the read-only cache (ld.global.nc), the assembler would move loads behind the wait for
    the launch before.
    """
    return words_at(pointer, WORDS, "ld.global.L1::no_allocate.L2::128B")


@triton.jit
def _addresses(tensor, column, columns, TOGETHER: tl.constexpr, COUNT: tl.constexpr):
    """Where COUNT elements of a row from a column on are: one address for TOGETHER of them.

    Those behind the last column are read as the last ones; sums of such columns are not written.
    """
    found = ()
    for i in tl.static_range(0, COUNT, TOGETHER):
        found = found + (tensor + tl.minimum(column + i, columns - TOGETHER),)
    return found


@triton.jit
def first_addresses(
    kernel,
    scales,
    zeros,
    channel,
    word,
    column,
    columns,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Where a thread's words of its first channel are, and scales and zero points of each word."""
    row_words = columns // (32 // BITS)
    words = kernel.to(tl.pointer_type(tl.int32)) + channel * row_words
    words = _addresses(words, word, row_words, WORDS if VECTORS else 1, WORDS)
    numbers = ()
    if BLOCK_SIZE:
        place = channel // BLOCK_SIZE * columns
        for w in tl.static_range(WORDS):
            numbers = numbers + (
                (
                    _addresses(scales + place, column + 8 * w, columns, 4 if VECTORS else 1, 4),
                    _addresses(zeros + place, column + 8 * w, columns, 4 if VECTORS else 1, 4),
                ),
            )
    return words, numbers


@triton.jit
def _at(
    address,
    channel,
    offset: tl.constexpr,
    within,
    row_words,
    K: tl.constexpr,
    WITHIN: tl.constexpr,
):
    """The address `offset + within` rows behind that of a channel, so many within its 64 channels.

    WITHIN: none of a step's channels is behind the K-th. Such ones are read as others: the row has
    zeros for them.
    """
    if WITHIN:
        address += offset * row_words
    elif K % 64 == 0:
        address += (tl.minimum(channel + offset, K - 64 + channel % 64) - channel) * row_words
    else:
        within = tl.minimum(channel + offset + within, K - 1) - channel
    return address + within * row_words


@triton.jit
def _of_columns(addresses, rows, COUNT: tl.constexpr):
    """Four scales or zero points, so many elements behind: COUNT words, or one each."""
    found = ()
    if len(addresses) == 1:
        found = _words_read_once(addresses[0] + rows, COUNT)
    else:
        for i in tl.static_range(4):
            found = found + (tl.load(addresses[i] + rows),)
    return found


@triton.jit
def of_four_channels(
    first,
    channel,
    columns,
    offset: tl.constexpr,
    h: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """A thread's words of the h-th four of its channels in the step that is `offset` channels on.

    With those where a block begins, its scales and zero points: a pair of tuples of each word.
    """
    WITHIN: tl.constexpr = offset + SPAN <= K
    row_words = columns // (32 // BITS)
    words, numbers = (), ()
    for i in tl.static_range(4):
        for w in tl.static_range(len(first[0])):
            place = _at(first[0][w], channel, offset, 16 * h + i, row_words, K, WITHIN)
            words = words + _words_read_once(place, WORDS // len(first[0]))
    if BLOCK_SIZE > 0 and h * 16 % min(BLOCK_SIZE, 64) == 0:
        if WITHIN and BLOCK_SIZE <= SPAN:
            blocks = (offset + 16 * h) // BLOCK_SIZE
        else:
            blocks = tl.minimum((channel + offset + 16 * h) // BLOCK_SIZE, (K - 1) // BLOCK_SIZE)
            blocks -= channel // BLOCK_SIZE
        for w in tl.static_range(WORDS):
            numbers = numbers + (
                (
                    _of_columns(first[1][w][0], blocks * columns, 2),
                    _of_columns(first[1][w][1], blocks * columns, 1),
                ),
            )
    return words, numbers


@triton.jit
def scale_and_zero(scales, zeros, i: tl.constexpr):
    """The i-th of four, float32 and int32, of words or of one each."""
    if len(scales) == 2:
        bits = scales[i // 2] & _UPPER_SHORT if i % 2 else scales[i // 2] << 16
        # A digit of 8 and more is the sign of a byte.
        scale, zero = (
            bits.to(tl.float32, bitcast=True),
            permuted(zeros[0], zeros[0], 0x8880 + 0x1111 * i),
        )
    else:
        scale, zero = scales[i].to(tl.float32), zeros[i].to(tl.int32)
    return scale, zero
