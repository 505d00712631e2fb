"""One decoding step of `scalar_decay_attention`, or of lightning attention: arXiv:2405.17381.

A program reads and writes some columns of a head's memory, each once.
All arithmetic is float32.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..constants import SQUARES_GROUP
from ._decoding.heads import load_heads
from ._device.common import Constants, load_float32
from ._device.math import exp_of_decays, sigmoid
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._device.tokens import CONTINUES, PADDING, STARTS, select_by_kind
from ._runtime.framework import decoding_step, pdl_options, run, step_unsupported_reason
from ._runtime.launch import Array, Launch, cdiv, dtype_name, next_power_of_2

_BLOCK_V, _WARPS = SQUARES_GROUP, 4
MAX_KEYS = 256


class Heads(NamedTuple):
    """The constants of a program."""

    Q_SHARE: int  # number of heads that share a query; below, a key and a value
    K_SHARE: int
    V_SHARE: int
    IS_CONSTANT: bool  # `log_decay` is [H], not [B, H]
    K: int
    V: int
    R: int  # pairs of channels that are rotated, or 0
    EPSILON: float
    BLOCK_K: int
    BLOCK_V: int


def unsupported(q, **others) -> str | None:
    if q.shape[2] > MAX_KEYS:
        return f"takes keys of up to {MAX_KEYS} channels, got {q.shape[2]}"
    return step_unsupported_reason(q, **others)


@triton.jit
def _kernel(
    q,
    k,
    v,
    memory,
    log_decay,
    position,
    q_scale,
    k_scale,
    frequencies,
    norm_scale,
    output_gate,
    token_kind,
    output,
    squares,
    next_memory,
    H,
    query_scale,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    K: tl.constexpr = HEADS.K
    V: tl.constexpr = HEADS.V
    BLOCK_V: tl.constexpr = HEADS.BLOCK_V
    launch_dependents(PDL)
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // TILES).to(tl.int64)
    d = tl.arange(0, HEADS.BLOCK_K)
    e = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    offsets = head * (K * V) + d[:, None] * V + e[None, :]
    valid = (d < K)[:, None] & (e < V)[None, :]
    state = load_float32(memory, offsets, valid)
    row = tl.zeros((1,), tl.int64)
    if HEADS.IS_CONSTANT:
        logarithm = tl.load(log_decay + head % H + row)
    if norm_scale is not None:
        scale = load_float32(norm_scale, head % H * V + e, e < V)
    wait_for_previous_launch(PDL)
    if not HEADS.IS_CONSTANT:
        logarithm = tl.load(log_decay + head + row)
    decay = exp_of_decays(logarithm.to(tl.float32), True)
    kind = CONTINUES
    if token_kind is not None:
        kind = tl.load(token_kind + head // H)
    token_position = kind
    if frequencies is not None:
        token_position = tl.where(kind == STARTS, 0, tl.load(position + head // H))
    real = (row == 0) & (kind != PADDING)
    place = d, token_position, frequencies
    query = load_heads(q, head // HEADS.Q_SHARE + row, real, *place, q_scale, HEADS)
    key = load_heads(k, head // HEADS.K_SHARE + row, real, *place, k_scale, HEADS)
    value = load_float32(v, head // HEADS.V_SHARE * V + e, (e < V) & (kind != PADDING))
    state = select_by_kind(kind, decay, 0.0, 1.0)[:, None] * state
    state += tl.sum(key, 0)[:, None] * value[None, :]
    tl.store(next_memory + offsets, state, valid)
    result = tl.sum(tl.sum(query, 0)[:, None] * state, 0) * query_scale
    tl.store(squares + tl.program_id(0), tl.sum(result * result, 0))
    if norm_scale is not None:
        result *= scale
    if output_gate is not None:
        result *= sigmoid(load_float32(output_gate, head * V + e, e < V), True)[0]
    tl.store(output + head * V + e, result, e < V)


def results(q, k, v, memory, *_, **_options):
    batch, heads, _, values = memory.shape
    output = Array((batch, heads, values), dtype_name(v))
    squares = Array((batch, heads, cdiv(values, SQUARES_GROUP)), "float32")
    return output, squares, Array(tuple(memory.shape), "float32")


def forward(
    q,
    k,
    v,
    memory,
    log_decay,
    position=None,
    q_scale=None,
    k_scale=None,
    frequencies=None,
    norm_scale=None,
    output_gate=None,
    token_kind=None,
    epsilon: float | None = None,
    query_scale: float | None = None,
):
    batch, heads, keys, values = memory.shape
    tensors = q, k, v, memory, log_decay, position, q_scale, k_scale, frequencies
    tensors += norm_scale, output_gate, token_kind
    outputs = results(q, k, v, memory)
    block_v = min(_BLOCK_V, next_power_of_2(values))
    constants = Heads(
        *(heads // x.shape[1] for x in (q, k, v)),
        IS_CONSTANT=len(log_decay.shape) == 1,
        K=keys,
        V=values,
        R=0 if frequencies is None else frequencies.shape[0],
        EPSILON=epsilon or 0.0,
        BLOCK_K=next_power_of_2(keys),
        BLOCK_V=block_v,
    )
    options = {"HEADS": Constants(constants), "num_warps": _WARPS, **pdl_options(q)}
    programs = batch * heads * cdiv(values, block_v)
    numbers = heads, 1.0 if query_scale is None else query_scale
    return run(Launch(_kernel, programs, tensors, outputs, numbers, options, updates=((3, 2),)))


lightning_step = decoding_step(
    unsupported, results, count=3, updates=("memory",), name="lightning_step"
)(forward)
