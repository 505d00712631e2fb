"""Tiles of queries and keys in softmax attention: addresses, visibility and products.

A tile of queries is a matrix whose rows are the SHARE query heads of a token that share a key head,
then the query heads of the next token, and so on. The rows of a tile of keys are tokens of one key
head. Offsets of a tile are int64, offsets inside a tile int32.
"""

import triton
import triton.language as tl

from .._device.common import IN_INTERPRETER
from .._device.products import PRECISION, operand
from .._device.tokens import PADDING


@triton.jit
def query_rows(begin, b, head, T, H, TILE: tl.constexpr):
    """The offset of row `begin` of the heads from `head` on, relative offsets of ROWS rows, tokens.

    Offsets count rows of [B, T, H, ...]. If SHARE is H, the compiler sees that rows are contiguous.
    """
    SHARE: tl.constexpr = TILE.SHARE
    row = tl.arange(0, TILE.ROWS)
    later_tokens = (begin % SHARE + row) // SHARE
    base = b.to(tl.int64) * T * H + head + begin + (begin // SHARE).to(tl.int64) * (H - SHARE)
    return base, row + later_tokens * (H - SHARE), begin // SHARE + later_tokens


@triton.jit
def key_rows(begin, b, g, S, G, KEYS: tl.constexpr):
    """The offset of key `begin` of head g, relative offsets of KEYS keys, and indices of the keys.

    Offsets count rows of [B, S, G, ...].
    """
    key = tl.arange(0, KEYS)
    return (b.to(tl.int64) * S + begin) * G + g, key * G, begin + key


@triton.jit
def real_queries(visible, t, b, T):
    """Mask of the tokens t that exist and are not padding."""
    real, token_kind = t < T, visible[0]
    if token_kind is not None:
        real = tl.load(token_kind + b.to(tl.int64) * T + t, real, other=PADDING) != PADDING
    return real


@triton.jit
def visible_keys(visible, t, b, T, window):
    """The first and the last key that each token sees."""
    first_key, last_key = visible[1], visible[2]
    t = tl.minimum(t, T - 1)
    if first_key is None:
        low, high = tl.maximum(t - window + 1, 0), t
    else:
        offsets = b.to(tl.int64) * T + t
        low, high = tl.load(first_key + offsets), tl.load(last_key + offsets)
    return low, high


@triton.jit
def count_blocks(begin, inner_begin, inner_end, end, BLOCK: tl.constexpr):
    """Numbers of blocks of the range `begin` to `end` before, inside and after an inner range.

    Blocks inside lie completely in the inner range; the others, at its edges, need a mask.
    """
    num_before = tl.cdiv(tl.maximum(tl.minimum(inner_begin, end) - begin, 0), BLOCK)
    num_inside = tl.maximum(inner_end - begin - num_before * BLOCK, 0) // BLOCK
    num_after = tl.cdiv(tl.maximum(end - begin - (num_before + num_inside) * BLOCK, 0), BLOCK)
    return num_before, num_inside, num_after


@triton.jit
def block_number(i, num_before, num_inside, EDGE: tl.constexpr):
    """The index of the i-th inside block, or, with EDGE, of the i-th block at the edges."""
    if EDGE:
        number = tl.where(i < num_before, i, i + num_inside)
    else:
        number = i + num_before
    return number


@triton.jit
def _pointers(tensor, base, row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    return tensor + base * D + row[:, None] * D + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def load_rows(tensor, base, row, valid, D: tl.constexpr, BLOCK_D: tl.constexpr, TYPE: tl.constexpr):
    """Rows as operands [rows, BLOCK_D], 0 where `valid` is False; None: all rows are valid."""
    d_valid = tl.arange(0, BLOCK_D)[None, :] < D
    pointers = _pointers(tensor, base, row, D, BLOCK_D)
    if valid is not None:
        x = tl.load(pointers, valid[:, None] & d_valid, other=0.0)
    elif D == BLOCK_D:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, d_valid, other=0.0)
    return cast(x.to(tl.float32), TYPE)


@triton.jit
def store_rows(tensor, base, row, valid, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d_valid = tl.arange(0, BLOCK_D)[None, :] < D
    tl.store(_pointers(tensor, base, row, D, BLOCK_D), x, valid[:, None] & d_valid)


@triton.jit
def product(a, b, total, TYPE: tl.constexpr):
    """total + a b in float32, with operands of TYPE; `_device/products.py` explains float32.

    The backward recomputes logits and must get identical ones. Tensor cores sum in a fixed order.
    NumPy, in the interpreter, sums in an order that depends on the position in the tile, so there
    float32 operands are summed in float64.
    """
    if IN_INTERPRETER and TYPE.is_fp32():
        total += tl.dot(a.to(tl.float64), b.to(tl.float64)).to(tl.float32)
    else:
        total = tl.dot(cast(a, TYPE), cast(b, TYPE), total, input_precision=PRECISION)
    return total


@triton.jit
def rounding_rest(x, rounded, TYPE: tl.constexpr):
    """The next 8 bits of x after it was rounded to TYPE, of 16 bits, as int8.

    A float32 number has 16 bits more than bfloat16, and 13 more than float16.
    """
    SHIFT: tl.constexpr = 8 if TYPE.is_bf16() else 5
    bits = x.to(tl.int32, bitcast=True) - rounded.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits + (1 << SHIFT) // 2) >> SHIFT, -128), 127).to(tl.int8)


@triton.jit
def add_rest(rounded, rest, TYPE: tl.constexpr):
    """x in float32 from `rounded` and its `rounding_rest`."""
    SHIFT: tl.constexpr = 8 if TYPE.is_bf16() else 5
    bits = rounded.to(tl.int32, bitcast=True) + (rest << SHIFT)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def cast(x, TYPE: tl.constexpr):
    if TYPE.is_bf16():
        x = operand(x, True)
    else:
        x = x.to(TYPE)
    return x
