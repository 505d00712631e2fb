"""The weights of pairs of tokens inside a chunk of gated linear attention, for any decays.

The weight of an earlier token s for a token u is sum_k q_u f_{s+1} ... f_u k_s. For a matrix
product the decays must be divided between q_u and k_s. Two methods do this:

- **Blocks with one reference**: with r in the middle of a block and g the sums of log f up to a
  token, q_u is multiplied by exp(g_u - r) and k_s by exp(r - g_s). One of these is a quotient of
  decays, which limits the length of a block: |g - r| is at most 64 in every channel, where neither
  float32 nor bfloat16 overflows or underflows. The decays of a chunk determine its blocks: the
  whole chunk, else 8 tokens, else single tokens, whose references are the tokens themselves.
- **Halves**, for the pairs between blocks: as in `backends/torch`, the chunk is halved repeatedly,
  and level n has halves of 2^n tokens. If u is in a right half and s in the left half next to it,
  q_u is multiplied by the decays from the boundary to u, and k_s by the decays from s to the
  boundary. The logarithm of either is a sum over tokens of one half, so at each level

      X = W log f,  Y = exp(X) * (q in right halves, k in left halves),  Y Y^T

  where W consists of 0 and 1, and only that level's pairs of the last product are used. All of
  these are products of decays, never quotients, so any decay is safe.

For documents that start inside a chunk, masks hide earlier tokens; the decays of their first tokens
count as 1.
"""

import triton
import triton.language as tl

from .._device.common import IN_INTERPRETER
from .._device.math import exp_of_decays, one_minus_exp
from .._device.products import ones, operand, product, sum_rows
from .linear_attention import load_tokens

# The largest |g - r|: its exponential, times numbers from 1e-10 to 1e10, is a normal number.
RADIUS = tl.constexpr(64.0)
# Its exponential is 0, and sums of it over a chunk keep three digits after the decimal point. Half
# of it exceeds the radius: a block that contains a decay of 0 never has one reference, so that no
# sum of differences reaches across it.
_LOG_ZERO = tl.constexpr(-130.0)
_SHORT_BLOCKS = tl.constexpr(3)  # 2^3 tokens


@triton.jit
def as_matrix(mask, one):
    """0 and 1 as operands of products, from False and True. one: the result of `ones`."""
    matrix = tl.where(mask, one[:, None], 0.0)
    if not IN_INTERPRETER:
        matrix = matrix.to(tl.bfloat16)
    return matrix


@triton.jit
def interval_matrix(row, low, high, one):
    """A matrix of 1 in each row's columns from `low` to `high` - 1, else 0.

    Computed as min(1, relu(radius - |column - middle|)), which is exact in bfloat16 for up to 64
    tokens. A GPU computes two of these at once: half the instructions of two comparisons.
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
def right_half_mask(row, level):
    """Mask of the tokens in right halves at this level."""
    return (row >> level) % 2 == 1


@triton.jit
def span_matrix(row, level, one):
    """W: each token's row has 1 for the tokens whose decays multiply it.

    In a right half these are the tokens from the boundary to the token itself, in a left half the
    tokens after the token up to the boundary.
    """
    right, half_begin = right_half_mask(row, level), row >> level << level
    low = tl.where(right, half_begin, row + 1)
    high = tl.where(right, row + 1, half_begin + (1 << level))
    return interval_matrix(row, low, high, one)


@triton.jit
def span_matrix_transposed(row, level, one):
    """The transpose of W."""
    right, half_begin = right_half_mask(row, level), row >> level << level
    low = tl.where(right, row, half_begin)
    high = tl.where(right, half_begin + (1 << level), row)
    return interval_matrix(row, low, high, one)


@triton.jit
def level_pair_mask(row, level):
    """Mask of this level's pairs of tokens, in both orders: one in each half next to a boundary."""
    return (row[:, None] ^ row[None, :]) & (-1 << level) == 1 << level


@triton.jit
def locate_program(T, H, chunks, tiles, CHUNK: tl.constexpr):
    """This program's tile, chunk, head (in the batch), batch row, and first token's offset."""
    tile = tl.program_id(0) % tiles
    chunk = tl.program_id(0) // tiles % chunks
    head = tl.program_id(0) // tiles // chunks
    b = head // H
    token = (b.to(tl.int64) * T + chunk * CHUNK) * H + head % H
    return tile, chunk, head, b, token


