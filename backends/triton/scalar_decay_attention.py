"""S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Dao and Gu 2024, arXiv:2405.21060 (Mamba-2), and, with a constant decay, Qin et al. 2024,
arXiv:2405.17381 (Lightning Attention). The output within a chunk is (Q K^T * M) V, where M_us is
the product of the decays of the tokens from s + 1 to u; across chunks it is Q S. Logarithms of
decays are summed from the start of a chunk; for a constant decay, its logarithm is multiplied by
the number of real tokens. If each token has its own decay, a separate kernel computes these sums
before all other launches, and the start of a document is a decay of 0. M_us is 0 if a document
starts between the two tokens.

A program processes the chunks of a head in order and keeps some columns of S in registers; the
forward pass stores only the last one. The gradients have this form, too. They are computed by the
kernel of the output, with other arguments in place of (Q, K, V, S), where G is the gradient of the
state:

    d_Q    (d_O, V, K, S^T)
    d_V    (K, Q, d_O, G), in reverse
    d_K    (V, d_O, Q, G^T), in reverse

Heads that share a query and a key read one tensor; the gradients of Q and K are computed for each
head, then added.

The gradient of log_decay_t is the sum of the terms of all pairs s < t <= u in a document. Without
the pairs (u, u), Q d_Q is the sum of the terms with a given u, and K d_K is the sum of the terms
with a given s, so the gradient changes by K d_K - Q d_Q from one token to the next. To keep
rounding errors small, it is computed anew every 1,024 tokens, as <S, G>, from the states S that the
launch for d_Q stores.

If there are too few heads to fill the GPU, time is split into segments, and segments into
subsegments. A first launch computes the effect of each subsegment on a state, as a decay and a
total; in a second launch, each segment starts from the state after the previous subsegments. The
first launch reads only tokens that the state at the end of a segment depends on: few tokens for
most heads, but all tokens for heads without decay. Subsegments, which are shorter than segments,
spread the work of such heads over the GPU.
"""

import functools

import triton
import triton.language as tl

from ._device import common
from ._device.math import exp_of_decays
from ._device.products import operand, product, sum_rows
from ._device.tokens import CONTINUES, PADDING, STARTS
from ._linear_attention.linear_attention import (
    TimeSplit,
    candidate_blocks,
    load_tokens,
    locate_segment,
    max_segments,
    real_tokens,
    sizes_of,
    unsupported_reason,
    walk_segments,
)
from ._linear_attention.linear_attention_step import step
from ._runtime import search
from ._runtime.framework import operation, run, zeros_like
from ._runtime.launch import Array, Launch, cdiv, dtype_name, like
from ._runtime.operation import Operation
from ._scan.chained_scan import compose

# Candidates by (`short`, whether heads are wider than 128 channels), the default first. The state,
# [K, BLOCK_V], takes at most 64 registers per thread. Float32 is split into parts, which take many
# more registers, so its wide heads have one candidate. Tiles of 128×32 were compiled wrongly for
# heads of 66 channels. Tiles with 2 pipeline stages leave shared memory for a second program on a
# multiprocessor: if there are enough programs, they come first.
BLOCKS = {
    (True, False): candidate_blocks((128, 64, 4, 4), (128, 64, 4, 3), (128, 64, 4, 2)),
    (True, True): candidate_blocks(
        (256, 32, 8, 4), (256, 32, 8, 3), (256, 32, 8, 2), (256, 16, 8, 4)
    ),
    (False, False): candidate_blocks((128, 32, 8), (128, 16, 8), (128, 64, 8)),
    (False, True): candidate_blocks((256, 32, 8)),
}
_FEWEST_STAGES_FIRST = {
    key: tuple(sorted(candidates, key=lambda blocks: blocks.num_stages))
    for key, candidates in BLOCKS.items()
}
_SHORTEST_SUBSEGMENT = 8  # chunks
_MAX_SUBSEGMENTS = 32  # in all segments together, at least one each
_FORGOTTEN = tl.constexpr(104.0)  # exp(-104) is 0 in float32; times any number, it is below 1e-6
_START = tl.constexpr(-200.0)  # decays a state to 0; sums of a few of these keep their digits
_KINDS = tl.constexpr(4096)  # tokens whose kinds, or decays of chunks, are loaded at a time
_SPAN = 1024  # tokens over which the terms of a decay's gradient are added
_SPAN_BLOCK = {"BLOCK_T": 512, "BLOCK_H": 8, "num_warps": 8}
_SUM_BLOCK = {"BLOCK_H": 16, "num_warps": 4}


