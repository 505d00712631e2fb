"""loss = log Σ_v exp(logits_v) - logits_token.

In the forward a program goes through a row of logits. Each lane has the largest logit so far and
the sum of exponentials relative to it; lanes are combined at the end. The forward saves both for
each row, and the backward computes each tile independently:

    dlogits_v = (exp(logits_v - largest) / sum - [v = token]) dloss
"""

import triton
import triton.language as tl

from ._device.math import exp_keeping_nan
from ._device.token_wise import num_rows
from ._runtime.framework import operation, run, token_wise_unsupported_reason
from ._runtime.launch import Array, Launch, cdiv, like, next_power_of_2
from ._runtime.operation import Operation

_LANE_SIZE = 8  # logits, a vector of 16 bytes if they have 16 bits
_TILE_SIZE, _BACKWARD_TILE_SIZE = 4096, 2048  # logits, two such vectors a thread
_STAGES = 3  # pipeline stages: tiles that are prefetched into shared memory


def _tile(vocabulary, tile_size):
    """The number of logits of a tile, and the warps of a program."""
    block = max(_LANE_SIZE, min(tile_size, next_power_of_2(vocabulary)))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


@triton.jit
def _zero_if_infinite(largest):
    """Replaces -inf by 0: -inf - -inf would be NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _forward_kernel(
    logits,
    tokens,
    losses,
    largest,
    total,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    LANE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    FINE: tl.constexpr = logits.dtype.element_ty == tl.float32
    LANES: tl.constexpr = BLOCK // LANE_SIZE
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    lane, each = tl.arange(0, LANES)[:, None], tl.arange(0, LANE_SIZE)[None, :]
    if V % LANE_SIZE == 0:
        positions = lane * LANE_SIZE + each
    else:  # rows are not aligned for vectors: adjacent lanes load adjacent logits
        positions = each * LANES + lane
    peaks = tl.full((LANES,), float("-inf"), tl.float32)
    sums = tl.zeros((LANES,), tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
        v = start + positions
        z = tl.load(logits + v, v < V, other=float("-inf")).to(tl.float32)
        old_peaks = peaks
        peaks = tl.maximum(peaks, tl.max(z, 1))
        origin = _zero_if_infinite(peaks)
        more = tl.sum(exp_keeping_nan(z - origin[:, None], FINE), 1)
        sums = sums * exp_keeping_nan(old_peaks - origin, FINE) + more
    highest = tl.max(peaks, 0)
    sums = tl.sum(sums * exp_keeping_nan(peaks - _zero_if_infinite(highest), FINE), 0)
    token = tl.load(tokens + row).to(tl.int64)
    known = (token >= 0) & (token < V)
    token_logit = tl.load(logits + token, known, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.log(sums) + (highest - token_logit))
    tl.store(largest + row, highest)
    tl.store(total + row, sums)


@triton.jit
def _backward_kernel(
    d_losses, largest, total, logits, tokens, d_logits, V: tl.constexpr, BLOCK: tl.constexpr
):
    FINE: tl.constexpr = logits.dtype.element_ty == tl.float32
    tiles = tl.cdiv(V, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    v = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * V + v, v < V, other=float("-inf")).to(tl.float32)
    token = tl.load(tokens + row).to(tl.int64)
    known = (token >= 0) & (token < V)
    d_loss = tl.where(known, tl.load(d_losses + row), float("nan"))
    softmax = exp_keeping_nan(z - tl.load(largest + row), FINE) * (1.0 / tl.load(total + row))
    is_token = tl.where(v == token, 1.0, 0.0)
    tl.store(d_logits + row * V + v, (softmax - is_token) * d_loss, v < V)


def results(logits, tokens):
    """`Array`s of the losses, and of each row's largest logit and sum of exp(logit - largest)."""
    return (Array(tuple(tokens.shape), "float32"),) * 3


def forward(logits, tokens):
    options = {"V": logits.shape[-1], "LANE_SIZE": _LANE_SIZE, "STAGES": _STAGES}
    options |= _tile(logits.shape[-1], _TILE_SIZE)
    outputs = results(logits, tokens)
    return run(Launch(_forward_kernel, num_rows(logits), (logits, tokens), outputs, (), options))


def backward(logits, tokens, losses, largest, total, d_losses):
    vocabulary = logits.shape[-1]
    tile = _tile(vocabulary, _BACKWARD_TILE_SIZE)
    programs = num_rows(logits) * cdiv(vocabulary, tile["BLOCK"])
    tensors, options = (d_losses, largest, total, logits, tokens), {"V": vocabulary, **tile}
    return *run(Launch(_backward_kernel, programs, tensors, (like(logits),), (), options)), None


token_crossentropy = operation(
    Operation(
        "token_crossentropy",
        forward,
        results,
        backward,
        token_wise_unsupported_reason,
        residuals=("...", "..."),
    )
)
