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
import math

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
    backward_groups,
    chunked,
    decay_products,
    forward_groups,
    plan,
    product,
    state_shape,
    states,
    transposed,
    unchunked,
    weights_of_pairs,
)
from ._operation import kernel_over_time

CHUNK = 64
# Largest K * V of the token loop, on CPUs.
LARGEST_STATE_OF_TOKEN_LOOP = 256


@default_zero_state(state_shape)
def forward(q, k, v, log_f, initial_state, token_kind):
    """Returns the output and the final state, and the residuals."""
    if q.shape[1] == 1:
        return _one_token(q, k, v, log_f, initial_state, token_kind), None
    return _choose_form(forward_groups, initial_state, (q, k, v, log_f, token_kind)), None


@default_zero_state_gradient
def backward(q, k, v, log_f, initial_state, token_kind, _, d_output, d_final):
    tensors = q, k, v, log_f, token_kind
    *gradients, d_initial = _choose_form(backward_groups, initial_state, tensors, d_output, d_final)
    return *gradients, d_initial, None


def _choose_form(run, state, tensors, *gradients):
    """Calls `run` with chunks or a token loop, depending on the platform and the head size."""

    def call(outputs, chunk, state, tensors, *gradients):
        def group(state, *tokens):
            return outputs(state, *_prepared(state.dtype, *tokens))

        return run(group, state, tensors, plan(tensors[0], tensors[2], chunk), *gradients)

    in_chunks = functools.partial(call, _chunk_outputs, CHUNK)
    arguments = state, tensors, *gradients
    if math.prod(state.shape[2:]) > LARGEST_STATE_OF_TOKEN_LOOP:
        return in_chunks(*arguments)
    by_token = functools.partial(call, _token_loop.outputs, 1)
    return jax.lax.platform_dependent(*arguments, cpu=by_token, default=in_chunks)


def _one_token(q, k, v, log_f, state, token_kind):
    q, k, w, f = (x[:, 0, :, :, None] for x in _prepared(state.dtype, q, k, v, log_f, token_kind))
    state = f * state + k * transposed(w)
    return jnp.sum(q * state, axis=2)[:, None].astype(v.dtype), state


gated_linear_attention = kernel_over_time(
    "gated_linear_attention", forward, backward, has_residuals=True
)


def _prepared(dtype, q, k, v, log_f, token_kind):
    """q, k, v and f of a group, [B, T, H, ...]; at padding 0, 0, 0 and 1; f is 0 at a start."""
    starts, padding = kind_masks(token_kind)
    q, v, log_f = (x.astype(dtype) for x in (q, v, log_f))
    k = _tied_keys(log_f) if k is None else k.astype(dtype)
    f = applied_decay(jnp.exp(log_f), starts, padding)
    return *(filled(x, padding, 0) for x in (q, k, v)), f


@jax.custom_jvp
def _tied_keys(log_f):
    """Returns 1 - f, the keys if `k` is None."""
    return -jnp.expm1(log_f)


# JAX would compute f as (f - 1) + 1, which loses the digits of small decays.
_tied_keys.defjvps(lambda d, _, log_f: -d * jnp.exp(log_f))


def _chunk_outputs(state, q, k, v, f):
    """Returns the output of a group and the state after it.

    q, k, f: [B, N, H, K]; v: [B, N, H, V]; state: [B, H, K, V].
    """
    size = min(CHUNK, q.shape[1])
    q, k, v, f = (chunked(x, Plan(1, x.shape[1] // size, size)) for x in (q, k, v, f))
    levels, from_start, to_end = decay_products(f)
    total = from_start[..., -1, :, None]
    before, state = states(total, product(transposed(k * to_end), v), state)
    output = product(q * from_start, before) + product(weights_of_pairs(q, k, levels), v)
    return unchunked(output), state
