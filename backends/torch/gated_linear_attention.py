"""S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head."""

import torch

from ._linear_attention import (
    between_halves,
    decay_products,
    halves,
    inner_products,
    kernel,
    scan_states_,
)


def _weights(q, k, decays):
    """a_us for s <= u, [..., C, C]."""
    weights = torch.diag_embed((q * k).sum(-1))
    for level in decays[0]:
        _, _, q_b, k_b = _to_boundary(q, k, *level)
        between_halves(weights, k_b.shape[-2]).copy_(q_b @ k_b.mT)
    return weights


def _to_boundary(q, k, from_boundary, to_boundary):
    """q of right halves and k of left halves, as they are and with their decays."""
    half = from_boundary.shape[-2]
    q_right, k_left = halves(q, half)[1], halves(k, half)[0]
    return q_right, k_left, q_right * from_boundary, k_left * to_boundary


def _gradient(q, k, v, decays, state, d_output, g, is_constant):
    """Gradients of q, k, v, log f and the state before a group; g: that of the state after it.

    In each channel, the gradient of log f_t is the sum of products q_u f_{s+1} ... f_u k_s da_us
    that contain f_t, for all pairs s < t <= u. Pairs with a boundary between s and u add a sum over
    later u to each f after the boundary, and a sum over earlier s to each f before it. Nothing is
    subtracted, so the result is as exact as the gradients of q and k.
    """
    levels, from_start, to_end = decays
    q_in, k_out = q * from_start, k * to_end
    before, after = k_out.mT @ v, q_in.mT @ d_output
    scan_states_(from_start, before, state)
    d_state = scan_states_(from_start, after, g, reverse=True)

    d_v = k_out @ after
    d_q = (d_output @ before.mT).mul_(from_start)
    d_k = (v @ after.mT).mul_(to_end)
    # Terms of the gradient of log f: `crossing` applies to every token of a block, `later` to its
    # token and those before it in the block, `earlier` to those after it.
    crossing = before.mul_(after).sum(-1).mul_(from_start[..., -1, :]).unsqueeze(-2)
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


gated_linear_attention = kernel("gated_linear_attention", decay_products, _weights, _gradient)
