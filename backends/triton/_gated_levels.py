"""The halves of a chunk of gated linear attention: which tokens meet at a level, and over what.

Inside a chunk, token u meets an earlier s with the weight sum_k q_u f_{s+1} ... f_u k_s; for a
matrix product the decays must be shared out between q_u and k_s. As in `backends/torch`, the chunk
is halved again and again: where u lies in a right half and s in the left half beside it, q_u takes
the decays from the boundary to u, and k_s those from s to the boundary. The logarithm of either is
a sum along the tokens of one half, so at each level

    X = W log f,  Y = exp(X) * (q in right halves, k in left ones),  Y Y^T

where W is made of 0 and 1, and of the last product the pairs of that level are kept. These are
products of decays only, never quotients, so any decay is safe.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton._common import INTERPRETED
from keras_recurrent.backends.triton._gated_states import applied
from keras_recurrent.backends.triton._linear_attention import read
from keras_recurrent.backends.triton._math import one_minus_exp

_PLAIN = tl.constexpr(INTERPRETED)


@triton.jit
def matrix(which, one):
    """A matrix of 0 and 1 from one of False and True; one: `ones`."""
    which = tl.where(which, one[:, None], 0.0)
    if not _PLAIN:
        which = which.to(tl.bfloat16)
    return which


@triton.jit
def _between(row, low, high, one):
    """1 where a column is from `low` of its row on, and below `high`.

    That is min(1, relu(reach - |column - middle|)), exact in bfloat16 for up to 64 tokens, of which
    a GPU computes two at once: half the instructions of two comparisons.
    """
    if _PLAIN:
        return matrix((row[None, :] >= low[:, None]) & (row[None, :] < high[:, None]), one)
    middle = (one * 0.5 * (low + high - 1)).to(tl.bfloat16)
    reach = (one * 0.5 * (high - low + 1)).to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 one, minus, off;
            mov.b32 one, 0x3F803F80;
            mov.b32 minus, 0xBF80BF80;
            fma.rn.bf16x2 off, $2, minus, $1;
            abs.bf16x2 off, off;
            fma.rn.relu.bf16x2 off, off, minus, $3;
            min.bf16x2 $0, off, one;
        }""",
        "=r,r,r,r",
        [row.to(tl.bfloat16)[None, :], middle[:, None], reach[:, None]],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def laid_out(row, one):
    """`row`, laid out as products are, and so what is chosen by it: not anew for each level."""
    return (row * one).to(tl.int32)


@triton.jit
def is_right(row, level):
    """Whether a token is in a right half of 2^level."""
    return (row >> level) % 2 == 1


@triton.jit
def span(row, level):
    """From and before which token each reaches: from the boundary up to itself, or on to there."""
    right, begin = is_right(row, level), row >> level << level
    return tl.where(right, begin, row + 1), tl.where(right, row + 1, begin + (1 << level))


@triton.jit
def to_boundary(row, level, one):
    """W: which tokens each reaches over."""
    low, high = span(row, level)
    return _between(row, low, high, one)


@triton.jit
def from_boundary(row, level, one):
    """The transpose of W."""
    right, begin = is_right(row, level), row >> level << level
    low = tl.where(right, row, begin)
    high = tl.where(right, begin + (1 << level), row)
    return _between(row, low, high, one)


@triton.jit
def beside(row, level):
    """The pairs of tokens in two halves beside each other."""
    return (row[:, None] ^ row[None, :]) & (-1 << level) == 1 << level


@triton.jit
def place_of_program(T, H, chunks, tiles, CHUNK: tl.constexpr):
    """Of this program: the tile, chunk, number of the head, row of the batch, and first token."""
    tile = tl.program_id(0) % tiles
    chunk = tl.program_id(0) // tiles % chunks
    head = tl.program_id(0) // tiles // chunks
    b = head // H
    token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
    return tile, chunk, head, b, token


@triton.jit
def read_chunk(
    q, k, log_f, token, row, real, starts, d, K, H, SHORT: tl.constexpr
):  # fmt: skip
    """q, k, log f as given, and the logarithms of the decays applied: [CHUNK, BLOCK_K]."""
    query = read(q + token * K, row, real, d, K, H)
    logarithm = read(log_f + token * K, row, real, d, K, H)
    if k is None:
        key = one_minus_exp(logarithm, not SHORT)
    else:
        key = read(k + token * K, row, real, d, K, H)
    return query, key, logarithm, applied(logarithm, starts[:, None])
