"""y_t = bias + sum_j kernel[j] * x_{t-W+1+j}: one filter a channel, over a document's real tokens.

De et al. 2024, arXiv:2402.19427, section 2.3 (the temporal convolution before the recurrence).

Padding may be anywhere in a sequence, and the filter skips it. So the real tokens are first moved
to the front, after the W - 1 tokens of the state, and padding to the end. Then the filter is a sum
of shifted slices, one for each tap, masked to inputs of the same document. The gradient goes back
through the same slices. The argument of the activation is recomputed.
"""

import torch

from ._circular_buffer import move, take
from ._common import (
    accumulation_dtype,
    filled,
    fresh,
    kernel_over_time,
    slope_of_gated,
    spans,
    state_or_zeros,
    step_masks,
    total_,
    where,
)
from ._real_tokens import RealTokens


def _step(x, kernel, bias, initial_state, token_kind, activation):
    dtype = accumulation_dtype(x, kernel, bias, initial_state)
    starts, padding = step_masks(token_kind, 3)
    taps = kernel.shape[0] - 1
    before = state_or_zeros(initial_state, (x.shape[0], taps, x.shape[2]), dtype, x)
    x_or_zero = where(padding, 0.0, x.to(dtype))
    inputs = torch.cat((where(starts, 0.0, before), x_or_zero), dim=1)
    y = (inputs * kernel.to(dtype)).sum(1, keepdim=True)
    y = y if bias is None else y + bias
    y = torch.nn.functional.silu(y) if activation == "silu" else y
    return y.to(x.dtype), where(padding, before, inputs[:, 1:])


class _Documents(RealTokens):
    """Real tokens and their documents; indices include the W - 1 inputs of the state.

    Attributes:
        input_document: [B, W - 1 + T], the number of documents started up to each index.
        last: [B, W - 1], the indices of the last inputs, which are the final state.
        outdated: [B, W - 1], mask of the last inputs that belong to an earlier document.
    """

    def __init__(self, token_kind, taps):
        super().__init__(token_kind)
        self.input_document = torch.nn.functional.pad(self.document, (taps, 0))
        self.last = self.count + torch.arange(taps, device=token_kind.device)
        num_started = self.starts.sum(1, keepdim=True)
        self.outdated = self.input_document.gather(1, self.last) != num_started


def _documents(token_kind, taps):
    return None if token_kind is None else _Documents(token_kind, taps)


def _tap_views(inputs, span, taps):
    """Views of `_inputs`, or of their documents, for each tap of a span of outputs."""
    return inputs[:, span.start : span.stop + taps].unfold(1, taps + 1, 1).unbind(-1)


def _other_documents(tokens, span, taps):
    """Masks, for each tap, of the inputs of an earlier document; None if there is no such input."""
    if tokens is None:
        return [None] * (taps + 1)
    *earlier, own = _tap_views(tokens.input_document, span, taps)
    return [*(document != own for document in earlier), None]


def _inputs(x, initial_state, tokens, taps, dtype):
    """[B, W - 1 + T, D]: the state, then the real tokens, then zeros."""
    state = state_or_zeros(initial_state, (x.shape[0], taps, x.shape[2]), dtype, x)
    if tokens is not None:
        x = tokens.to_front(x)
    return torch.cat((state, x.to(dtype)), dim=1)


def _filtered(inputs, weights, bias, others, out=None):
    """The convolution of a span, before any activation; inputs, weights and masks are by tap."""
    *earlier, (x, weight, _) = zip(inputs, weights, others, strict=True)
    z = torch.mul(x, weight, out=out)
    for x, weight, other in earlier:
        z.addcmul_(filled(x, other, 0), weight)
    return z if bias is None else z.add_(bias)


def _forward(x, kernel, bias, initial_state, token_kind, activation):
    dtype = accumulation_dtype(x, kernel, bias, initial_state)
    length, taps = x.shape[1], kernel.shape[0] - 1
    tokens = _documents(token_kind, taps)
    inputs = _inputs(x, initial_state, tokens, taps, dtype)
    weights = kernel.to(dtype).unbind()

    y = inputs.new_empty(x.shape)
    for span in spans(x):
        x_taps, others = _tap_views(inputs, span, taps), _other_documents(tokens, span, taps)
        y_b = _filtered(x_taps, weights, bias, others, out=y[:, span])
        if activation == "silu":
            torch.nn.functional.silu(y_b, inplace=True)
    y = y.to(x.dtype)
    if tokens is None:
        return y, fresh(inputs[:, length:], dtype)
    return move(y, tokens.target), take(inputs, tokens.last, ~tokens.outdated)


def _backward(x, kernel, bias, initial_state, token_kind, output, dy, d_state, activation):
    dtype = accumulation_dtype(x, kernel, bias, initial_state)
    length, taps = x.shape[1], kernel.shape[0] - 1
    tokens = _documents(token_kind, taps)
    inputs = _inputs(x, initial_state, tokens, taps, dtype)
    weights = kernel.to(dtype).unbind()
    d_inputs = torch.zeros_like(inputs)
    if tokens is None:
        d_inputs[:, length:] = d_state
    else:
        dy = tokens.to_front(dy)
        last = tokens.last[:, :, None].expand_as(d_state)
        d_inputs.scatter_(1, last, filled(d_state, tokens.outdated, 0))

    d_weights, d_bias = [], []
    for span in spans(x):
        dz_b, x_taps = dy[:, span].to(dtype), _tap_views(inputs, span, taps)
        others = _other_documents(tokens, span, taps)
        if activation == "silu":
            z_b = _filtered(x_taps, weights, bias, others)
            dz_b = slope_of_gated(torch.sigmoid(z_b), z_b, z_b).mul_(dz_b)
        d_bias.append(dz_b.sum((0, 1)))
        d_taps = []
        d_x_taps = _tap_views(d_inputs, span, taps)
        for x, d_x, weight, other in zip(x_taps, d_x_taps, weights, others, strict=True):
            d_tap = filled(dz_b, other, 0)
            d_x.addcmul_(d_tap, weight)
            d_taps.append((d_tap * x).sum((0, 1)))
        d_weights.append(torch.stack(d_taps))

    dx = d_inputs[:, taps:]
    dx = fresh(dx, x.dtype) if tokens is None else move(dx.to(x.dtype), tokens.target)
    return (
        dx,
        total_(d_weights).to(kernel.dtype),
        x.new_empty(0) if bias is None else total_(d_bias).to(bias.dtype),
        fresh(d_inputs[:, :taps], dtype),
    )


causal_conv1d = kernel_over_time(
    "causal_conv1d",
    _forward,
    _backward,
    lambda x, kernel, *_: (x.shape[0], kernel.shape[0] - 1, x.shape[2]),
    _step,
    keep_output=False,
    options={"activation": "str?"},
)
