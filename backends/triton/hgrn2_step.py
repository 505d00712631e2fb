"""One decoding step of HGRN2's recurrence, from its three projections.

Qin et al. 2024, arXiv:2404.07904. A program reads and writes some columns of a head's memory once.
All arithmetic is float32.
"""

import triton
import triton.language as tl

from ..constants import MAX_STEP_KEYS, SQUARES_GROUP
from ._decoding.hgrn2_gates import load_decay_and_key, load_query
from ._device.common import load_float32
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._device.tokens import CONTINUES, PADDING
from ._runtime.framework import forward_operation, pdl_options, run, step_unsupported_reason
from ._runtime.launch import Array, Launch, cdiv, like, next_power_of_2

_BLOCK_V, _WARPS = SQUARES_GROUP, 4


def unsupported(q, f, v, memory, lower_bound=None, norm_scale=None, token_kind=None) -> str | None:
    """Reason why this implementation cannot take these arguments, or None."""
    if memory.shape[2] > MAX_STEP_KEYS:
        return f"takes keys of up to {MAX_STEP_KEYS} channels, got {memory.shape[2]}"
    return step_unsupported_reason(q, f, v, memory, lower_bound, norm_scale, token_kind)


def hgrn2_step(q, f, v, memory, lower_bound=None, norm_scale=None, token_kind=None):
    """q, f: [B, H K]; v: [B, H V]; memory: [B, H, K, V]; norm_scale: [H V].

    Returns ([B, H V], sums of squares [B, H, U], the next memory).
    """
    return _hgrn2_step(q, f, v, memory, lower_bound, norm_scale, token_kind)


@triton.jit
def _kernel(
    q,
    f,
    v,
    memory,
    lower_bound,
    norm_scale,
    token_kind,
    output,
    squares,
    next_memory,
    H,
    root,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // TILES).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    offsets = head * (K * V) + d[:, None] * V + e[None, :]
    valid = (d < K)[:, None] & (e < V)[None, :]
    state = load_float32(memory, offsets, valid)
    if norm_scale is not None:
        scale = load_float32(norm_scale, head % H * V + e, e < V)
    if PDL:
        wait_for_previous_launch()
    kind = CONTINUES
    if token_kind is not None:
        kind = tl.load(token_kind + head // H)
    k_valid, v_valid = (d < K) & (kind != PADDING), (e < V) & (kind != PADDING)
    decay, key = load_decay_and_key(f, lower_bound, kind, head, H, d, k_valid, K)
    value = load_float32(v, head * V + e, v_valid)
    state = decay[:, None] * state + key[:, None] * value[None, :]
    tl.store(next_memory + offsets, state, valid)
    query = load_query(q, head * K + d, k_valid, root)
    result = tl.sum(query[:, None] * state, 0)
    tl.store(squares + tl.program_id(0), tl.sum(result * result, 0))
    if norm_scale is not None:
        result *= scale
    tl.store(output + head * V + e, result, e < V)


def results(q, f, v, memory, lower_bound, norm_scale, token_kind):
    batch, heads, _, values = memory.shape
    squares = Array((batch, heads, cdiv(values, SQUARES_GROUP)), "float32")
    return like(v), squares, Array(tuple(memory.shape), "float32")


def forward(q, f, v, memory, lower_bound, norm_scale, token_kind):
    tensors = q, f, v, memory, lower_bound, norm_scale, token_kind
    return run(launch(_kernel, tensors, results(*tensors), updates=((3, 2),)))


def launch(kernel, tensors, outputs, updates, **options):
    """The launch of a step's kernel, of which a program computes some columns of a head."""
    q, _, _, memory, *_ = tensors
    batch, heads, keys, values = memory.shape
    block_v = min(_BLOCK_V, next_power_of_2(values))
    options |= {"K": keys, "V": values, "BLOCK_K": next_power_of_2(keys), "BLOCK_V": block_v}
    options |= {"num_warps": _WARPS, **pdl_options(q)}
    programs = batch * heads * cdiv(values, block_v)
    numbers = heads, keys**-0.5
    return Launch(kernel, programs, tensors, outputs, numbers, options, updates=updates)


_hgrn2_step = forward_operation("hgrn2_step", forward, results, count=3, updates=("memory",))
