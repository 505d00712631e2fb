"""S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2404.07904, section 3 (HGRN2, where k_t = 1 - exp(log_f_t)); Yang et al.
2023, arXiv:2312.06635, section 4 (gated linear attention).

Tokens before a chunk contribute through the state. Inside a chunk, token u attends to an earlier
token s with the weight a_us = sum_k q_u f_{s+1} ... f_u k_s. To compute these weights as matrix
products, the decays are split between q_u and k_s: the chunk is halved recursively, and where u is
in a right half and s in the adjacent left half, q_u is multiplied by the decays from the boundary
to u and k_s by the decays from s to the boundary. Decays are only multiplied, never divided by one
another, so any decay is safe. A start is a decay of 0, which needs no special case.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import _token_loop
from ._common import (
    applied_decay,
    default_zero_state,
    default_zero_state_gradient,
    filled,
    kind_masks,
)
from ._linear_attention import (
    Plan,
    chunked,
    decay_products,
    halves,
    inner_products,
    joined,
    plan,
    product,
    scan_groups,
    state_shape,
    states,
    states_before_groups,
    transposed,
    unchunked,
    weights_of_pairs,
)
from ._operation import kernel_over_time

CHUNK = 64
# Largest K * V of the token loop, on CPUs.
LARGEST_STATE_OF_TOKEN_LOOP = 256


class Form(NamedTuple):
    """Functions of a group of tokens, and the longest chunk, in tokens.

    q, k, f: [B, N, H, K]; v, d_output: [B, N, H, V]; states and their gradients: [B, H, K, V].
    """

    outputs: Callable  # (state, q, k, v, f) -> (output, state after the group)
    state_after: Callable  # (state, q, k, v, f) -> state after the group
    gradients: Callable  # (state, d_output, d_state, q, k, v, f) -> dq, dk, dv, dlog f, dstate
    chunk: int


def choose_form(run, q, v, *arguments):
    """Calls `run(form, q, v, *arguments)` with the form for the platform and the size of heads."""
    if q.shape[3] * v.shape[3] > LARGEST_STATE_OF_TOKEN_LOOP:
        return run(CHUNKS, q, v, *arguments)
    in_chunks, by_token = (functools.partial(run, form) for form in (CHUNKS, TOKENS))
    return jax.lax.platform_dependent(q, v, *arguments, cpu=by_token, default=in_chunks)


@default_zero_state(state_shape)
def forward(q, k, v, log_f, initial_state, token_kind):
    """Returns the output and the final state, and the residuals."""
    if q.shape[1] == 1:
        return _one_token(q, k, v, log_f, initial_state, token_kind), None

    def run(form, q, v, k, log_f, initial_state, token_kind):
        def step(state, _, tokens, __):
            output, state = form.outputs(state, *_prepared(state.dtype, *tokens))
            return state, output.astype(v.dtype)

        tokens, cut = (q, k, v, log_f, token_kind), plan(q, v, form.chunk)
        return scan_groups(step, initial_state, tokens, jnp.zeros_like(v), cut)

    tensors = k, log_f, initial_state, token_kind
    final_state, output = choose_form(run, q, v, *tensors)
    return (output, final_state), None


def _one_token(q, k, v, log_f, state, token_kind):
    q, k, w, f = (x[:, 0, :, :, None] for x in _prepared(state.dtype, q, k, v, log_f, token_kind))
    state = f * state + k * transposed(w)
    return jnp.sum(q * state, axis=2)[:, None].astype(v.dtype), state


@default_zero_state_gradient
def backward(q, k, v, log_f, initial_state, token_kind, _, d_output, d_final):
    def run(form, q, v, k, log_f, initial_state, token_kind, d_output, d_final):
        tensors, cut = (q, k, v, log_f, token_kind), plan(q, v, form.chunk)

        def state_after(state, tokens):
            return form.state_after(state, *_prepared(state.dtype, *tokens))

        before = states_before_groups(state_after, initial_state, tensors, cut)

        def step(g, group, tokens, old):
            _, padding = kind_masks(tokens[-1])
            d_output = filled(old[2], padding, 0).astype(g.dtype)
            state = jax.lax.dynamic_index_in_dim(before, group, keepdims=False)
            inputs = _prepared(g.dtype, *tokens)
            d_q, d_k, d_v, d_log_f, g = form.gradients(state, d_output, g, *inputs)
            _, k, _, log_f, _ = tokens
            if k is None:
                d_log_f -= d_k * jnp.exp(log_f.astype(g.dtype))
                d_k = None
            found = jax.tree.map(lambda d, x: d.astype(x.dtype), (d_q, d_k, d_v, d_log_f), old)
            return g, jax.tree.map(lambda d: filled(d, padding, 0), found)

        # d_v overwrites d_output, which is not read after its group.
        d_q, d_k, d_log_f = jax.tree.map(jnp.zeros_like, (q, k, log_f))
        outputs = d_q, d_k, d_output, d_log_f
        return scan_groups(step, d_final, tensors, outputs, cut, reverse=True)

    tensors = k, log_f, initial_state, token_kind, d_output, d_final
    d_initial, gradients = choose_form(run, q, v, *tensors)
    return *gradients, d_initial, None


gated_linear_attention = kernel_over_time(
    "gated_linear_attention", forward, backward, has_residuals=True
)


def _prepared(dtype, q, k, v, log_f, token_kind):
    """q, k, v and f of a group, [B, T, H, ...]; at padding 0, 0, 0 and 1; f is 0 at a start."""
    starts, padding = kind_masks(token_kind)
    q, v, log_f = (x.astype(dtype) for x in (q, v, log_f))
    k = -jnp.expm1(log_f) if k is None else k.astype(dtype)
    f = applied_decay(jnp.exp(log_f), starts, padding)
    return *(filled(x, padding, 0) for x in (q, k, v)), f


def _chunk_outputs(state, q, k, v, f):
    q, k, v, f = _chunked(q, k, v, f)
    levels, from_start, to_end = decay_products(f)
    before, state = states(_total(from_start), product(transposed(k * to_end), v), state)
    output = product(q * from_start, before) + product(weights_of_pairs(q, k, levels), v)
    return unchunked(output), state


def _chunk_state_after(state, _, k, v, f):
    k, v, f = _chunked(k, v, f)
    _, from_start, to_end = decay_products(f)
    return states(_total(from_start), product(transposed(k * to_end), v), state)[1]


def _chunk_gradients(state, d_output, g, q, k, v, f):
    d_output, q, k, v, f = _chunked(d_output, q, k, v, f)
    *gradients, d_state = _group_gradient(state, d_output, g, q, k, v, f)
    return *(unchunked(d) for d in gradients), d_state


def _chunked(*tensors):
    """Tensors of a group, [B, N, H, K or V], in chunks."""
    length = tensors[0].shape[1]
    size = min(CHUNK, length)
    return [chunked(x, Plan(1, length // size, size)) for x in tensors]


CHUNKS = Form(_chunk_outputs, _chunk_state_after, _chunk_gradients, CHUNK)
TOKENS = Form(_token_loop.outputs, _token_loop.state_after, _token_loop.gradients, 1)


# Below, tensors are [B, H, chunks, C, K or V].


def _total(from_start):
    """The product of a chunk's decays, [..., K, 1], for its state [..., K, V]."""
    return from_start[..., -1, :, None]


