"""One decoding step of HGRN2's recurrence, from its three projections.

Qin et al. 2024, arXiv:2404.07904. A program reads and writes some columns of a head's memory once.
For `hgrn2_delayed_step`, it also reads the recent tokens, and writes the columns only when no more
tokens can be stored. Let S_0 be the stored memory, 1 to t - 1 the recent tokens, and t the new one:

    o = q (f_1 ... f_t) S_0 + sum_(i = 1 ... t) (q · k_i f_(i+1) ... f_t) v_i

A step that does not write the memory therefore needs one product with it. All arithmetic is
float32.
"""

import triton
import triton.language as tl

from ..constants import MAX_STEP_KEYS, SQUARES_GROUP
from ._device.common import load_float32
from ._device.math import exp, sigmoid
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._device.tokens import CONTINUES, PADDING, select_by_kind
from ._runtime.framework import decoding_step, pdl_options, run, step_unsupported_reason
from ._runtime.launch import Array, Launch, cdiv, like, next_power_of_2

_BLOCK_V, _WARPS = SQUARES_GROUP, 4
_DELAYED_SIZE = 128  # elements of the memory in the registers of a thread


def unsupported(memory, **others) -> str | None:
    if memory.shape[2] > MAX_STEP_KEYS:
        return f"takes keys of up to {MAX_STEP_KEYS} channels, got {memory.shape[2]}"
    return step_unsupported_reason(memory, **others)


@triton.jit
def _kernel(
    q,
    f,
    v,
    memory,
    recent,
    count,
    lower_bound,
    norm_scale,
    token_kind,
    output,
    squares,
    next_count,
    next_memory,
    next_recent,
    H,
    root,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = (tl.program_id(0) // TILES).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(0) % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    offsets = head * (K * V) + d[:, None] * V + e[None, :]
    valid = (d < K)[:, None] & (e < V)[None, :]
    state = load_float32(memory, offsets, valid)
    key_channel = head % H * K + d
    # From the last recent token to the first, each key is multiplied by the decays of later tokens.
    later_decay = tl.full((BLOCK_K,), 1.0, tl.float32)
    keys, values = (), ()
    if recent is not None:
        token_size = H * (2 * K + V)
        value_channel = 2 * H * K + head % H * V + e
        num_recent = tl.load(count + head // H)
        first = head // H * N * token_size
        for i in tl.static_range(N):
            token = recent + first + (N - 1 - i) * token_size
            is_stored = N - 1 - i < num_recent
            token_decay = tl.load(token + key_channel, (d < K) & is_stored, other=1.0)
            key = load_float32(token, H * K + key_channel, (d < K) & is_stored)
            keys = keys + (key * later_decay,)
            values = values + (load_float32(token, value_channel, (e < V) & is_stored),)
            later_decay *= token_decay
    if norm_scale is not None:
        scale = load_float32(norm_scale, head % H * V + e, e < V)
    wait_for_previous_launch(PDL)
    kind = CONTINUES
    if token_kind is not None:
        kind = tl.load(token_kind + head // H)
    k_valid, v_valid = (d < K) & (kind != PADDING), (e < V) & (kind != PADDING)
    forget_gate, input_gate = sigmoid(load_float32(f, head * K + d, k_valid), True)
    if lower_bound is not None:
        rest = exp(load_float32(lower_bound, H * K + key_channel, d < K), True)
        forget_gate = exp(load_float32(lower_bound, key_channel, d < K), True) + rest * forget_gate
        input_gate *= rest
        # After rounding, β and 1 - β do not add up to 1, and β may be NaN.
        near_1 = (input_gate <= 0.5) & (forget_gate == forget_gate)
        forget_gate = tl.where(near_1, 1.0 - input_gate, forget_gate)
    key = tl.where(k_valid, input_gate, 0.0)
    decay = select_by_kind(kind, forget_gate, 0.0, 1.0)
    value = load_float32(v, head * V + e, v_valid)
    query = load_float32(q, head * K + d, k_valid)
    query *= sigmoid(query, True)[0] * root
    result = tl.sum(query * key, 0) * value
    weights = query * decay
    for i in tl.static_range(len(keys)):
        result += tl.sum(weights * keys[i], 0) * values[i]
    result += tl.sum((weights * later_decay)[:, None] * state, 0)
    tl.store(squares + tl.program_id(0), tl.sum(result * result, 0))
    if norm_scale is not None:
        result *= scale
    tl.store(output + head * V + e, result, e < V)
    writes = True
    if recent is not None:
        writes = num_recent == N
        # The first program of a head stores its decays and keys.
        k_stored = k_valid & ~writes & (tl.program_id(0) % TILES == 0)
        token = next_recent + first + num_recent * token_size
        tl.store(token + key_channel, decay, k_stored)
        tl.store(token + H * K + key_channel, key, k_stored)
        tl.store(token + value_channel, value, v_valid & ~writes)
        # No program of this launch reads `next_count`, and one of each sequence writes it.
        number = tl.where(writes, 0, num_recent + 1)
        number = tl.where(kind == PADDING, num_recent, number)
        tl.store(next_count + head // H, number, tl.program_id(0) % (H * TILES) == 0)
        writes &= kind != PADDING
    if writes:
        state *= (decay * later_decay)[:, None]
        for i in tl.static_range(len(keys)):
            state += (decay * keys[i])[:, None] * values[i][None, :]
        state += key[:, None] * value[None, :]
        tl.store(next_memory + offsets, state, valid)


def results(q, f, v, memory, lower_bound, norm_scale, token_kind):
    batch, heads, _, values = memory.shape
    squares = Array((batch, heads, cdiv(values, SQUARES_GROUP)), "float32")
    return like(v), squares, Array(tuple(memory.shape), "float32")


@decoding_step(unsupported, results, count=3, updates=("memory",))
def hgrn2_step(q, f, v, memory, lower_bound=None, norm_scale=None, token_kind=None):
    output, squares, next_memory = results(q, f, v, memory, lower_bound, norm_scale, token_kind)
    tensors = q, f, v, memory, None, None, lower_bound, norm_scale, token_kind
    outputs = output, squares, None, next_memory, None
    output, squares, _, next_memory, _ = run(launch(tensors, outputs, updates=((3, 3),)))
    return output, squares, next_memory


def launch(tensors, outputs, updates):
    """The launch of the kernel; `recent`, `count` and their updates may be None."""
    q, _, _, memory, recent, *_ = tensors
    batch, heads, keys, values = memory.shape
    block_k, block_v = next_power_of_2(keys), min(_BLOCK_V, next_power_of_2(values))
    num_warps = _WARPS if recent is None else delayed_warps(block_k, block_v)
    options = {"K": keys, "V": values, "N": 0 if recent is None else recent.shape[1]}
    options |= {"BLOCK_K": block_k, "BLOCK_V": block_v, "num_warps": num_warps}
    options |= pdl_options(q)
    programs = batch * heads * cdiv(values, block_v)
    numbers = heads, keys**-0.5
    return Launch(_kernel, programs, tensors, outputs, numbers, options, updates=updates)


def delayed_warps(block_k, block_v):
    """Number of warps of a program of `hgrn2_delayed_step`."""
    return max(1, block_k * block_v // (32 * _DELAYED_SIZE))
