"""S_t = diag(exp(log_f_t)) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  in every head.

Qin et al. 2024, arXiv:2404.07904, section 3 (HGRN2, where k_t = 1 - exp(log_f_t)); Yang et al.
2023, arXiv:2312.06635, section 4 (gated linear attention).

Between chunks the state carries what was seen. Inside a chunk, token u meets an earlier s with the
weight a_us = sum_k q_u f_{s+1} ... f_u k_s; for a matrix product the decays must be shared out
between q_u and k_s. So the chunk is halved again and again: where u lies in a right half and s in
the left half beside it, q_u takes the decays from the boundary to u, and k_s those from s to the
boundary. Only products of decays are formed, never quotients, which makes any decay safe; neither
0 nor a restart, which is one, needs a case of its own.
"""

import torch
from torch import Tensor

from keras_recurrent.backends.torch._common import (
    accumulation_dtype,
    fill_,
    fresh,
    register_gradient,
    state_or_zeros,
)
from keras_recurrent.backends.torch._linear_attention import (
    chunk_size,
    chunked,
    chunked_kinds,
    groups_of,
    inner_products,
    state_shape,
    states_,
    unchunk_,
)

_CHUNK = 64


def gated_linear_attention(q, k, v, log_f, initial_state=None, token_kind=None):
    """q, k, log_f: [B, T, H, K]; v: [B, T, H, V]; log_f <= 0; k None: 1 - exp(log_f).

    Returns ([B, T, H, V] in v's dtype, [B, H, K, V] in float32, or float64 if an argument is
    float64).
    """
    return _forward(q, k, v, log_f, initial_state, token_kind)