@triton.jit
def finite_decays(log_f, starts):
    """The logarithms of decays inside a chunk: finite, and 0 for the first token of a document."""
    log_f = tl.maximum(log_f, _LOG_ZERO, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(starts[:, None], 0.0, log_f)


@triton.jit
def load_chunk(inputs, token, row, real, starts, d, K, H, SHORT: tl.constexpr):
    """Loads q, k, log f, and its `finite_decays`: [CHUNK, BLOCK_K] each.

    Args:
        inputs: a tuple that begins with q, k (or None) and log f; further tensors are not read.
    """
    given_log_f = load_tokens(inputs[2] + token * K, row, real, d, K, H)
    log_decay = finite_decays(given_log_f, starts)
    query = load_tokens(inputs[0] + token * K, row, real, d, K, H)
    if inputs[1] is None:
        key = one_minus_exp(given_log_f, not SHORT)
    else:
        key = load_tokens(inputs[1] + token * K, row, real, d, K, H)
    return query, key, given_log_f, log_decay


@triton.jit
def count_documents(starts):
    """The number of documents that start in a chunk up to each token, and in the whole chunk."""
    document = tl.cumsum(starts.to(tl.int32), 0)
    return document, tl.max(document, 0)


@triton.jit
def document_ends(document):
    """The index after each token's document. document: the first result of `count_documents`."""
    return tl.sum((document[:, None] >= document[None, :]).to(tl.int32), 1)


@triton.jit
def block_pair_mask(row, level):
    """Mask of the pairs of tokens in the same block of 2^level tokens."""
    return row[:, None] >> level == row[None, :] >> level


@triton.jit
def find_reference_blocks(row, log_decay, LEVELS: tl.constexpr, PARTS: tl.constexpr):
    """The level of the longest blocks that one reference can serve, and g - r of each token.

    g - r is half the sum of the logarithms up to a token, minus half the sum of later logarithms.
    """
    level = tl.where(tl.min(tl.sum(log_decay, 0), 0) >= -2 * RADIUS, LEVELS, _SHORT_BLOCKS)
    half = tl.where(row[:, None] >= row[None, :], 0.5, -0.5)
    half = operand(tl.where(block_pair_mask(row, level), half, 0.0), True)
    from_reference = sum_rows(half, log_decay, PARTS)
    # The margin of 0.5 allows for sums that are rounded in another order than the one above.
    fits = tl.min(tl.min(from_reference, 1), 0) >= -RADIUS - 0.5
    return tl.where(fits, level, 0), tl.where(fits, from_reference, 0.0)


@triton.jit
def add_pair_weights(
    weights, query, key, log_decay, row, LEVELS: tl.constexpr, SHORT: tl.constexpr,
    PARTS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Adds the weights of some channels: later tokens are rows, or, if REVERSE, columns.

    Pairs in the other order get arbitrary numbers: the caller must mask them.
    """
    one = ones(weights)
    if SHORT:
        first_level, from_reference = find_reference_blocks(row, log_decay, LEVELS, PARTS)
        query_y = operand(query * exp_of_decays(from_reference, False), True)
        key_y = operand(key * exp_of_decays(-from_reference, False), True)
        if REVERSE:
            pairs = product(key_y, tl.trans(query_y), tl.zeros_like(weights), True)
            ordered = row[:, None] <= row[None, :]
        else:
            pairs = product(query_y, tl.trans(key_y), tl.zeros_like(weights), True)
            ordered = row[:, None] >= row[None, :]
        # Pairs in the other order may be infinite.
        weights += tl.where(block_pair_mask(row, first_level) & ordered, pairs, 0.0)
    else:
        first_level = 0
        diagonal = tl.sum(query * one[:, None] * key, 1)
        weights += tl.where(row[:, None] == row[None, :], diagonal[:, None], 0.0)
    if first_level < LEVELS:
        # Without the condition around the loop, Triton would not prefetch chunks.
        for level in range(first_level, LEVELS):
            y = tl.where(right_half_mask(row, level)[:, None], query, key)
            span = span_matrix(row, level, one)
            y *= exp_of_decays(sum_rows(span, log_decay, PARTS), not SHORT)
            y = operand(y, SHORT)
            pairs = product(y, tl.trans(y), tl.zeros_like(weights), SHORT)
            weights += tl.where(level_pair_mask(row, level), pairs, 0.0)
    return weights