@triton.jit
def _power(exponent, log_decay, FINE: tl.constexpr):
    """decay ** exponent, 1 if the exponent is 0: 0 * log_decay would be NaN for a decay of 0."""
    return exp_of_decays(tl.where(exponent == 0, 0.0, exponent * log_decay), FINE)


@triton.jit(do_not_specialize=["T", "chunks"])
def _sum_decays_kernel(
    log_decay,
    token_kind,
    logarithms,
    log_totals,
    T,
    H,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    FINE: tl.constexpr,
):
    """Stores the logarithms of the decays of some heads in a chunk, and their sums.

    Logarithms are _START at starts and for decays of 0, and 0 at padding. Unless FINE, they are
    summed from the start of the chunk.
    """
    blocks = tl.cdiv(H, BLOCK_H)
    h = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    chunk, b = tl.program_id(0) // blocks % chunks, tl.program_id(0) // blocks // chunks
    row, valid = tl.arange(0, CHUNK), (h < H)[None, :]
    real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
    pointers = log_decay + (b.to(tl.int64) * T + chunk * CHUNK + row)[:, None] * H + h[None, :]
    x = tl.load(pointers, real[:, None] & valid, other=0.0).to(tl.float32)
    x = tl.where(starts[:, None] | (x <= -_FORGOTTEN), _START, x)
    line = (b.to(tl.int64) * H + h) * chunks + chunk
    tl.store(log_totals + line, tl.sum(x, 0), h < H)
    x = x if FINE else tl.cumsum(x, 0)
    tl.store(logarithms + line[None, :] * CHUNK + row[:, None], x, valid)


@triton.jit
def _decays_of_chunk(
    log_decay, logarithms, log_total, real, starts, row, num_tokens, token_kind, FINE: tl.constexpr
):
    """The decays from the start of a chunk to each token, and from each token to the end.

    Also returns the logarithm of the decay of the chunk, the steps of tokens, for `_log_between`,
    and, for a constant decay, the number of document starts up to each token. For a constant decay,
    steps are numbers of real tokens. Otherwise, they are sums of logarithms, or, if FINE, the
    logarithms, and include the starts of documents.

    log_decay: the logarithm of a constant decay, or None.
    logarithms, log_total: see `_sum_decays_kernel`; None for a constant decay.
    num_tokens: the number of tokens in the chunk. Without kinds, the counts of tokens are equal for
    all chunks, and are computed once.
    """
    if log_decay is None:
        log_from_start = logarithms
        if FINE:  # without a difference of sums
            log_from_start = tl.cumsum(logarithms, 0)
            later = tl.where(row[:, None] < row[None, :], logarithms[None, :], 0.0)
            log_to_end = tl.sum(later, 1)
        else:
            log_to_end = tl.minimum(log_total - log_from_start, 0.0)
        steps, document = logarithms, logarithms
        from_start, to_end = exp_of_decays(log_from_start, FINE), exp_of_decays(log_to_end, FINE)
    else:
        if token_kind is None:
            steps, document, num_real, last_document = row + 1, row * 0, num_tokens, 0
        else:
            steps, document = tl.cumsum(real.to(tl.int32), 0), tl.cumsum(starts.to(tl.int32), 0)
            num_real, last_document = tl.max(steps, 0), tl.max(document, 0)
        from_start = _power(steps, log_decay, FINE)
        from_start = tl.where(document == 0, from_start, 0.0)
        to_end = _power(tl.maximum(num_real - steps, 0), log_decay, FINE)
        to_end = tl.where(document == last_document, to_end, 0.0)
        log_total = tl.where(num_real == 0, 0.0, num_real * log_decay)
        log_total = tl.where(last_document == 0, log_total, _START)
    return from_start, to_end, log_total, steps, document


