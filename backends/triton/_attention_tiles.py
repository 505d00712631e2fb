"""Tiles of queries and of keys: where they lie, which meet, and their products.

A tile of queries is rows: SHARE heads of a token, then those of the next one. A tile of keys is
keys of one head. Indices are int64 at the first row of a tile, and int32 from there on.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton._common import INTERPRETED
from keras_recurrent.backends.triton._products import PRECISION, operand

_PLAIN = tl.constexpr(INTERPRETED)


@triton.jit
def rows_of(begin, b, head, T, H, SHARE: tl.constexpr, ROWS: tl.constexpr):
    """Of rows from `begin` on, in heads from `head` on: where the first lies, the others, tokens.

    Where no other heads lie between them, as the compiler sees, they follow each other.
    """
    row = tl.arange(0, ROWS)
    later = (begin % SHARE + row) // SHARE
    first = b.to(tl.int64) * T * H + head + begin + (begin // SHARE).to(tl.int64) * (H - SHARE)
    return first, row + later * (H - SHARE), begin // SHARE + later


@triton.jit
def keys_of(begin, b, g, S, G, KEYS: tl.constexpr):
    """Of keys from `begin` on: the first one, where they lie, and their places."""
    key = tl.arange(0, KEYS)
    return (b.to(tl.int64) * S + begin) * G + g, key * G, begin + key


@triton.jit
def are_real(token_kind, t, b, T):
    """Which of the tokens are there and no padding."""
    real = t < T
    if token_kind is not None:
        real = tl.load(token_kind + b.to(tl.int64) * T + t, real, other=2) != 2
    return real


@triton.jit
def sight_of(t, b, first_key, last_key, T, window):
    """The first and the last key that each token sees."""
    t = tl.minimum(t, T - 1)
    if first_key is None:
        low, high = tl.maximum(t - window + 1, 0), t
    else:
        at = b.to(tl.int64) * T + t
        low, high = tl.load(first_key + at), tl.load(last_key + at)
    return low, high


@triton.jit
def blocks(begin, whole, whole_end, end, BLOCK: tl.constexpr):
    """How many blocks of a range begin before a part of it, how many lie in it, how many follow."""
    before = tl.cdiv(tl.maximum(tl.minimum(whole, end) - begin, 0), BLOCK)
    inside = tl.maximum(whole_end - begin - before * BLOCK, 0) // BLOCK
    behind = tl.cdiv(tl.maximum(end - begin - (before + inside) * BLOCK, 0), BLOCK)
    return before, inside, behind


@triton.jit
def block_number(i, before, inside, EDGE: tl.constexpr):
    """Of the i-th block inside, or of the i-th one of all the others."""
    if EDGE:
        number = tl.where(i < before, i, i + inside)
    else:
        number = i + before
    return number


@triton.jit
def _at(tensor, base, row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    return tensor + base * D + row[:, None] * D + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def read(tensor, base, row, there, D: tl.constexpr, BLOCK_D: tl.constexpr, TYPE: tl.constexpr):
    """[rows, BLOCK_D] as operands, 0 where nothing is; `there` None: every row is."""
    inside = tl.arange(0, BLOCK_D)[None, :] < D
    at = _at(tensor, base, row, D, BLOCK_D)
    if there is not None:
        x = tl.load(at, there[:, None] & inside, other=0.0)
    elif D == BLOCK_D:
        x = tl.load(at)
    else:
        x = tl.load(at, inside, other=0.0)
    return _as(x.to(tl.float32), TYPE)


@triton.jit
def write(tensor, base, row, there, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    inside = tl.arange(0, BLOCK_D)[None, :] < D
    tl.store(_at(tensor, base, row, D, BLOCK_D), x, there[:, None] & inside)


@triton.jit
def product(a, b, total, TYPE: tl.constexpr):
    """total + a b, in float32. TYPE is that of the operands; of float32, `_products` says how.

    The backward makes logits again, and needs the same ones. Tensor cores add in one order; NumPy,
    in the interpreter, in one for each place in a tile: there the sums are float64.
    """
    if _PLAIN and TYPE.is_fp32():
        total += tl.dot(a.to(tl.float64), b.to(tl.float64)).to(tl.float32)
    else:
        total = tl.dot(_as(a, TYPE), _as(b, TYPE), total, input_precision=PRECISION)
    return total


@triton.jit
def _as(x, TYPE: tl.constexpr):
    if TYPE.is_bf16():
        x = operand(x, True)
    else:
        x = x.to(TYPE)
    return x
