"""A decoding step of HGRN2 that writes its memory every few tokens only.

The bandwidth of the GPU limits `hgrn2_step` for many sequences, and nearly half of the bytes that
it moves are writes of the memory. The output needs no memory but the stored one, S_0: for a query
q, the current decay f, key k and value v, and those of n recent tokens,

    y = (q f r_0)^T S_0 + sum_i (q f r_i · k_i) v_i + (q · k) v,  r_i = f_{i+1} ... f_n

The memory after the token is computed only where it is written. All arithmetic is float32.
"""

import triton
import triton.language as tl

from . import hgrn2_step as every_token
from ._decoding.hgrn2_gates import load_decay_and_key, load_query
from ._device.common import load_float32
from ._device.pdl import launch_dependents, wait_for_previous_launch
from ._device.tokens import CONTINUES, PADDING
from ._runtime.framework import forward_operation, run
from ._runtime.launch import Array, next_power_of_2


def unsupported(
    q, f, v, memory, recent, count, lower_bound=None, norm_scale=None, token_kind=None
) -> str | None:
    """Reason why this implementation cannot take these arguments, or None."""
    return every_token.unsupported(q, f, v, memory, lower_bound, norm_scale, token_kind)


def hgrn2_delayed_step(
    q, f, v, memory, recent, count, lower_bound=None, norm_scale=None, token_kind=None
):
    """q, f: [B, H K]; v: [B, H V]; memory: [B, H, K, V]; recent: [B, N, H (2 K + V)]; count: [B].

    norm_scale: [H V]. Returns ([B, H V], sums of squares [B, H, U], the next count, memory and
    recent tokens).
    """
    return _hgrn2_delayed_step(q, f, v, memory, recent, count, lower_bound, norm_scale, token_kind)


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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        launch_dependents()
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    row, head_in_row = head // H, (head % H).to(tl.int32)
    d, e = tl.arange(0, BLOCK_K), tile * BLOCK_V + tl.arange(0, BLOCK_V)
    offsets = d[:, None] * V + e[None, :]
    valid = (d < K)[:, None] & (e < V)[None, :]
    state = load_float32(memory + head * (K * V), offsets, valid)
    num_recent = tl.load(count + row)
    token_size = H * (2 * K + V)
    decay_channel, key_channel = head_in_row * K + d, (H + head_in_row) * K + d
    value_channel = 2 * H * K + head_in_row * V + e
    recent += row * N * token_size
    next_recent += row * N * token_size
    remaining = tl.full((BLOCK_K,), 1.0, tl.float32)
    keys = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    values = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    if num_recent > 0:
        # Item i of the tiles is the recent token n - i, and decays[i] the decay of the next one.
        i = num_recent - tl.arange(0, BLOCK_N)[:, None]
        is_key, is_value = (i > 0) & (d < K)[None, :], (i > 0) & (e < V)[None, :]
        is_decay = (i >= 0) & (i < num_recent) & (d < K)[None, :]
        decays = tl.load(recent + (i * token_size + decay_channel[None, :]), is_decay, other=1.0)
        keys = load_float32(recent, (i - 1) * token_size + key_channel[None, :], is_key)
        values = load_float32(recent, (i - 1) * token_size + value_channel[None, :], is_value)
        decays = tl.cumprod(decays, 0)
        keys *= decays
        remaining = tl.sum(tl.where(i == num_recent - BLOCK_N + 1, decays, 0.0), 0)
    if norm_scale is not None:
        scale = load_float32(norm_scale, head_in_row * V + e, e < V)
    if PDL:
        wait_for_previous_launch()
    kind = CONTINUES
    if token_kind is not None:
        kind = tl.load(token_kind + row)
    k_valid, v_valid = (d < K) & (kind != PADDING), (e < V) & (kind != PADDING)
    decay, key = load_decay_and_key(f, lower_bound, kind, head, H, d, k_valid, K)
    value = load_float32(v, head * V + e, v_valid)
    query = load_query(q, head * K + d, k_valid, root)
    decayed_query = query * decay
    result = tl.sum((decayed_query * remaining)[:, None] * state, 0)
    result += tl.sum(tl.sum(decayed_query[None, :] * keys, 1)[:, None] * values, 0)
    result += tl.sum(query * key, 0) * value
    tl.store(squares + tl.program_id(0), tl.sum(result * result, 0))
    if norm_scale is not None:
        result *= scale
    tl.store(output + head * V + e, result, e < V)
    if num_recent == N:
        for _ in tl.static_range(N):
            recent_decay = load_float32(recent, decay_channel, d < K)
            recent_key = load_float32(recent, key_channel, d < K)
            recent_value = load_float32(recent, value_channel, e < V)
            state = recent_decay[:, None] * state + recent_key[:, None] * recent_value[None, :]
            recent += token_size
        state = decay[:, None] * state + key[:, None] * value[None, :]
        tl.store(next_memory + head * (K * V) + offsets, state, valid & (kind != PADDING))
    else:
        token = next_recent + num_recent * token_size
        # The first program of a head stores its decays and keys.
        tl.store(token + decay_channel, decay, k_valid & (tile == 0))
        tl.store(token + key_channel, key, k_valid & (tile == 0))
        tl.store(token + value_channel, value, v_valid)
    # No program of this launch reads `next_count`, and one of each sequence writes it.
    number = tl.where(num_recent == N, 0, num_recent + 1)
    number = tl.where(kind == PADDING, num_recent, number)
    tl.store(next_count + row, number, tl.program_id(0) % (H * TILES) == 0)


def results(q, f, v, memory, recent, count, lower_bound, norm_scale, token_kind):
    output, squares, next_memory = every_token.results(
        q, f, v, memory, lower_bound, norm_scale, token_kind
    )
    next_recent = Array(tuple(recent.shape), "float32")
    return output, squares, Array(tuple(count.shape), "int32"), next_memory, next_recent


def forward(q, f, v, memory, recent, count, lower_bound, norm_scale, token_kind):
    tensors = q, f, v, memory, recent, count, lower_bound, norm_scale, token_kind
    limit = recent.shape[1]
    sizes = {"N": limit, "BLOCK_N": next_power_of_2(limit + 1)}
    updates = (3, 3), (4, 4)
    return run(every_token.launch(_kernel, tensors, results(*tensors), updates, **sizes))


_hgrn2_delayed_step = forward_operation(
    "hgrn2_delayed_step", forward, results, count=5, updates=("memory", "recent")
)
