"""S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t, as in `backends/jax`."""

import torch

from ._common import (
    accumulation_dtype,
    applied_decay_,
    fill_,
    fresh,
    kernel_over_time,
    kind_masks,
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
    inner_products,
    smallest_decay,
    state_shape,
    states_,
    step,
    sum_over_pairs,
    unchunk_,
)

CHUNK = 64


def one_token(q, k, v, log_decay, initial_state, token_kind):
    dtype = accumulation_dtype(q, k, v, log_decay, initial_state)
    starts, padding = step_masks(token_kind, 3)
    state = state_or_zeros(initial_state, state_shape(q, v), dtype, v)
    log_decay = log_decay[None] if log_decay.ndim == 1 else log_decay[:, 0]
    decay = where(starts, 0.0, log_decay.to(dtype).exp()[..., None])
    share = v.shape[2] // q.shape[2]
    if share > 1:
        q, k = (x.repeat_interleave(share, dim=2) for x in (q, k))
    return step(q, k[:, 0].to(dtype), v, decay, state, padding)


def forward(q, k, v, log_decay, initial_state, token_kind):
    dtype = accumulation_dtype(q, k, v, log_decay, initial_state)
    state = state_or_zeros(initial_state, state_shape(q, v), dtype, v).flatten(0, 1)
    output = v.new_empty(v.shape)
    for group in _chunk_groups(q, v, token_kind, dtype):
        q_g, k_g, v_g = group.load(q, k, v)
        between, from_start, to_end, total = group.decays(log_decay)
        output_g = _decayed(inner_products(q_g, k_g), between) @ v_g
        before = k_g.mT @ v_g.mul_(to_end)
        state = _states_(total, before, state)
        unchunk_(output, group.span, output_g.addcmul_(q_g @ before, from_start))
    return output, fresh(state.view(state_shape(q, v)), dtype)


def backward(q, k, v, log_decay, initial_state, token_kind, output, d_output, d_final_state):
    dtype = accumulation_dtype(q, k, v, log_decay, initial_state)
    state = state_or_zeros(initial_state, state_shape(q, v), dtype, v)
    groups, entering = _chunk_groups(q, v, token_kind, dtype), [state.flatten(0, 1)]
    for group in groups[:-1]:
        k_g, v_g = group.load(k, v)
        *_, to_end, total = group.decays(log_decay)
        entering.append(_states_(total, k_g.mT @ v_g.mul_(to_end), entering[-1]))

    g = d_final_state.flatten(0, 1)
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
    d_log_decay = torch.zeros_like(log_decay, memory_format=torch.contiguous_format)
    gradients = [d_q, d_k, d_v]
    if log_decay.ndim > 1:
        gradients.append(d_log_decay.unsqueeze(3))
    for group in reversed(groups):
        q_g, k_g, v_g, d_output_g = group.load(q, k, v, d_output)
        between, from_start, to_end, total = group.decays(log_decay)
        weights, d_weights = inner_products(q_g, k_g), inner_products(d_output_g, v_g)
        d_weights.mul_(between)
        pairs = weights * d_weights if log_decay.ndim > 1 else None
        d_v_g = _decayed(weights, between).mT @ d_output_g
        d_weights = _sum_over_heads(d_weights)
        d_q_g, d_k_g = d_weights @ k_g, d_weights.mT @ q_g

        v_out, d_in = v_g.mul_(to_end), d_output_g.mul_(from_start)
        before, after = k_g.mT @ v_out, q_g.mT @ d_in
        _states_(total, before, entering.pop())
        g = _states_(total, after, g, reverse=True)
        from_after = k_g @ after
        d_v_g.addcmul_(from_after, to_end)
        d_q_g.add_(_sum_over_heads(d_in @ before.mT))
        d_k_g.add_(_sum_over_heads(v_out @ after.mT))
        found = [d_q_g, d_k_g, d_v_g]
        if pairs is not None:
            to_later = (q_g @ before).mul_(d_in).sum(-1, keepdim=True)
            from_earlier = from_after.mul_(v_out).sum(-1, keepdim=True)
            through = before.mul_(after).sum((-2, -1), keepdim=True).mul_(total)
            found.append(sum_over_pairs(pairs, to_later, from_earlier).add_(through))
        for whole, part in zip(gradients, found, strict=True):
            unchunk_(whole, group.span, part)
    _, padding = kind_masks(token_kind)
    for d in gradients:
        fill_(d, padding, 0)
    return d_q, d_k, d_v, d_log_decay, fresh(g.view(d_final_state.shape), dtype)