@torch.library.custom_op("keras_recurrent::gated_linear_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    log_f: Tensor,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(q, k, v, log_f, initial_state)
    state = state_or_zeros(initial_state, state_shape(q, v), v, dtype)
    if q.shape[1] == 1:
        return _one_token(q, k, v, log_f, state, token_kind)
    state = state.flatten(0, 1)
    output = v.new_empty(v.shape)
    size = chunk_size(q.shape[1], _CHUNK)
    for rows in groups_of(q, v, size):
        q_g, k_g, v_g, f = _prepared(q, k, v, log_f, token_kind, rows, size, dtype)
        levels, from_start, to_end = _decays(f)
        weights = _weights(q_g, k_g, levels)
        before = k_g.mul_(to_end).mT @ v_g
        state = states_(_total(from_start), before, state)
        unchunk_(output, rows, q_g.mul_(from_start) @ before + weights @ v_g)
    return output, fresh(state.view(state_shape(q, v)), dtype)


@_forward.register_fake
def _(q, k, v, log_f, initial_state, token_kind):
    dtype = accumulation_dtype(q, k, v, log_f, initial_state)
    return v.new_empty(v.shape), v.new_empty(state_shape(q, v), dtype=dtype)


def _one_token(q, k, v, log_f, state, token_kind):
    q, k, w, f = _prepared(q, k, v, log_f, token_kind, slice(None), 1, state.dtype)
    q, k, f = (x.view(*state.shape[:3], 1) for x in (q, k, f))
    state = (k * w.view(*state.shape[:2], 1, -1)).addcmul_(f, state)
    return (q * state).sum(2).unsqueeze(1).to(v.dtype), state


@torch.library.custom_op("keras_recurrent::gated_linear_attention_backward", mutates_args=())
def _backward(
    d_output: Tensor,
    d_final_state: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    log_f: Tensor,
    initial_state: Tensor | None,
    token_kind: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(q, k, v, log_f, initial_state)
    size = chunk_size(q.shape[1], _CHUNK)
    groups = groups_of(q, v, size)
    state = state_or_zeros(initial_state, state_shape(q, v), v, dtype).flatten(0, 1)
    entering = [state]
    for rows in groups[:-1]:
        _, k_g, v_g, f = _prepared(q, k, v, log_f, token_kind, rows, size, dtype)
        _, from_start, to_end = _decays(f)
        added = k_g.mul_(to_end).mT @ v_g
        entering.append(states_(_total(from_start), added, entering[-1]))

    g = d_final_state.flatten(0, 1)
    d_q, d_v, d_log_f = (x.new_empty(x.shape) for x in (q, v, log_f))
    d_k = q.new_empty(0) if k is None else k.new_empty(k.shape)
    for rows in reversed(groups):
        inputs = _prepared(q, k, v, log_f, token_kind, rows, size, dtype)
        d_output_g = chunked(d_output, rows, size, dtype)
        *found, g = _group_gradient(entering.pop(), d_output_g, g, *inputs)
        if k is None:
            _, d_k_g, _, d_log_f_g = found
            d_log_f_g.addcmul_(d_k_g, chunked(log_f, rows, size, dtype).exp_(), value=-1)
        _, padding = chunked_kinds(token_kind, rows, size, q.shape[2])
        for whole, part in zip((d_q, d_k, d_v, d_log_f), found, strict=True):
            if whole.numel():
                unchunk_(whole, rows, fill_(part, padding, 0))
    return d_q, d_k, d_v, d_log_f, fresh(g.view(d_final_state.shape), dtype)


@_backward.register_fake
def _(d_output, d_final_state, q, k, v, log_f, initial_state, token_kind):
    return (
        q.new_empty(q.shape),
        q.new_empty(0) if k is None else k.new_empty(k.shape),
        v.new_empty(v.shape),
        log_f.new_empty(log_f.shape),
        d_final_state.new_empty(d_final_state.shape),
    )


register_gradient(_forward, _backward, keep_output=False)


def _prepared(q, k, v, log_f, token_kind, rows, size, dtype):
    """q, k, v and f of some rows, in chunks: at padding 0, 0, 0 and 1; f is 0 at a restart."""
    restart, padding = chunked_kinds(token_kind, rows, size, q.shape[2])
    q, v, log_f = (chunked(x, rows, size, dtype) for x in (q, v, log_f))
    k = torch.expm1(log_f).neg_() if k is None else chunked(k, rows, size, dtype)
    f = fill_(fill_(log_f.exp_(), restart, 0), padding, 1)
    return fill_(q, padding, 0), fill_(k, padding, 0), fill_(v, padding, 0), f


# Below, tensors are [B * H, chunks, C, K or V].


def _decays(f):
    """Products of decays, for halves of 1, 2, 4 ... tokens and for the chunk.

    Returns [(those from the boundary to u, for the right halves, those from s to the boundary, for
    the left ones), ...], and those from the start of the chunk and to its end. A product from s is
    without f_s, as s itself is not decayed any more.
    """
    from_start, to_end = f, torch.ones_like(f)
    # Nothing beside what one token brings. Left as it is, it would meet its like in numbers so
    # small that a CPU takes several times as long over them.
    negligible = torch.finfo(f.dtype).tiny ** 0.5
    levels, half = [], 1
    while half < f.shape[-2]:
        p_left, p_right = _halves(from_start, half)
        s_left, _ = _halves(to_end, half)
        levels.append((p_right.clone(), s_left.clone()))
        torch.threshold_(s_left.mul_(p_right[..., -1:, :]), negligible, 0)
        torch.threshold_(p_right.mul_(p_left[..., -1:, :]), negligible, 0)
        half *= 2
    return levels, from_start, to_end


def _total(from_start):
    """The product of a chunk's decays, beside its state: [..., K, 1]."""
    return from_start[..., -1, :, None]


def _halves(x, half):
    """Views of the left and the right halves, [..., C / (2 half), half, K], of x: [..., C, K]."""
    return x.unflatten(-2, (-1, 2, half)).unbind(-3)


def _meeting(weights, half):
    """A view of where right halves meet the left ones: [..., C / (2 half), half, half]."""
    blocks = weights.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))
    return blocks[..., :, 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _weights(q, k, levels):
    """a_us for s <= u, [..., C, C]."""
    weights = torch.diag_embed((q * k).sum(-1))
    for from_boundary, to_boundary in levels:
        half = from_boundary.shape[-2]
        (k_left, _), (_, q_right) = _halves(k, half), _halves(q, half)
        _meeting(weights, half).copy_((q_right * from_boundary) @ (k_left * to_boundary).mT)
    return weights


def _group_gradient(state, d_output, g, q, k, v, f):
    """Gradients of q, k, v and log f of a group, and of the state before it; g: of that after it.

    The gradient of log f_t is the sum, over all pairs s < t <= u that it stands between, of what
    they gain from each other. The pairs that meet at a boundary give each f between the boundary
    and u a sum over later u, and each f between s and the boundary a sum over earlier s: nothing
    is subtracted, so that it is as exact as the gradients of q and k.
    """
    levels, from_start, to_end = _decays(f)
    total, q_in, k_out = _total(from_start), q * from_start, k * to_end
    before, after = k_out.mT @ v, q_in.mT @ d_output
    states_(total, before, state)
    d_state = states_(total, after, g, reverse=True)

    d_v = (k_out @ after).add_(_weights(q, k, levels).mT @ d_output)
    d_q = (d_output @ before.mT).mul_(from_start)
    d_k = (v @ after.mT).mul_(to_end)
    # Of log f: `crossing` belongs to every token of a block, `later` also to the tokens before its
    # own in the block, `earlier` to those after its own.
    crossing = before.mul_(after).sum(-1).mul_(total.squeeze(-1)).unsqueeze(-2)
    later, earlier = q * d_q, k * d_k

    d_weights = inner_products(d_output, v)
    for from_boundary, to_boundary in reversed(levels):
        half = from_boundary.shape[-2]
        (k_left, _), (_, q_right) = _halves(k, half), _halves(q, half)
        d_meeting = _meeting(d_weights, half)
        d_right = (d_meeting @ (k_left * to_boundary)).mul_(from_boundary)
        d_left = (d_meeting.mT @ (q_right * from_boundary)).mul_(to_boundary)
        _halves(d_q, half)[1].add_(d_right)
        _halves(d_k, half)[0].add_(d_left)

        later_right, earlier_left = _halves(later, half)[1], _halves(earlier, half)[0]
        beyond = torch.stack((later_right.sum(-2), earlier_left.sum(-2)), dim=-2)
        crossing = (crossing.unsqueeze(-2) + beyond).flatten(-3, -2)
        later_right.addcmul_(q_right, d_right)
        earlier_left.addcmul_(k_left, d_left)

    d_own = d_weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # no decay is between
    d_q.addcmul_(d_own, k)
    d_k.addcmul_(d_own, q)
    return d_q, d_k, d_v, later.add_(crossing), d_state
