"""S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t, as in `backends/jax`."""

import torch

from ._common import (
    accumulation_dtype,
    applied_decay_,
    fill_,
    fresh,
    kernel_over_time,
    state_or_zeros,
    step_masks,
    where,
)
from ._linear_attention import (
    between_halves,
    chunk_size,
    chunked,
    chunked_kinds,
    decay_products,
    group_spans,
    halves,
    inner_products,
    state_shape,
    states_,
    step,
    unchunk_,
)

CHUNK = 64


def _step(q, k, v, log_f, initial_state, token_kind):
    dtype = accumulation_dtype(q, k, v, log_f, initial_state)
    starts, padding = step_masks(token_kind, 3)
    state = state_or_zeros(initial_state, state_shape(q, v), dtype, v)
    log_f = log_f[:, 0].to(dtype)
    k = log_f.expm1().neg() if k is None else k[:, 0].to(dtype)
    return step(q, k, v, where(starts, 0.0, log_f.exp()), state, padding)


def _forward(q, k, v, log_f, initial_state, token_kind):
    dtype = accumulation_dtype(q, k, v, log_f, initial_state)
    state = state_or_zeros(initial_state, state_shape(q, v), dtype, v)
    state = state.flatten(0, 1)
    output = v.new_empty(v.shape)
    size = chunk_size(q.shape[1], CHUNK)
    for span in group_spans(q, v, size):
        q_g, k_g, v_g, f = _prepared(q, k, v, log_f, token_kind, span, size, dtype)
        levels, from_start, to_end = decay_products(f)
        weights = _weights(q_g, k_g, levels)
        before = k_g.mul_(to_end).mT @ v_g
        state = states_(_total(from_start), before, state)
        unchunk_(output, span, q_g.mul_(from_start) @ before + weights @ v_g)
    return output, fresh(state.view(state_shape(q, v)), dtype)


def _backward(q, k, v, log_f, initial_state, token_kind, output, d_output, d_final_state):
    dtype = accumulation_dtype(q, k, v, log_f, initial_state)
    size = chunk_size(q.shape[1], CHUNK)
    groups = group_spans(q, v, size)
    state = state_or_zeros(initial_state, state_shape(q, v), dtype, v).flatten(0, 1)
    entering = [state]
    for span in groups[:-1]:
        _, k_g, v_g, f = _prepared(q, k, v, log_f, token_kind, span, size, dtype)
        _, from_start, to_end = decay_products(f)
        added = k_g.mul_(to_end).mT @ v_g
        entering.append(states_(_total(from_start), added, entering[-1]))

    g = d_final_state.flatten(0, 1)
    d_q, d_v, d_log_f = (x.new_empty(x.shape) for x in (q, v, log_f))
    d_k = q.new_empty(0) if k is None else k.new_empty(k.shape)
    for span in reversed(groups):
        inputs = _prepared(q, k, v, log_f, token_kind, span, size, dtype)
        _, padding = chunked_kinds(token_kind, span, size, q.shape[2])
        d_output_g = fill_(chunked(d_output, span, size, dtype), padding, 0)
        *found, g = _group_gradient(entering.pop(), d_output_g, g, *inputs)
        if k is None:
            _, d_k_g, _, d_log_f_g = found
            d_log_f_g.addcmul_(d_k_g, chunked(log_f, span, size, dtype).exp_(), value=-1)
        for whole, part in zip((d_q, d_k, d_v, d_log_f), found, strict=True):
            if whole.numel():
                unchunk_(whole, span, fill_(part, padding, 0))
    return d_q, d_k, d_v, d_log_f, fresh(g.view(d_final_state.shape), dtype)


gated_linear_attention = kernel_over_time(
    "gated_linear_attention",
    _forward,
    _backward,
    lambda q, k, v, *_: state_shape(q, v),
    _step,
    keep_output=False,
)


