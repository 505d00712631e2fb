"""S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head."""

import torch

from . import _linear_attention
from ._linear_attention import between_halves, decay_products, inner_products, scan_states_


def _decays(f):
    """The products of f between two tokens, [..., C, C]; from the start, and to the end."""
    levels, from_start, to_end = decay_products(f)
    between = torch.diag_embed(torch.ones_like(f[..., 0]))
    for from_boundary, to_boundary in levels:
        block = between_halves(between, from_boundary.shape[-2])
        block.copy_(from_boundary * to_boundary.mT)
    return between, from_start, to_end


def _weights(q, k, decays):
    """a_us for s <= u, [..., C, C]."""
    weights, between = inner_products(q, k), decays[0]
    # Computed in place unless heads share the weights.
    return weights.mul_(between) if weights.shape[1] == between.shape[1] else weights * between


def _gradient(q, k, v, decays, state, d_output, g, is_constant):
    """Gradients of q, k, v, log f and the state before a group; g: that of the state after it.

    The gradient of log f_t is the sum of the terms of the loss that contain f_t: of pairs of tokens
    s < t <= u in a chunk, of the state before the chunk, and of the state after it. Nothing is
    subtracted, so the result is as exact as the other gradients.
    """
    between, from_start, to_end = decays
    weights, d_weights = _weights(q, k, decays), inner_products(d_output, v)
    d_v, d_log_f, later = weights.mT @ d_output, None, torch.ones_like(between[0, 0, 0]).triu()
    if not is_constant:
        d_log_f = (later @ (weights * d_weights)).tril_(-1).sum(-1, keepdim=True)
    d_weights = _sum_over_heads(d_weights.mul_(between), q)
    d_q, d_k = d_weights @ k, d_weights.mT @ q

    v_out, d_in = v.mul_(to_end), d_output.mul_(from_start)
    before, after = k.mT @ v_out, q.mT @ d_in
    scan_states_(from_start, before, state)
    d_state = scan_states_(from_start, after, g, reverse=True)
    from_after = k @ after
    d_v.addcmul_(from_after, to_end)
    d_q.add_(_sum_over_heads(d_in @ before.mT, q))
    d_k.add_(_sum_over_heads(v_out @ after.mT, k))
    if d_log_f is not None:
        d_log_f.add_(later @ (q @ before).mul_(d_in).sum(-1, keepdim=True))
        d_log_f.add_((1 - later) @ from_after.mul_(v_out).sum(-1, keepdim=True))
        through = before.mul_(after).sum((-2, -1), keepdim=True).mul_(from_start[..., -1:, :])
        d_log_f.add_(through)
    return d_q, d_k, d_v, d_log_f, d_state


def _sum_over_heads(x, shared):
    return x if x.shape[1] == shared.shape[1] else x.sum(1, keepdim=True)


def kernel(operation):
    """Returns the `Kernel` of `scalar_decay_attention`, or `lightning_attention` for decays [H]."""
    return _linear_attention.kernel(operation, _decays, _weights, _gradient)


scalar_decay_attention = kernel("scalar_decay_attention")