@triton.jit
def _log_between(log_decay, steps, row, FINE: tl.constexpr, REVERSE: tl.constexpr):
    """The logarithm of the decay between each pair of tokens.

    steps: see `_decays_of_chunk`. FINE: avoids differences of sums, which lose digits after fast
    decays; this error is smaller than the rounding of weights to 16 bits.
    """
    if log_decay is not None:
        distance = tl.abs(steps[:, None] - steps[None, :])
        between = tl.where(distance == 0, 0.0, distance * log_decay)
    elif FINE:
        up_to, after = row[None, :] <= row[:, None], row[:, None] > row[None, :]
        if REVERSE:
            up_to, after = row[None, :] > row[:, None], row[:, None] <= row[None, :]
        mask = operand(tl.where(up_to, 1.0, 0.0), True)
        between = sum_rows(mask, tl.where(after, steps[:, None], 0.0), 3)
    else:
        between = tl.abs(steps[:, None] - steps[None, :]) * -1.0  # - would be a subtraction from 0
    return between


@triton.jit
def _find_remembered_start(
    start, end, constant, log_totals, token_kind, b, head, T, chunks, CHUNK: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """The first chunk from `start` to `end` on which the state after `end` depends.

    Earlier chunks have decayed to 0, or belong to an earlier document. constant: the logarithm of
    a constant decay, or None. log_totals: the logarithms of the decays of chunks, or None.
    """
    first = start
    if constant is None:
        log_after = 0.0  # the logarithm of the decay between a block and the end
        for n in range(0, end - start, _KINDS // CHUNK):
            i = end - 1 - n - tl.arange(0, _KINDS // CHUNK)
            chunk = chunks - 1 - i if REVERSE else i
            pointers = log_totals + head.to(tl.int64) * chunks + chunk
            logarithms = tl.load(pointers, i >= start, other=0.0)
            is_forgotten = log_after + tl.cumsum(logarithms, 0) <= -_FORGOTTEN
            first = tl.maximum(first, tl.max(tl.where(is_forgotten, i, start), 0))
            log_after += tl.sum(logarithms, 0)
    else:
        t = (chunks - end if REVERSE else start) * CHUNK
        length = tl.minimum((end - start) * CHUNK, T - t)
        reach = tl.minimum(1.0 / tl.maximum(-constant, 1e-9) * _FORGOTTEN, T)  # tokens
        if token_kind is not None:
            for n in range(0, length, _KINDS):
                index = n + tl.arange(0, _KINDS)
                pointers = token_kind + b.to(tl.int64) * T + t + index
                kind = tl.load(pointers, index < length, other=CONTINUES)
                reach += tl.sum((kind == PADDING).to(tl.int32), 0)
                chunk = (t + index) // CHUNK
                chunk = chunks - 1 - chunk if REVERSE else chunk
                first = tl.maximum(first, tl.max(tl.where(kind == STARTS, chunk, start), 0))
        first = tl.maximum(first, end - 1 - (reach / CHUNK).to(tl.int32))
    return first


@triton.jit
def _state_before_segment(
    state, initial, totals, decays, offsets, valid, segment, subsegments, heads, head, K, V
):  # fmt: skip
    """The state before a segment, from the initial state, or from `state`, which is 0."""
    if initial is not None:
        state = tl.load(initial + head.to(tl.int64) * K * V + offsets, valid, other=0.0)
        state = state.to(tl.float32)
    if totals is not None:
        for s in tl.range(segment * subsegments, num_stages=3):
            line = s * heads + head
            total = tl.load(totals + line.to(tl.int64) * K * V + offsets, valid, other=0.0)
            state = tl.load(decays + line) * state + total
    return state


@triton.jit
def _attend(
    log_decay,
    query,
    key,
    value,
    state,
    state_decay,
    row,
    num_tokens,
    steps,
    document,
    SHORT: tl.constexpr,
    REVERSE: tl.constexpr,
    STRICT: tl.constexpr,
):
    """The output of a chunk, from its tokens and the state before it, or after it if REVERSE.

    If STRICT, the output excludes the weight of each token for itself. These weights are then also
    returned, as a diagonal matrix; otherwise, 0.

    log_decay: the logarithm of a constant decay, or None.
    num_tokens: see `_decays_of_chunk`.
    state_decay: the decay of the state up to each token; steps, document: see `_decays_of_chunk`.
    """
    weights = tl.zeros((row.shape[0], row.shape[0]), tl.float32)
    weights = product(query, tl.trans(key), weights, SHORT)
    if REVERSE:
        visible = row[:, None] <= row[None, :]
    else:
        visible = row[:, None] >= row[None, :]
    if log_decay is not None:
        visible &= document[:, None] == document[None, :]
    own = 0.0
    if STRICT:
        is_own = row[:, None] == row[None, :]
        own = operand(tl.where(is_own, weights, 0.0), SHORT)
        visible &= row[:, None] != row[None, :]
    between = exp_of_decays(_log_between(log_decay, steps, row, not SHORT, REVERSE), not SHORT)
    zero = 0.0
    if log_decay is None:
        # A 0 that LLVM does not know to be constant. With a constant, LLVM would round the weights
        # to 16 bits before it selects the visible ones, which takes more instructions.
        zero = tl.minimum(num_tokens, 0).to(tl.float32)
    weights = tl.where(visible, weights * between, zero)
    result = tl.zeros(value.shape, tl.float32)
    result = product(query, state, result, SHORT) * state_decay[:, None]
    return product(weights, value, result, SHORT), own


@triton.jit(do_not_specialize=["T", "subsegments", "chunks", "segment_chunks"])
def _walk_kernel(
    q,
    k,
    v,
    log_decay,
    log_totals,
    token_kind,
    initial,
    factor,
    states,
    totals,
    decays,
    output,
    final,
    terms,
    across,
    T,
    H,
    K,
    V,
    state_k,
    state_v,
    subsegments,
    chunks,
    segment_chunks,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    REVERSE: tl.constexpr,
    QK_SHARE: tl.constexpr,
    V_SHARE: tl.constexpr,
    IS_CONSTANT: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Stores the outputs, each computed from the tokens up to it, or, if REVERSE, from it on.

    If `output` is None, stores the totals and decays of the subsegments of all segments but the
    last: `subsegments` per segment.
    state_k, state_v: the strides of states along K and along V.
    log_decay, log_totals: the logarithms of constant decays, [H], and None, or the results of
    `_sum_decays_kernel`.
    final: None if it is not needed.
    QK_SHARE, V_SHARE: the number of heads that share q and k, and v.
    terms: the outputs, without the weights of tokens for themselves, multiplied by `factor`, which
    has the shape of v, and added over the tile; None if they are not needed.
    across: with `terms`, the states before spans of SPAN chunks, or, if REVERSE, their inner
    products with `states`.
    STAGES: the number of stages of the loop's pipeline. If it is None, Triton uses `num_stages` and
    loads only operands of products in advance; otherwise, it also loads `factor` in advance.
    """
    FINE: tl.constexpr = not SHORT
    tiles = tl.cdiv(V, BLOCK_V)
    segments, part, head, heads = locate_segment(
        tiles, chunks, segment_chunks, output is not None, subsegments
    )
    b, h, tile = head // H, head % H, tl.program_id(0) % tiles
    qk_heads, v_heads = H // QK_SHARE, H // V_SHARE
    row = tl.arange(0, CHUNK)
    d = tl.arange(0, BLOCK_K)
    e = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    valid = (d < K)[:, None] & (e < V)[None, :]
    offsets = d[:, None] * state_k + e[None, :] * state_v
    constant = None
    if IS_CONSTANT:
        constant = tl.load(log_decay + h).to(tl.float32)

    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    decay = 1.0
    if output is None:
        # The decays of skipped chunks do not matter: later decays reduce their product to 0.
        end = (part + 1) * (segment_chunks // subsegments)
        start = _find_remembered_start(
            part * (segment_chunks // subsegments),
            (part // subsegments + 1) * segment_chunks,
            constant,
            *(log_totals, token_kind, b, head, T, chunks, CHUNK, REVERSE),
        )
    else:
        start, end = part * segment_chunks, tl.minimum((part + 1) * segment_chunks, chunks)
        state = _state_before_segment(
            state, initial, totals, decays, offsets, valid, part, subsegments, heads, head, K, V
        )

    for i in tl.range(start, end, num_stages=STAGES):
        chunk = chunks - 1 - i if REVERSE else i
        first = b.to(tl.int64) * T + chunk * CHUNK
        token, qk_token = first * H + h, first * qk_heads + h // QK_SHARE
        v_token = first * v_heads + h // V_SHARE
        real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
        num_tokens = tl.minimum(T - chunk * CHUNK, CHUNK)
        logarithms, log_total = None, None
        if not IS_CONSTANT:
            line = head.to(tl.int64) * chunks + chunk
            logarithms = tl.load(log_decay + line * CHUNK + row)
            log_total = tl.load(log_totals + line)
        decay_from_start, decay_to_end, log_total, steps, document = _decays_of_chunk(
            constant, logarithms, log_total, real, starts, row, num_tokens, token_kind, FINE
        )
        key = operand(load_tokens(k + qk_token * K, row, real, d, K, qk_heads), SHORT)
        value = operand(load_tokens(v + v_token * V, row, real, e, V, v_heads), SHORT)
        if output is not None:
            query = operand(load_tokens(q + qk_token * K, row, real, d, K, qk_heads), SHORT)
            result, own = _attend(
                constant,
                *(query, key, value, state, decay_to_end if REVERSE else decay_from_start),
                *(row, num_tokens, steps, document, SHORT, REVERSE, terms is not None),
            )
            is_token = row < num_tokens
            if terms is not None:
                factors = load_tokens(factor + v_token * V, row, real, e, V, v_heads)
                term = tl.sum(result * factors, 1)
                tl.store(terms + tile.to(tl.int64) * heads * T + token + row * H, term, is_token)
                result = product(own, value, result, SHORT)
            pointers = output + token * V + row[:, None] * (H * V) + e[None, :]
            tl.store(pointers, result, is_token[:, None] & (e < V)[None, :])
        value_decay = decay_from_start if REVERSE else decay_to_end
        if terms is not None:
            spans = tl.cdiv(chunks, SPAN)
            span = head.to(tl.int64) * spans + chunk // SPAN
            if not REVERSE and chunk % SPAN == 0:
                tl.store(across + span * K * V + offsets, state, valid)
        chunk_decay = exp_of_decays(log_total, FINE)  # computed here, it spills fewer registers
        decay *= chunk_decay
        value = value.to(tl.float32) * value_decay[:, None]
        state = product(tl.trans(key), value, state * chunk_decay, SHORT)
        if terms is not None and REVERSE and chunk % SPAN == 0:
            before = tl.load(states + span * K * V + offsets, valid, other=0.0)
            pairs = tl.sum(tl.sum(before * state, 1), 0)
            tl.store(across + tile.to(tl.int64) * heads * spans + span, pairs)

    if output is None:
        line = part * heads + head
        tl.store(totals + line.to(tl.int64) * K * V + offsets, state, valid)
        tl.store(decays + line, decay)
    elif final is not None and part == segments - 1:
        tl.store(final + head.to(tl.int64) * K * V + offsets, state, valid)


@triton.jit(do_not_specialize=["B", "T", "spans"])
def _decay_gradient_kernel(
    q_terms,
    k_terms,
    across,
    log_decay,
    token_kind,
    output,
    B,
    T,
    H,
    spans,
    SPAN: tl.constexpr,
    Q_TILES: tl.constexpr,
    K_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Stores the gradients of the decays of some heads in a span of SPAN tokens.

    q_terms, k_terms, across: see `_walk_kernel`. Q_TILES, K_TILES: how many tiles the terms have.
    """
    blocks = tl.cdiv(H, BLOCK_H)
    h = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    span, b = tl.program_id(0) // blocks % spans, tl.program_id(0) // blocks // spans
    row = tl.arange(0, BLOCK_T)
    start = span * SPAN
    before = tl.zeros((BLOCK_H,), tl.float32)  # gradient at the last token before a block
    for tile in tl.static_range(K_TILES):
        place = ((tile * B + b) * H + h) * spans + span
        before += tl.load(across + place, h < H, other=0.0)
    for n in range(0, SPAN, BLOCK_T):
        t = start + n + row
        valid = (t < tl.minimum(start + SPAN, T))[:, None] & (h < H)[None, :]
        offsets = (b.to(tl.int64) * T + t)[:, None] * H + h[None, :]
        change = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
        previous, has_previous = offsets - H, valid & (t > start)[:, None]
        for tile in tl.static_range(K_TILES):
            line = tile * B.to(tl.int64) * T * H
            change += tl.load(k_terms + line + previous, has_previous, other=0.0)
        for tile in tl.static_range(Q_TILES):
            line = tile * B.to(tl.int64) * T * H
            change -= tl.load(q_terms + line + previous, has_previous, other=0.0)
        kept = tl.load(log_decay + offsets, valid, other=0.0).to(tl.float32) > -_FORGOTTEN
        is_padding = tl.full((BLOCK_T, BLOCK_H), False, tl.int1)
        if token_kind is not None:
            kind = tl.load(token_kind + b.to(tl.int64) * T + t, t < T, other=CONTINUES)
            is_padding |= (kind == PADDING)[:, None]
            kept = (kept & (kind != STARTS)[:, None]) | is_padding
        kept = tl.where(kept, 1.0, 0.0)
        decay, total = tl.associative_scan((kept, kept * change), 0, compose)
        total += decay * before[None, :]
        tl.store(output + offsets, tl.where(is_padding, 0.0, total), valid)
        before = tl.sum(tl.where((row == BLOCK_T - 1)[:, None], total, 0.0), 0)


@functools.lru_cache(maxsize=1024)
def _choose_split(programs, chunks, concurrent=1, full=common.MULTIPROCESSORS):
    """Returns the fastest `TimeSplit`, with `concurrent` programs per multiprocessor.

    Adding the total of a subsegment takes a fourth of the time of a chunk. full: the number of
    programs that need no split.
    """

    def time(segments):
        waves = cdiv(programs * segments, concurrent * common.MULTIPROCESSORS)
        return waves * cdiv(chunks, segments) + segments / 4

    segments = min(range(1, max_segments(programs, chunks, full) + 1), key=time)
    chunks_per_segment = cdiv(chunks, segments)
    subsegments = max(
        1, min(_MAX_SUBSEGMENTS // segments, chunks_per_segment // _SHORTEST_SUBSEGMENT)
    )
    segment_chunks = cdiv(chunks_per_segment, subsegments) * subsegments
    return TimeSplit(cdiv(chunks, segment_chunks), segment_chunks, subsegments)


def _walk(
    q, k, v, initial, dtype, *, log_decay, token_kind, sum_decays, heads, transposed=False,
    reverse=False, ends=True, factor=None, states=None,
):  # fmt: skip
    """Returns the output in `dtype`, the final state (None unless `ends`), `terms` and `across`.

    sum_decays: a function `(chunk, short)` that returns the results of `_sum_decays`.
    heads: the number of heads; q and k, or v, may have fewer, each shared by several.
    transposed: the initial state is [B, H, V, K], and there is no final state.
    factor, states: as in `_walk_kernel`; without them, `terms` and `across` are None.
    """
    wide = q.shape[3] > 128
    # Float32 is split into parts, for which only short chunks leave enough registers.
    sizes = sizes_of(q, k, v, chunk=32 if wide else 64, chunk_of_float32=16)._replace(heads=heads)
    batch, _, keys, values = sizes.state_shape
    state_shape = (batch, heads, values, keys) if transposed else sizes.state_shape
    is_constant = len(log_decay.shape) == 1
    log_totals = None
    if not is_constant:
        log_decay, log_totals = sum_decays(sizes.chunk, sizes.short)
    tensors = q, k, v, log_decay, log_totals, token_kind, initial, factor, states
    output = Array((batch, sizes.length, heads, values), dtype)
    final = Array(state_shape, "float32") if ends and not transposed else None

    name = "lightning_attention" if is_constant else "scalar_decay_attention"
    candidates = BLOCKS[sizes.short, wide]

    def tiles_of(blocks):
        return cdiv(values, blocks.options(sizes)["BLOCK_V"])

    # A program that also computes terms waits more for its own results than for memory. Two such
    # programs on a multiprocessor hide this time.
    full = common.MULTIPROCESSORS * (1 if factor is None else 2)
    programs = batch * heads * tiles_of(candidates[0])
    is_split = _choose_split(programs, sizes.chunks).segments > 1
    if factor is not None or programs > common.MULTIPROCESSORS or is_split:
        candidates = _FEWEST_STAGES_FIRST[sizes.short, wide]

    def launch(blocks):
        span, tiles = _SPAN // sizes.chunk, tiles_of(blocks)
        outputs = output, final, None, None
        if factor is not None:
            spans = batch, heads, cdiv(sizes.chunks, span)
            shapes = (tiles, batch, sizes.length, heads), (*spans, *state_shape[2:])
            if reverse:
                shapes = shapes[0], (tiles, *spans)
            outputs = output, final, *(Array(shape, "float32") for shape in shapes)
        options = {"CHUNK": sizes.chunk, "SHORT": sizes.short, "REVERSE": reverse, "SPAN": span}
        options |= {"QK_SHARE": heads // q.shape[2], "V_SHARE": heads // v.shape[2]}
        options |= {"IS_CONSTANT": is_constant, **blocks.options(sizes)}
        options["STAGES"] = None if factor is None else blocks.num_stages
        programs = batch * heads * tiles
        concurrent = 2 if blocks.num_stages == 2 else 1
        split = _choose_split(programs, sizes.chunks, concurrent, full)
        strides = (1, keys) if transposed else (values, 1)
        return walk_segments(
            *(_walk_kernel, sizes, programs, tensors, outputs, options),
            numbers=(*strides, split.subsegments),
            sums=(state_shape, (batch, heads)),
            split=split,
            sum_options={"num_stages": BLOCKS[sizes.short, wide][0].num_stages, "STAGES": None},
        )

    name += " transposed" * transposed + " backward" * reverse
    return search.run(name, candidates, launch, tensors, sizes)


def _sum_decays(log_decay, token_kind, chunk, short):
    """Returns the results of `_sum_decays_kernel`, [B, H, chunks * chunk] and [B, H, chunks]."""
    batch, length, heads = log_decay.shape
    chunks = cdiv(length, chunk)
    shapes = (batch, heads, chunks * chunk), (batch, heads, chunks)
    outputs = tuple(Array(shape, "float32") for shape in shapes)
    programs = batch * chunks * cdiv(heads, _SUM_BLOCK["BLOCK_H"])
    options = {"CHUNK": chunk, "FINE": not short, **_SUM_BLOCK}
    inputs, numbers = (log_decay, token_kind), (length, heads, chunks)
    return run(Launch(_sum_decays_kernel, programs, inputs, outputs, numbers, options))


def _decay_gradient(q_terms, k_terms, across, log_decay, token_kind):
    batch, length, heads = log_decay.shape
    spans = cdiv(length, _SPAN)
    programs = batch * spans * cdiv(heads, _SPAN_BLOCK["BLOCK_H"])
    tensors = q_terms, k_terms, across, log_decay, token_kind
    tiles = {"Q_TILES": q_terms.shape[0], "K_TILES": k_terms.shape[0]}
    options = {"SPAN": _SPAN, **tiles, **_SPAN_BLOCK}
    numbers = batch, length, heads, spans
    outputs = (like(log_decay),)
    return run(Launch(_decay_gradient_kernel, programs, tensors, outputs, numbers, options))[0]


def _sum_over_heads(x, shape):
    """Sums x [B, T, H, K] over the heads that share a tensor of `shape`, [B, T, G, K]."""
    return x if x.shape[2] == shape[2] else x.reshape(*shape[:3], -1, shape[3]).sum(3)


def _decays_of_walk(log_decay, token_kind, heads):
    """Returns arguments of `_walk`. Calls with equal chunks share the sums of decays."""
    sum_decays = functools.cache(functools.partial(_sum_decays, log_decay, token_kind))
    decays = {"log_decay": log_decay, "token_kind": token_kind}
    return {**decays, "sum_decays": sum_decays, "heads": heads}


def results(q, k, v, log_decay, initial_state, token_kind):
    state_shape = q.shape[0], v.shape[2], q.shape[3], v.shape[3]
    return like(v), Array(state_shape, "float32")


def forward(q, k, v, log_decay, initial_state, token_kind):
    heads = v.shape[2]
    if q.shape[1] == 1:
        sizes = sizes_of(q, k, v)._replace(heads=heads)
        return step(sizes, q, k, v, initial_state, log_decay=log_decay, token_kind=token_kind)
    decays = _decays_of_walk(log_decay, token_kind, heads)
    return _walk(q, k, v, initial_state, dtype_name(v), **decays)[:2]


def backward(q, k, v, log_decay, initial_state, token_kind, output, d_output, d_final):
    decays = _decays_of_walk(log_decay, token_kind, v.shape[2])
    mirrored, ends = {**decays, "reverse": True}, initial_state is not None
    is_constant = len(log_decay.shape) == 1
    q_factor, k_factor = (None, None) if is_constant else (q, k)
    d_q, _, q_terms, states = _walk(
        *(d_output, v, k, initial_state, dtype_name(q)), **decays, transposed=True, factor=q_factor
    )
    d_v, d_initial, _, _ = _walk(k, q, d_output, d_final, dtype_name(v), **mirrored, ends=ends)
    d_k, _, k_terms, across = _walk(
        *(v, d_output, q, d_final, dtype_name(k)), **mirrored, transposed=True, factor=k_factor,
        states=states,
    )  # fmt: skip
    d_q, d_k = _sum_over_heads(d_q, q.shape), _sum_over_heads(d_k, k.shape)
    if is_constant:
        d_log_decay = zeros_like(log_decay)
    else:
        d_log_decay = _decay_gradient(q_terms, k_terms, across, log_decay, token_kind)
    return d_q, d_k, d_v, d_log_decay, d_initial, None


scalar_decay_attention = operation(
    Operation("scalar_decay_attention", forward, results, backward, unsupported_reason)
)