def _group_gradient(state, d_output, g, q, k, v, f):
    """Gradients of q, k, v, log f and the state before a group; g: that of the state after it.

    The gradient of log f_t is, in each channel, the sum of q_u f_{s+1} ... f_u k_s da_us over all
    pairs s < t <= u, of which f_t is a factor. The pairs on both sides of a boundary add to each f
    between the boundary and u a sum over later u, and to each f between s and the boundary a sum
    over earlier s. Nothing is subtracted, so the result is as exact as the gradients of q and k.
    """
    levels, from_start, to_end = decay_products(f)
    total, q_in, k_out = _total(from_start), q * from_start, k * to_end
    before, _ = states(total, product(transposed(k_out), v), state)
    after, d_state = states(total, product(transposed(q_in), d_output), g, reverse=True)

    d_v = product(k_out, after) + product(transposed(weights_of_pairs(q, k, levels)), d_output)
    d_q = product(d_output, transposed(before)) * from_start
    d_k = product(v, transposed(after)) * to_end
    # Terms of the gradient of log f: `crossing` applies to every token of a block, `later` to its
    # token and those before it in the block, `earlier` to those after it.
    crossing = jnp.sum(total * before * after, axis=-1)[..., None, :]
    later, earlier = q * d_q, k * d_k

    d_weights = inner_products(d_output, v)[..., None, :, :]
    for from_boundary, to_boundary in reversed(levels):
        half = from_boundary.shape[-2]
        (k_left, _), (_, q_right) = halves(k, half), halves(q, half)
        d_between = d_weights[..., half:, :half]
        d_right = product(d_between, k_left * to_boundary) * from_boundary
        d_left = product(transposed(d_between), q_right * from_boundary) * to_boundary
        d_q += joined(jnp.zeros_like(d_right), d_right)
        d_k += joined(d_left, jnp.zeros_like(d_left))

        later_left, later_right = halves(later, half)
        earlier_left, earlier_right = halves(earlier, half)
        crossing = jnp.stack(
            [crossing + jnp.sum(later_right, axis=-2), crossing + jnp.sum(earlier_left, axis=-2)],
            axis=-2,
        ).reshape(*crossing.shape[:-2], -1, crossing.shape[-1])
        later = joined(later_left, later_right + q_right * d_right)
        earlier = joined(earlier_left + k_left * d_left, earlier_right)
        d_weights = jnp.stack(
            [d_weights[..., :half, :half], d_weights[..., half:, half:]], axis=-3
        ).reshape(*d_weights.shape[:-3], -1, half, half)

    d_own = d_weights[..., 0]  # weights of a token and itself have no decay
    return d_q + d_own * k, d_k + d_own * q, d_v, later + crossing, d_state
