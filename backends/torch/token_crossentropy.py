"""loss = log Σ_v exp(logits_v) - logits_token.

Residuals are the logits in their own dtype, and the largest logit and the sum of each token. Logits
are cast block by block, so that only their gradient is allocated at their size.
"""

import torch
from torch import Tensor

from ._common import accumulation_dtype, elements_per_launch, register_gradient


def token_crossentropy(logits, tokens):
    """logits: [..., V]; tokens: [...], integers.

    Returns [...] in float32, or float64 if logits are float64; NaN for a token not in 0..V-1.
    """
    return _forward(logits, tokens)[0]


def _flatten(logits, tokens):
    """Flat logits [N, V], indices of the labels [N, 1], and a mask of invalid tokens [N, 1]."""
    size = logits.shape[-1]
    tokens = tokens.reshape(-1, 1).long()
    unknown = (tokens < 0) | (tokens >= size)
    return logits.reshape(-1, size), tokens.masked_fill(unknown, 0), unknown


def _blocks(logits):
    """Slices of tokens with `elements_per_launch` logits each."""
    rows, size = logits.shape
    step = max(1, elements_per_launch(logits) // size)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


@torch.library.custom_op("keras_recurrent::token_crossentropy", mutates_args=())
def _forward(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns losses, the largest logit of each token, and the sum of exp(logits - largest)."""
    dtype, shape = accumulation_dtype(logits), tokens.shape
    logits, labels, unknown = _flatten(logits, tokens)
    largest = logits.amax(-1, keepdim=True).to(dtype)
    total = torch.empty_like(largest)
    for rows in _blocks(logits):
        exponentials = (logits[rows] - largest[rows]).exp_()
        torch.sum(exponentials, -1, keepdim=True, out=total[rows])
    losses = total.log() + (largest - logits.gather(-1, labels))
    losses.masked_fill_(unknown, float("nan"))
    return losses.view(shape), largest.view(shape), total.view(shape)


@_forward.register_fake
def _(logits, tokens):
    dtype = accumulation_dtype(logits)
    losses, largest, total = (logits.new_empty(tokens.shape, dtype=dtype) for _ in range(3))
    return losses, largest, total


@torch.library.custom_op("keras_recurrent::token_crossentropy_backward", mutates_args=())
def _backward(
    logits: Tensor,
    tokens: Tensor,
    output: Tensor | None,
    largest: Tensor,
    total: Tensor,
    d_losses: Tensor,
) -> Tensor:
    d_logits = logits.new_empty(logits.shape)
    logits, labels, unknown = _flatten(logits, tokens)
    d_losses, largest, total = (x.reshape(-1, 1) for x in (d_losses, largest, total))
    d_losses = d_losses.masked_fill(unknown, float("nan"))
    results = d_logits.view(logits.shape)
    for rows in _blocks(logits):
        softmax = (logits[rows] - largest[rows]).exp_().div_(total[rows])
        softmax.scatter_add_(-1, labels[rows], softmax.new_full(labels[rows].shape, -1))
        torch.mul(softmax, d_losses[rows], out=results[rows])
    return d_logits


@_backward.register_fake
def _(logits, *_):
    return logits.new_empty(logits.shape)


register_gradient(
    "token_crossentropy", _forward, _backward, keep_output=False, residuals=("...", "...")
)
