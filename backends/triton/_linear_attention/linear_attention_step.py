"""One decoding step of linear attention: S' = diag(f) S + k v^T, o = S'^T q.

The state is read once and written once. All arithmetic is float32.
"""

import triton
import triton.language as tl

from .._device.common import load_float32
from .._device.math import exp_of_decays, one_minus_exp
from .._device.tokens import CONTINUES, PADDING, select_by_kind
from .._runtime.framework import run
from .._runtime.launch import Array, Launch, cdiv, like, next_power_of_2
from .linear_attention import block


@triton.jit
def _step_kernel(
    q,
    k,
    v,
    log_f,
    log_decay,
    token_kind,
    initial,
    output,
    final,
    H,
    K,
    V,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SHARE: tl.constexpr,
    IS_CONSTANT: tl.constexpr,
):
    """SHARE: the number of heads that share a query and a key; with `log_f`, each has its own."""
    tiles = tl.cdiv(V, BLOCK_V)
    head = tl.program_id(0) // tiles
    key_row, value_row = (head // SHARE).to(tl.int64) * K, head.to(tl.int64) * V
    d = tl.arange(0, BLOCK_K)
    e = tl.program_id(0) % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    k_valid, v_valid = d < K, e < V
    kind = CONTINUES
    if token_kind is not None:
        kind = tl.load(token_kind + head // H)
        k_valid, v_valid = k_valid & (kind != PADDING), v_valid & (kind != PADDING)

    if log_f is not None:
        logarithm = load_float32(log_f, key_row + d, k_valid)
        f = exp_of_decays(logarithm, True)
    else:
        logarithm = tl.load(log_decay + (head % H if IS_CONSTANT else head)).to(tl.float32)
        f = exp_of_decays(tl.where(d >= 0, logarithm, 0.0), True)
    if k is None:
        key = tl.where(k_valid, one_minus_exp(logarithm, True), 0.0)
    else:
        key = load_float32(k, key_row + d, k_valid)
    f = select_by_kind(kind, f, 0.0, 1.0)
    state = key[:, None] * load_float32(v, value_row + e, v_valid)[None, :]
    offsets = value_row * K + d[:, None] * V + e[None, :]
    valid = (d < K)[:, None] & (e < V)[None, :]
    if initial is not None:
        state += f[:, None] * load_float32(initial, offsets, valid)
    tl.store(final + offsets, state, valid)
    result = tl.sum(load_float32(q, key_row + d, k_valid)[:, None] * state, 0)
    tl.store(output + value_row + e, result, e < V)


def step(sizes, q, k, v, initial_state, *, token_kind, log_f=None, log_decay=None):
    """The output [B, 1, H, V] and the final state; decays are `log_f` or `log_decay`.

    log_decay: [H] or [B, 1, H].
    """
    block_v = block(sizes.values, 32)
    programs = sizes.batch * sizes.heads * cdiv(sizes.values, block_v)
    inputs = q, k, v, log_f, log_decay, token_kind, initial_state
    outputs = like(v), Array(sizes.state_shape, "float32")
    options = {"BLOCK_K": next_power_of_2(sizes.keys), "BLOCK_V": block_v, "num_warps": 4}
    options |= {"SHARE": sizes.heads // q.shape[2]}
    options |= {"IS_CONSTANT": log_decay is not None and len(log_decay.shape) == 1}
    return run(Launch(_step_kernel, programs, inputs, outputs, sizes.numbers[1:], options))