def _prepared(q, k, v, log_f, token_kind, span, size, dtype):
    """q, k, v and f of a span, in chunks; at padding 0, 0, 0 and 1; f is 0 at a start."""
    starts, padding = chunked_kinds(token_kind, span, size, q.shape[2])
    q, v, log_f = (chunked(x, span, size, dtype) for x in (q, v, log_f))
    k = torch.expm1(log_f).neg_() if k is None else chunked(k, span, size, dtype)
    f = applied_decay_(log_f.exp_(), starts, padding)
    return fill_(q, padding, 0), fill_(k, padding, 0), fill_(v, padding, 0), f


# Below, tensors are [B * H, chunks, C, K or V].


def _total(from_start):
    """The product of a chunk's decays, [..., K, 1], for its state [..., K, V]."""
    return from_start[..., -1, :, None]


def _weights(q, k, levels):
    """a_us for s <= u, [..., C, C]."""
    weights = torch.diag_embed((q * k).sum(-1))
    for level in levels:
        _, _, q_b, k_b = _to_boundary(q, k, *level)
        between_halves(weights, k_b.shape[-2]).copy_(q_b @ k_b.mT)
    return weights


def _to_boundary(q, k, from_boundary, to_boundary):
    """q of right halves and k of left halves, as they are and with their decays."""
    half = from_boundary.shape[-2]
    q_right, k_left = halves(q, half)[1], halves(k, half)[0]
    return q_right, k_left, q_right * from_boundary, k_left * to_boundary


def _group_gradient(state, d_output, g, q, k, v, f):
    """Gradients of q, k, v, log f and the state before a group; g: that of the state after it.

    In each channel, the gradient of log f_t is the sum of products q_u f_{s+1} ... f_u k_s da_us
    that contain f_t, for all pairs s < t <= u. Pairs with a boundary between s and u add a sum over
    later u to each f after the boundary, and a sum over earlier s to each f before it. Nothing is
    subtracted, so the result is as exact as the gradients of q and k.
    """
    levels, from_start, to_end = decay_products(f)
    total, q_in, k_out = _total(from_start), q * from_start, k * to_end
    before, after = k_out.mT @ v, q_in.mT @ d_output
    states_(total, before, state)
    d_state = states_(total, after, g, reverse=True)

    d_v = k_out @ after
    d_q = (d_output @ before.mT).mul_(from_start)
    d_k = (v @ after.mT).mul_(to_end)
    # Terms of the gradient of log f: `crossing` applies to every token of a block, `later` to its
    # token and those before it in the block, `earlier` to those after it.
    crossing = before.mul_(after).sum(-1).mul_(total.squeeze(-1)).unsqueeze(-2)
    later, earlier = q * d_q, k * d_k

    weights, d_weights = torch.diag_embed((q * k).sum(-1)), inner_products(d_output, v)
    for from_boundary, to_boundary in reversed(levels):
        half = from_boundary.shape[-2]
        q_right, k_left, q_b, k_b = _to_boundary(q, k, from_boundary, to_boundary)
        between_halves(weights, half).copy_(q_b @ k_b.mT)
        d_between = between_halves(d_weights, half)
        d_right = (d_between @ k_b).mul_(from_boundary)
        d_left = (d_between.mT @ q_b).mul_(to_boundary)
        halves(d_q, half)[1].add_(d_right)
        halves(d_k, half)[0].add_(d_left)

        later_right, earlier_left = halves(later, half)[1], halves(earlier, half)[0]
        beyond = torch.stack((later_right.sum(-2), earlier_left.sum(-2)), dim=-2)
        crossing = (crossing.unsqueeze(-2) + beyond).flatten(-3, -2)
        later_right.addcmul_(q_right, d_right)
        earlier_left.addcmul_(k_left, d_left)

    d_v.add_(weights.mT @ d_output)
    # Weights of a token and itself have no decay.
    d_own = d_weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    d_q.addcmul_(d_own, k)
    d_k.addcmul_(d_own, q)
    return d_q, d_k, d_v, later.add_(crossing), d_state