def kernel(operation):
    """Returns the `Kernel` of `scalar_decay_attention`, or `lightning_attention` for decays [H]."""
    return kernel_over_time(
        operation,
        forward,
        backward,
        lambda q, k, v, *_: state_shape(q, v),
        one_token,
        keep_output=False,
    )


scalar_decay_attention = kernel("scalar_decay_attention")


def _chunk_groups(q, v, token_kind, dtype):
    size, powers = chunk_size(q.shape[1], CHUNK), []
    spans = group_spans(q, v, size)
    return [_ChunkGroup(span, size, q, v, token_kind, dtype, powers) for span in spans]


class _ChunkGroup:
    """Chunks that are computed together.

    Their tensors are [B * G, heads of a group, chunks, C, K or V]. If the heads of a group share a
    tensor, its axis for heads has size 1.
    """

    def __init__(self, span, size, q, v, token_kind, dtype, powers):
        """powers: a list that caches constant decays for all groups of full chunks."""
        self.span, self.size, self.dtype, self.device = span, size, dtype, v.device
        self.groups, self.batch = q.shape[0] * q.shape[2], q.shape[0]
        self.kinds = {
            heads: chunked_kinds(token_kind, span, size, heads)
            for heads in {q.shape[2], v.shape[2]}
        }
        tokens = span.stop - span.start
        self.powers = powers if token_kind is None and tokens % size == 0 else None

    def load(self, *tensors):
        """Tensors with zeros at padding."""
        return [self._load(x, self.kinds[x.shape[2]][1]) for x in tensors]

    def _load(self, x, padding):
        x = fill_(chunked(x, self.span, self.size, self.dtype), padding, 0)
        return x.view(self.groups, -1, *x.shape[1:])

    def decays(self, log_decay):
        """Decays in chunks: from s to u, from the start, to the end, and in total.

        The shapes are [..., C, C], [..., C, 1], [..., C, 1] and [..., 1, 1].
        """
        if log_decay.ndim == 1:
            if self.powers is None:
                return self._powers(log_decay)
            if not self.powers:
                self.powers.append(self._powers(log_decay))
            return self.powers[0]
        decay = self._load(log_decay.unsqueeze(3), None).exp_().flatten(0, 1)
        decay = applied_decay_(decay, *self.kinds[log_decay.shape[2]])
        levels, from_start, to_end = decay_products(decay.view(self.groups, -1, *decay.shape[1:]))
        between = torch.eye(self.size, dtype=self.dtype, device=self.device)
        between = between.repeat(*from_start.shape[:3], 1, 1)
        for from_boundary, to_boundary in levels:
            block = between_halves(between, from_boundary.shape[-2])
            block.copy_(from_boundary * to_boundary.mT)
        return between, from_start, to_end, from_start[..., -1:, :]

    def _powers(self, log_decay):
        """Powers of a constant decay, with numbers of real tokens as exponents."""
        starts, padding = self.kinds[log_decay.shape[0]]
        log_decay = log_decay.to(self.dtype).repeat(self.batch)
        log_decay = log_decay.view(self.groups, -1, 1, 1, 1)
        tokens = self.span.stop - self.span.start
        # One chunk represents all chunks if their decays are equal.
        last = self.size if self.powers is not None else -(-tokens // self.size) * self.size
        index = torch.arange(1, last + 1, device=self.device).view(1, 1, -1, self.size, 1)
        real = index <= tokens
        if padding is None:
            starts = torch.zeros_like(real)
        else:
            starts, padding = (x.view(self.groups, -1, *x.shape[1:]) for x in (starts, padding))
            real = real & ~padding
        count, document = real.cumsum(-2), starts.cumsum(-2)

        def power(steps, reaches):
            # 0 * log_decay would be NaN for a decay of 0.
            logarithm = torch.mul(steps, log_decay).masked_fill_(steps == 0, 0)
            least = smallest_decay(self.dtype)
            return torch.threshold_(logarithm.exp_(), least, 0).masked_fill_(~reaches, 0)

        whole, last = count[..., -1:, :], document[..., -1:, :]
        earlier = index >= index.mT
        return (
            power((count - count.mT).abs_(), earlier & (document == document.mT)),
            power(count, document == 0),
            power(whole - count, document == last),
            power(whole, last == 0),
        )


def _states_(decay, added, first, reverse=False):
    return states_(decay.flatten(0, 1), added.flatten(0, 1), first, reverse)


def _sum_over_heads(x):
    return x if x.shape[1] == 1 else x.sum(1, keepdim=True)


def _decayed(weights, between):
    """Weights times their decays, computed in place unless heads share the weights."""
    return weights.mul_(between) if weights.shape[1] == between.shape[1] else weights * between
