"""Linear attention in chunks, and groups of chunks.

`keras_recurrent/portable/_linear_attention.py` explains the halves of a chunk. The temporaries of a
group fit the cache, and do not grow with the sequence length.
"""

from typing import Any

import torch

from ._common import (
    accumulation_dtype,
    applied_decay_,
    elements_per_launch,
    fill_,
    fresh,
    kernel_over_time,
    kind_masks,
    state_or_zeros,
    step_masks,
    where,
)

LONGEST_CHUNK = 64


def kernel(operation, make_decays, weights, gradient):
    """Returns the `Kernel` of S_t = f_t S_{t-1} + k_t v_t^T, o_t = S_t^T q_t, in every head.

    The functions take tensors of a group of chunks, [B G, H / G, chunks, C, K or V]. H / G heads
    share q and k, whose second axis has size 1.

    Args:
        make_decays: a function of f that returns a tuple `decays`: the decays between tokens, and
            the products of f from the start of a chunk and to its end.
        weights: a function `(q, k, decays)` that returns the weights of values, [..., C, C].
        gradient: a function `(q, k, v, decays, state, d_output, g, is_constant)` that returns the
            gradients of q, k, v, log f and the state before the group; g is the gradient of the
            state after it. It may overwrite tensors other than `decays`. The gradient of log f is
            not read if f is constant.
    """

    def forward(q, k, v, log_decay, initial_state, token_kind):
        groups = _Groups(make_decays, q, k, v, log_decay, initial_state, token_kind)
        state, output = groups.initial_state, v.new_empty(v.shape)
        for span in groups.spans:
            (q_g, k_g, v_g), decays = groups.load(span)
            output_g = weights(q_g, k_g, decays) @ v_g
            before, state = _states_(k_g, v_g, decays, state)
            groups.unchunk_(output, span, _add_from_states_(output_g, q_g, decays, before))
        return output, fresh(state.view(_state_shape(q, k, v)), groups.dtype)

    def backward(q, k, v, log_decay, initial_state, token_kind, output, d_output, d_final_state):
        groups = _Groups(make_decays, q, k, v, log_decay, initial_state, token_kind)
        entering = [groups.initial_state]
        for span in groups.spans[:-1]:
            (_, k_g, v_g), decays = groups.load(span)
            entering.append(_states_(k_g, v_g, decays, entering[-1])[1])

        g, is_constant = d_final_state.reshape(groups.initial_state.shape), log_decay.ndim == 1
        gradients = [
            q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, log_decay)
        ]
        for span in reversed(groups.spans):
            (q_g, k_g, v_g, d_output_g), decays = groups.load(span, d_output)
            state = entering.pop()
            *found, g = gradient(q_g, k_g, v_g, decays, state, d_output_g, g, is_constant)
            if k is None:
                found[3].addcmul_(found[1], groups.chunked(log_decay, span).exp_(), value=-1)
            for whole, part in zip(gradients, found, strict=True):
                if whole.ndim > 1:
                    groups.unchunk_(whole, span, part)
        _, padding = kind_masks(token_kind)
        for whole in gradients:
            whole.zero_() if whole.ndim == 1 else fill_(whole, padding, 0)
        return *gradients, fresh(g.view(d_final_state.shape), groups.dtype)

    return kernel_over_time(operation, forward, backward, _state_shape, _step, keep_output=False)


def _state_shape(q, k, v, *_):
    return q.shape[0], v.shape[2], q.shape[3], v.shape[3]


def _step(q, k, v, log_decay, initial_state, token_kind):
    """One token; its output at padding is 0."""
    dtype = accumulation_dtype(q, k, v, log_decay, initial_state)
    starts, padding = step_masks(token_kind, 3)
    state = state_or_zeros(initial_state, _state_shape(q, k, v), dtype, v)
    log_f = log_decay if log_decay.ndim == 1 else log_decay[:, 0]
    log_f = (log_f if log_decay.ndim == 4 else log_f.unsqueeze(-1)).to(dtype)
    q, w = (x[:, 0].to(dtype) for x in (q, v))
    k = log_f.expm1().neg() if k is None else k[:, 0].to(dtype)
    f = where(padding, 1.0, where(starts, 0.0, log_f.exp()))
    q, k, w = (where(padding, 0.0, x) for x in (q, k, w))
    share = w.shape[1] // q.shape[1]
    if share > 1:
        q, k = (x.repeat_interleave(share, dim=1) for x in (q, k))
    after = torch.addcmul(k.unsqueeze(3) * w.unsqueeze(2), f.unsqueeze(-1), state)
    output = (q.unsqueeze(3) * after).sum(2)
    return output.unsqueeze(1).to(v.dtype), after


