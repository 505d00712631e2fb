"""One token of linear attention, the step of generation: S' = diag(f) S + k v^T, o = S'^T q.

The state is read once and written once, all in float32.
"""

import torch
import triton
import triton.language as tl

from keras_recurrent.backends.triton._linear_attention import block
from keras_recurrent.backends.triton._math import exp_of_decays, one_minus_exp


@triton.jit
def _read(tensor, at, there):
    return tl.load(tensor + at, there, other=0.0).to(tl.float32)


@triton.jit
def _step_kernel(
    q,
    k,
    v,
    log_f,
    log_decay,
    token_kind,
    first,
    output,
    last,
    H,
    K,
    V,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    tiles = tl.cdiv(V, BLOCK_V)
    head = tl.program_id(0) // tiles
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(0) % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    key, value = d < K, e < V
    kind = 0
    if token_kind is not None:
        kind = tl.load(token_kind + head // H)
        key, value = key & (kind != 2), value & (kind != 2)

    if log_f is not None:
        logarithm = _read(log_f, head * K + d, key)
        f = exp_of_decays(logarithm, True)
    else:
        logarithm = tl.load(log_decay + head % H).to(tl.float32)
        f = exp_of_decays(tl.where(d >= 0, logarithm, 0.0), True)
    if k is None:
        key_of = tl.where(key, one_minus_exp(logarithm, True), 0.0)
    else:
        key_of = _read(k, head * K + d, key)
    f = tl.where(kind == 0, f, tl.where(kind == 1, 0.0, 1.0))
    state = key_of[:, None] * _read(v, head * V + e, value)[None, :]
    at = head.to(tl.int64) * K * V + d[:, None] * V + e[None, :]
    inside = (d < K)[:, None] & (e < V)[None, :]
    if first is not None:
        state += f[:, None] * _read(first, at, inside)
    tl.store(last + at, state, inside)
    recalled = tl.sum(_read(q, head * K + d, key)[:, None] * state, 0)
    tl.store(output + head * V + e, recalled, e < V)


def step(sizes, q, k, v, first, *, token_kind, log_f=None, log_decay=None):
    """The output [B, 1, H, V] and the state after the token."""
    output = v.new_empty(v.shape)
    last = v.new_empty(sizes.state_shape, dtype=torch.float32)
    block_v = block(sizes.values, 32)
    _step_kernel[(sizes.batch * sizes.heads * triton.cdiv(sizes.values, block_v),)](
        q,
        k,
        v,
        log_f,
        log_decay,
        token_kind,
        first,
        output,
        last,
        *sizes.numbers[1:],
        BLOCK_K=triton.next_power_of_2(sizes.keys),
        BLOCK_V=block_v,
        num_warps=4,
    )
    return output, last
