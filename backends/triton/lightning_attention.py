"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2405.17381 (Lightning Attention), and 2023, arXiv:2307.14995
(TransNormerLLM): inside a chunk (Q K^T * M) V with M_us = decay^(u - s), across chunks Q S.
Padding does not tick the decay: M and its like are powers of it by the number of real tokens
between two places, and 0 where a document begins between them.

The gradients have that form, too, of d_O, V, K and S^T for Q, and mirrored in time of K, Q, d_O
and G for V, and of V, d_O, Q and G^T for K: so there is one kernel besides that of the states.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from keras_recurrent.backends.torch._common import register_gradient
from keras_recurrent.backends.triton._common import contiguous, on_device_of
from keras_recurrent.backends.triton._linear_attention import (
    counts,
    heads_of,
    launch_options,
    place,
    power,
    read,
    real_tokens,
    refusal,
    walk,
)
from keras_recurrent.backends.triton._linear_attention_step import step
from keras_recurrent.backends.triton._products import operand, product


def unsupported(q, k, v, log_decay, initial_state=None, token_kind=None) -> str | None:
    """Why this kernel refuses these arguments; None if it accepts them."""
    return refusal(q, k, v, log_decay, initial_state, token_kind)


def lightning_attention(q, k, v, log_decay, initial_state=None, token_kind=None):
    """q, k: [B, T, H, K]; v: [B, T, H, V]; log_decay: [H], a constant, whose gradient is 0.

    Returns ([B, T, H, V] in v's dtype, [B, H, K, V] in float32).
    """
    return _forward(q, k, v, log_decay, initial_state, token_kind)


@triton.jit(do_not_specialize=["T", "chunks"])
def _attend_kernel(
    q,
    k,
    v,
    log_decay,
    token_kind,
    states,
    output,
    T,
    H,
    K,
    V,
    state_k,
    state_v,
    chunks,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """What every token takes from tokens up to it, or, if REVERSE, from it on.

    state_k, state_v: the distances of elements of a state along K and along V.
    """
    tile, chunk, head, b, token = place(T, H, chunks, tl.cdiv(V, BLOCK_V), CHUNK)
    row = tl.arange(0, CHUNK)
    e = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    real, starts = real_tokens(chunk, token_kind, b, T, CHUNK)
    states += (head * chunks + chunk).to(tl.int64) * K * V
    weights = tl.zeros((CHUNK, CHUNK), tl.float32)
    recalled = tl.zeros((CHUNK, BLOCK_V), tl.float32)
    for start in range(0, K, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        query = operand(read(q + token * K, row, real, d, K, H), SHORT)
        key = operand(read(k + token * K, row, real, d, K, H), SHORT)
        inside = (d < K)[:, None] & (e < V)[None, :]
        state = tl.load(states + d[:, None] * state_k + e[None, :] * state_v, inside, other=0.0)
        weights = product(query, tl.trans(key), weights, SHORT)
        recalled = product(query, state, recalled, SHORT)

    rate = tl.load(log_decay + head % H).to(tl.float32)
    count, document, whole, latest = counts(real, starts)
    if REVERSE:
        reaches = (row[:, None] <= row[None, :]) & (document[:, None] == document[None, :])
        across = tl.where(document == latest, power(whole - count, rate, not SHORT), 0.0)
    else:
        reaches = (row[:, None] >= row[None, :]) & (document[:, None] == document[None, :])
        across = tl.where(document == 0, power(count, rate, not SHORT), 0.0)
    between = power(tl.abs(count[:, None] - count[None, :]), rate, not SHORT)
    weights = tl.where(reaches, weights * between, 0.0)
    value = read(v + token * V, row, real, e, V, H)
    recalled = product(weights, value, recalled * across[:, None], SHORT)
    there = (chunk * CHUNK + row < T)[:, None] & (e < V)[None, :]
    tl.store(output + token * V + row[:, None] * (H * V) + e[None, :], recalled, there)


def _attend(
    sizes, q, k, v, states, like, *, log_decay, token_kind, transposed=False, reverse=False
):  # fmt: skip
    """[B, T, H, V], in the dtype of `like`. `transposed`: states are [.., V, K]."""
    output = like.new_empty(v.shape)
    keys, values = q.shape[3], v.shape[3]
    options = launch_options(sizes, keys, values)
    _attend_kernel[(sizes.programs * triton.cdiv(values, options["BLOCK_V"]),)](
        q,
        k,
        v,
        log_decay,
        token_kind,
        states,
        output,
        sizes.length,
        sizes.heads,
        keys,
        values,
        *((1, keys) if transposed else (values, 1)),
        sizes.chunks,
        REVERSE=reverse,
        **options,
    )
    return output


@torch.library.custom_op("keras_recurrent::triton_lightning_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor]:
    sizes = heads_of(q, k, v)
    q, k, v, initial_state, log_decay, token_kind = contiguous(
        q, k, v, initial_state, log_decay, token_kind
    )
    decays = {"log_decay": log_decay, "token_kind": token_kind}
    with on_device_of(q):
        if sizes.length == 1:
            return step(sizes, q, k, v, initial_state, **decays)
        states, last = walk(sizes, k, v, initial_state, **decays)
        return _attend(sizes, q, k, v, states, v, **decays), last


@_forward.register_fake
def _(q, k, v, log_decay, initial_state, token_kind):
    state_shape = heads_of(q, k, v).state_shape
    return v.new_empty(v.shape), v.new_empty(state_shape, dtype=torch.float32)


@torch.library.custom_op("keras_recurrent::triton_lightning_attention_backward", mutates_args=())
def _backward(
    d_output: Tensor,
    d_final_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sizes = heads_of(q, k, v)
    q, k, v, initial_state, log_decay, token_kind, d_output, d_final_state = contiguous(
        q, k, v, initial_state, log_decay, token_kind, d_output, d_final_state
    )
    decays = {"log_decay": log_decay, "token_kind": token_kind}
    with on_device_of(q):
        states, _ = walk(sizes, k, v, initial_state, **decays)
        d_q = _attend(sizes, d_output, v, k, states, q, **decays, transposed=True)
        del states  # before those of the other direction
        states, d_initial = walk(sizes, q, d_output, d_final_state, **decays, reverse=True)
        mirrored = {**decays, "reverse": True}
        d_v = _attend(sizes, k, q, d_output, states, v, **mirrored)
        d_k = _attend(sizes, v, d_output, q, states, k, **mirrored, transposed=True)
    return d_q, d_k, d_v, torch.zeros_like(log_decay), d_initial


@_backward.register_fake
def _(d_output, d_final_state, q, k, v, log_decay, initial_state, token_kind):
    given = (q, k, v, log_decay, d_final_state)
    return tuple(x.new_empty(x.shape) for x in given)


register_gradient(_forward, _backward, keep_output=False)