class _Groups:
    """The tensors of a call in groups of chunks that are computed together.

    Attributes:
        spans: slices of the time axis, one for each group.
        initial_state: [B G, H / G, K, V].
        dtype: the dtype of accumulation.
    """

    def __init__(self, make_decays, q, k, v, log_decay, initial_state, token_kind):
        self.make_decays, self.tensors, self.token_kind = make_decays, (q, k, v), token_kind
        self.dtype = accumulation_dtype(q, k, v, log_decay, initial_state)
        batch, length, self.heads, _ = q.shape
        self.rows = batch * self.heads
        state = state_or_zeros(initial_state, _state_shape(q, k, v), self.dtype, v)
        self.initial_state = state.reshape(self.rows, -1, *state.shape[2:])
        # If f is constant, all whole chunks without starts and padding have the decays of one.
        self.is_uniform = log_decay.ndim == 1 and token_kind is None
        self.uniform_decays: Any = None
        self.log_decay = log_decay.expand(batch, length, -1) if log_decay.ndim == 1 else log_decay

        self.size = min(LONGEST_CHUNK, 1 << (length - 1).bit_length())
        chunk = self.size * max(q[:, 0].numel(), v[:, 0].numel())
        step = self.size * max(1, 2 * elements_per_launch(q) // chunk)
        self.spans = [slice(i, min(i + step, length)) for i in range(0, length, step)]

    def load(self, span, *others):
        """Returns q, k, v and other tensors of a span, with zeros at padding; and the decays."""
        starts, padding = None, None
        if self.token_kind is not None:
            kind = self.token_kind.unsqueeze(2).expand(-1, -1, self.heads)
            starts, padding = kind_masks(self.chunked(kind, span, kind.dtype))
        tensors = [
            torch.expm1(self.chunked(self.log_decay, span)).neg_()
            if x is None
            else self.chunked(x, span)
            for x in (*self.tensors, *others)
        ]
        tensors = [fill_(x, padding, 0) for x in tensors]
        is_uniform = self.is_uniform and (span.stop - span.start) % self.size == 0
        if is_uniform and self.uniform_decays is not None:
            return tensors, self.uniform_decays
        f = self.chunked(self.log_decay, slice(self.size) if is_uniform else span).exp_()
        decays = self.make_decays(applied_decay_(f, starts, padding))
        if is_uniform:
            self.uniform_decays = decays
        return tensors, decays

    def chunked(self, x, span, dtype=None):
        """A span of x [B, T, H, K] as [B G, H / G, chunks, C, K], with zeros at the end.

        K is 1 for x [B, T, H].
        """
        x = (x if x.ndim == 4 else x.unsqueeze(3))[:, span]
        batch, length, heads, width = x.shape
        chunks = -(-length // self.size)
        out = x.new_empty(
            (batch, heads, chunks * self.size, width), dtype=self.dtype if dtype is None else dtype
        )
        out[:, :, :length] = x.transpose(1, 2)
        if length < chunks * self.size:
            out[:, :, length:] = 0
        return out.view(self.rows, -1, chunks, self.size, width)

    def unchunk_(self, out, span, y):
        """Writes y into a span of out [B, T, H, K] or [B, T, H]; inverts `chunked`."""
        out = (out if out.ndim == 4 else out.unsqueeze(3))[:, span].transpose(1, 2)
        batch, heads, length, width = out.shape
        out.copy_(y.view(batch, heads, -1, width)[:, :, :length])


def inner_products(a, b):
    """a b^T, summed in blocks of 64 terms, which reduces the rounding error."""
    parts = zip(a.split(64, -1), b.split(64, -1), strict=True)
    return sum(a_i @ b_i.mT for a_i, b_i in parts)


def _states_(k, v, decays, first):
    """Returns the states before each chunk, starting from `first`, and the last state.

    It overwrites k, or v if the channels of a head have one decay.
    """
    _, from_start, to_end = decays
    added = k.mT @ v.mul_(to_end) if to_end.shape[-1] == 1 else k.mul_(to_end).mT @ v
    return added, scan_states_(from_start, added, first)


def _add_from_states_(output, q, decays, before):
    """Adds to the output of each chunk what q reads from the state before it; may overwrite q."""
    from_start = decays[1]
    if from_start.shape[-1] == 1:
        return output.addcmul_(q @ before, from_start)
    return output.add_(q.mul_(from_start) @ before)


def scan_states_(from_start, added, first, reverse=False):
    """S' = f_1 ... f_C S + added, chunk by chunk, starting from the last if `reverse`.

    from_start: [..., chunks, C, K or 1], the products of f from the start of each chunk.
    added: [..., chunks, K, V], replaced by the states before each chunk.
    first: [..., K, V]. Returns the last state.
    """
    total = from_start[..., -1, :, None].expand(*added.shape[:-2], -1, 1)
    order = list(zip(total.unbind(-3), added.unbind(-3), strict=True))
    for decay, added_n in reversed(order) if reverse else order:
        after = torch.addcmul(added_n, decay, first)
        added_n.copy_(first)
        first = after
    return first


def decay_products(f):
    """`(levels, from_start, to_end)`, as in `keras_recurrent/portable/_linear_attention.py`."""
    from_start, to_end = f, torch.ones_like(f)
    # CPUs are several times slower with subnormal numbers. Decays are therefore set to 0 below
    # 1e-32, a million times the smallest normal number of float32; decays of right and left halves,
    # which are multiplied with each other, below 1e-19. Contributions between two tokens that are
    # scaled by 1e-19 may be lost. Contributions of the state are not, because its decays are only
    # multiplied with inputs.
    tiny = torch.finfo(f.dtype).tiny
    least, least_of_two = tiny * 2**20, tiny**0.5
    levels, half = [], 1
    while half < f.shape[-2]:
        p_left, p_right = halves(from_start, half)
        s_left, _ = halves(to_end, half)
        levels.append([torch.threshold(x, least_of_two, 0) for x in (p_right, s_left)])
        torch.threshold_(s_left.mul_(p_right[..., -1:, :]), least, 0)
        torch.threshold_(p_right.mul_(p_left[..., -1:, :]), least, 0)
        half *= 2
    return levels, from_start, to_end


def halves(x, half):
    """Views of the left and the right halves, [..., C / (2 half), half, K], of x: [..., C, K]."""
    return x.unflatten(-2, (-1, 2, half)).unbind(-3)


def between_halves(weights, half):
    """A view of the weights between right and left halves: [..., C / (2 half), half, half]."""
    blocks = weights.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))
    return blocks[..., :, 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
