"""The halves of a chunk of gated linear attention: which pairs of tokens each level computes.

Inside a chunk, the weight of an earlier token s for a token u is sum_k q_u f_{s+1} ... f_u k_s. For
a matrix product the decays must be divided between q_u and k_s. As in `backends/torch`, the chunk
is halved again and again, and level n has halves of 2^n tokens. Where u lies in a right half and s
in the left half next to it, q_u takes the decays from the boundary to u, and k_s those from s to
the boundary. The logarithm of either is a sum over tokens of one half, so at each level

    X = W log f,  Y = exp(X) * (q in right halves, k in left ones),  Y Y^T

where W is made of 0 and 1, and only that level's pairs of the last product are used. All of these
are products of decays, never quotients, so any decay is safe.
"""

import triton
import triton.language as tl

from keras_recurrent.backends.triton._common import IN_INTERPRETER
from keras_recurrent.backends.triton._gated_states import applied_decays
from keras_recurrent.backends.triton._linear_attention import load_tokens
from keras_recurrent.backends.triton._math import one_minus_exp


@triton.jit
def as_matrix(mask, one):
    """0 and 1, as operands of products, from False and True. one: `ones`."""
    matrix = tl.where(mask, one[:, None], 0.0)
    if not IN_INTERPRETER:
        matrix = matrix.to(tl.bfloat16)
    return matrix


@triton.jit
def _interval_matrix(row, low, high, one):
    """1 in the columns from `low` of their row on, and below `high`; else 0.

    Computed as min(1, relu(radius - |column - middle|)), which is exact in bfloat16 for up to 64
    tokens. A GPU computes two of those at once: half the instructions of two comparisons.
    """
    if IN_INTERPRETER:
        return as_matrix((row[None, :] >= low[:, None]) & (row[None, :] < high[:, None]), one)
    middle = (one * 0.5 * (low + high - 1)).to(tl.bfloat16)
    radius = (one * 0.5 * (high - low + 1)).to(tl.bfloat16)
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
        [row.to(tl.bfloat16)[None, :], middle[:, None], radius[:, None]],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def in_product_layout(row, one):
    """`row` in the register layout of products, so that choices by it convert no layout."""
    return (row * one).to(tl.int32)


@triton.jit
def in_right_half(row, level):
    """Whether each token lies in a right half at this level."""
    return (row >> level) % 2 == 1


@triton.jit
def decay_span(row, level):
    """The tokens whose decays each token takes, as the first one and the one after the last.

    In a right half from the boundary to the token itself, in a left half those behind the token up
    to the boundary.
    """
    right, half_begin = in_right_half(row, level), row >> level << level
    begin = tl.where(right, half_begin, row + 1)
    return begin, tl.where(right, row + 1, half_begin + (1 << level))


@triton.jit
def span_matrix(row, level, one):
    """W: in each token's row, 1 for the tokens whose decays it takes."""
    low, high = decay_span(row, level)
    return _interval_matrix(row, low, high, one)


@triton.jit
def span_matrix_transposed(row, level, one):
    """The transpose of W."""
    right, half_begin = in_right_half(row, level), row >> level << level
    low = tl.where(right, row, half_begin)
    high = tl.where(right, half_begin + (1 << level), row)
    return _interval_matrix(row, low, high, one)


@triton.jit
def in_adjacent_halves(row, level):
    """The pairs of tokens of this level, in both orders: one in each half beside a boundary."""
    return (row[:, None] ^ row[None, :]) & (-1 << level) == 1 << level


@triton.jit
def locate_program(T, H, chunks, tiles, CHUNK: tl.constexpr):
    """This program's tile, chunk, head (of all rows), batch row, and its first token's offset."""
    tile = tl.program_id(0) % tiles
    chunk = tl.program_id(0) // tiles % chunks
    head = tl.program_id(0) // tiles // chunks
    b = head // H
    token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
    return tile, chunk, head, b, token


@triton.jit
def load_chunk(
    q, k, log_f, token, row, real, starts, d, K, H, SHORT: tl.constexpr
):  # fmt: skip
    """q, k, log f as given, and the logarithms of the decays applied: [CHUNK, BLOCK_K]."""
    query = load_tokens(q + token * K, row, real, d, K, H)
    given_log_f = load_tokens(log_f + token * K, row, real, d, K, H)
    if k is None:
        key = one_minus_exp(given_log_f, not SHORT)
    else:
        key = load_tokens(k + token * K, row, real, d, K, H)
    return query, key, given_log_f, applied_decays(given_log_f, starts[:, None])
