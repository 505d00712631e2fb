"""S_t = exp(log_decay) S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t, as in `backends/jax`."""

import torch

from ._common import (
    accumulation_dtype,
    fill_,
    fresh,
    kernel_over_time,
    kind_masks,
    state_or_zeros,
    step_masks,
    where,
)
from ._linear_attention import (
    chunk_size,
    chunked,
    chunked_kinds,
    group_spans,
    inner_products,
    smallest_decay,
    state_shape,
    states_,
    step,
    unchunk_,
)

CHUNK = 64


def _step(q, k, v, log_decay, initial_state, token_kind):
    dtype = accumulation_dtype(q, k, v, log_decay, initial_state)
    starts, padding = step_masks(token_kind, 3)
    state = state_or_zeros(initial_state, state_shape(q, v), dtype, v)
    decay = where(starts, 0.0, log_decay.to(dtype).exp()[None, :, None])
    return step(q, k[:, 0].to(dtype), v, decay, state, padding)


def _forward(q, k, v, log_decay, initial_state, token_kind):
    dtype = accumulation_dtype(q, k, v, log_decay, initial_state)
    state = state_or_zeros(initial_state, state_shape(q, v), dtype, v)
    output = v.new_empty(v.shape)
    final_state = _write_output(output, q, k, v, log_decay, state.flatten(0, 1), token_kind)
    return output, fresh(final_state.view(state.shape), dtype)


def _write_output(output, q, k, v, log_decay, state, token_kind):
    """Writes the output and returns the final state [B * H, K, V]."""
    size = chunk_size(q.shape[1], CHUNK)
    for span in group_spans(q, v, size):
        kinds = chunked_kinds(token_kind, span, size, q.shape[2])
        between, from_start, to_end, total = _decays(log_decay, q, kinds, span, size, state.dtype)
        q_g, k_g, v_g = _prepared((q, k, v), kinds, span, size, state.dtype)
        output_g = inner_products(q_g, k_g).mul_(between) @ v_g
        before = k_g.mul_(to_end).mT @ v_g
        state = states_(total, before, state)
        unchunk_(output, span, output_g.add_(q_g.mul_(from_start) @ before))
    return state


def _backward(d_output, d_final_state, q, k, v, log_decay, initial_state, token_kind):
    dtype = accumulation_dtype(q, k, v, log_decay, initial_state)
    state = state_or_zeros(initial_state, state_shape(q, v), dtype, v).flatten(0, 1)
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in (q, k, v))
    # The gradient of q is this operation on other tensors, those of k and v are the same in
    # reverse.
    _write_output(d_q, d_output, v, k, log_decay, state.mT, token_kind)

    g = d_final_state.flatten(0, 1)
    size = chunk_size(q.shape[1], CHUNK)
    for span in reversed(group_spans(q, v, size)):
        kinds = chunked_kinds(token_kind, span, size, q.shape[2])
        between, from_start, to_end, total = _decays(log_decay, q, kinds, span, size, dtype)
        q_g, k_g, v_g, d_output_g = _prepared((q, k, v, d_output), kinds, span, size, dtype)
        d_k_g = inner_products(d_output_g, v_g).mul_(between).mT @ q_g
        d_v_g = inner_products(q_g, k_g).mul_(between).mT @ d_output_g
        after = q_g.mul_(from_start).mT @ d_output_g
        g = states_(total, after, g, reverse=True)
        d_k_g.addcmul_(v_g @ after.mT, to_end)
        d_v_g.add_(k_g.mul_(to_end) @ after)
        unchunk_(d_k, span, d_k_g)
        unchunk_(d_v, span, d_v_g)
    _, padding = kind_masks(token_kind)
    for d in (d_q, d_k, d_v):
        fill_(d, padding, 0)
    return d_q, d_k, d_v, torch.zeros_like(log_decay), fresh(g.view(d_final_state.shape), dtype)


lightning_attention = kernel_over_time(
    "lightning_attention",
    _forward,
    _backward,
    lambda q, k, v, *_: state_shape(q, v),
    _step,
    keep_output=False,
)


def _prepared(tensors, kinds, span, size, dtype):
    """Tensors of a span in chunks, [B * H, chunks, C, K], with zeros at padding."""
    _, padding = kinds
    return [fill_(chunked(x, span, size, dtype), padding, 0) for x in tensors]


def _decays(log_decay, q, kinds, span, size, dtype):
    """The decays of a group: from s to u, from the start of a chunk, to its end, and in total.

    [B * H, chunks, C, C], twice [B * H, chunks, C, 1] and [B * H, chunks, 1, 1].
    """
    log_decay = log_decay.to(dtype).repeat(q.shape[0])[:, None, None, None]
    tokens = span.stop - span.start
    all_alike = kinds[0] is None and tokens % size == 0  # one chunk then represents all
    last = size if all_alike else -(-tokens // size) * size
    index = torch.arange(1, last + 1, device=q.device).view(1, -1, size, 1)
    starts, padding = kinds
    real = index <= tokens
    if padding is None:
        starts = torch.zeros_like(real)
    else:
        real = real & ~padding
    count, document = real.cumsum(-2), starts.cumsum(-2)

    def decay(steps, reaches):
        # Not 0 * log_decay: that is NaN if the decay is 0.
        logarithm = torch.mul(steps, log_decay).masked_fill_(steps == 0, 0)
        least = smallest_decay(dtype)
        return torch.threshold_(logarithm.exp_(), least, 0).masked_fill_(~reaches, 0)

    whole, last = count[..., -1:, :], document[..., -1:, :]
    earlier = index >= index.mT
    return (
        decay((count - count.mT).abs_(), earlier & (document == document.mT)),
        decay(count, document == 0),
        decay(whole - count, document == last),
        decay(whole, last == 0),
    )
