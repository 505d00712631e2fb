"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2405.17381 (Lightning Attention), and 2023, arXiv:2307.14995
(TransNormerLLM): inside a chunk (Q K^T * M) V with M_us = decay^(u - s), across chunks Q (K^T V).
Padding does not decay the state: the exponent counts the real tokens between s and u, and M_us is 0
where a document starts between them.

`gated_linear_attention` with equal decays in all channels has the same results, but forward and
backward take 1.5 to 2.1 times as long on a CPU on JAX and torch, 1.7 to 2.8 times on TensorFlow.
"""

import jax
import jax.numpy as jnp

from ..constants import CONTINUES, PADDING, STARTS
from ._common import (
    default_zero_state,
    default_zero_state_gradient,
    filled,
    kind_masks,
)
from ._linear_attention import (
    chunked,
    inner_products,
    plan,
    product,
    scan_groups,
    state_shape,
    states,
    states_before_groups,
    transposed,
    unchunked,
)
from ._operation import kernel_over_time

CHUNK = 64


@default_zero_state(state_shape)
def forward(q, k, v, log_decay, initial_state, token_kind):
    if q.shape[1] == 1:
        return _one_token(q, k, v, log_decay, initial_state, token_kind)
    cut = plan(q, v, CHUNK)

    def step(state, _, tokens, __):
        *tokens, kind = tokens
        between, from_start, to_end, total = _decays(log_decay, kind, cut, state.dtype)
        q, k, w = _chunk_group(tokens, kind, cut, state.dtype)
        before, state = states(total, product(transposed(k * to_end), w), state)
        weights = _decayed(inner_products(q, k), between)
        output = product(q * from_start, before) + product(weights, w)
        return state, unchunked(output).astype(v.dtype)

    tensors = q, k, v, _padded_kinds(token_kind, q, cut)
    final_state, output = scan_groups(step, initial_state, tensors, jnp.zeros_like(v), cut)
    return output, final_state


def _one_token(q, k, v, log_decay, state, token_kind):
    cut = plan(q, v, CHUNK)
    *_, decay = _decays(log_decay, token_kind, cut, state.dtype)
    q, k, w = (
        x[:, :, 0, 0, :, None] for x in _chunk_group((q, k, v), token_kind, cut, state.dtype)
    )
    state = decay[:, :, 0] * state + k * transposed(w)
    return jnp.sum(q * state, axis=2)[:, None].astype(v.dtype), state


@default_zero_state_gradient
def backward(q, k, v, log_decay, initial_state, token_kind, _, d_output, d_final):
    dtype, cut = initial_state.dtype, plan(q, v, CHUNK)
    tensors = q, k, v, _padded_kinds(token_kind, q, cut)

    def state_after(state, tokens):
        _, k, v, kind = tokens
        *_, to_end, total = _decays(log_decay, kind, cut, dtype)
        k, w = _chunk_group((k, v), kind, cut, dtype)
        return states(total, product(transposed(k * to_end), w), state)[1]

    before = states_before_groups(state_after, initial_state, tensors, cut)

    def step(g, group, tokens, old):
        *tokens, kind = tokens
        between, from_start, to_end, total = _decays(log_decay, kind, cut, dtype)
        q, k, w, d_output = _chunk_group((*tokens, old[2]), kind, cut, dtype)
        q_in, k_out = q * from_start, k * to_end
        state = jax.lax.dynamic_index_in_dim(before, group, keepdims=False)
        earlier, _ = states(total, product(transposed(k_out), w), state)
        later, g = states(total, product(transposed(q_in), d_output), g, reverse=True)

        weights, d_weights = (
            _decayed(inner_products(a, b), between) for a, b in ((q, k), (d_output, w))
        )
        d_q = product(d_output, transposed(earlier)) * from_start + product(d_weights, k)
        d_k = product(w, transposed(later)) * to_end + product(transposed(d_weights), q)
        d_v = product(k_out, later) + product(transposed(weights), d_output)
        found = [unchunked(d).astype(x.dtype) for d, x in zip((d_q, d_k, d_v), old, strict=True)]
        _, padding = kind_masks(kind)
        return g, tuple(filled(d, padding, 0) for d in found)

    # d_v overwrites d_output, which is not read after its group.
    outputs = jnp.zeros_like(q), jnp.zeros_like(k), d_output
    d_initial, gradients = scan_groups(step, d_final, tensors, outputs, cut, reverse=True)
    return *gradients, jnp.zeros_like(log_decay), d_initial, None


lightning_attention = kernel_over_time("lightning_attention", forward, backward, keep_output=False)


def _padded_kinds(token_kind, q, cut):
    """Token kinds padded to full groups; None if nothing is padded and all tokens continue."""
    missing = cut.tokens - q.shape[1]
    if missing and token_kind is None:
        token_kind = jnp.full(q.shape[:2], CONTINUES, jnp.int8)
    if missing:
        token_kind = jnp.pad(token_kind, [(0, 0), (0, missing)], constant_values=PADDING)
    return token_kind


def _chunk_group(tensors, kind, cut, dtype):
    """Tensors of a group as [B, H, chunks, C, K], with zeros at padding."""
    _, padding = kind_masks(kind)
    return [chunked(filled(x.astype(dtype), padding, 0), cut) for x in tensors]


def _decayed(weights, between):
    """Weights times their decays; 0 where these are 0, even for NaN weights."""
    return jnp.where(between == 0, 0, weights * between)


def _decays(log_decay, kind, cut, dtype):
    """The decays of a group: from s to u, from the start of a chunk, to its end, and in total.

    [B, H, chunks, C, C], twice [B, H, chunks, C, 1] and [B, H, chunks, 1, 1].
    """
    log_decay = log_decay.astype(dtype)[:, None, None, None]
    if kind is None:
        count = jnp.arange(1, cut.size + 1)[:, None]
        document = jnp.zeros_like(count)
    else:
        kind = kind.reshape(-1, 1, cut.chunks, cut.size, 1)
        count = jnp.cumsum(kind != PADDING, axis=-2)
        document = jnp.cumsum(kind == STARTS, axis=-2)

    def decay(steps, reaches):
        # Not 0 * log_decay: that is NaN if the decay is 0.
        logarithm = jnp.where(steps == 0, 0, steps.astype(dtype) * log_decay)
        return jnp.where(reaches, jnp.exp(logarithm), 0)

    whole, last = count[..., -1:, :], document[..., -1:, :]
    index = jnp.arange(cut.size)
    earlier = index[:, None] >= index
    return (
        decay(jnp.abs(count - transposed(count)), earlier & (document == transposed(document))),
        decay(count, document == 0),
        decay(whole - count, document == last),
        decay(whole, last == 0),
    )
