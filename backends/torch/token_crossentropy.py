"""loss = log Σ_v exp(logits_v) - logits_token.

For the backward pass the logits are kept in their own dtype, with the largest logit and the sum of
each row. Only some rows at a time are cast, so nothing of the logits' size is made but their
gradient.
"""

import torch
from torch import Tensor

from ._common import accumulation_dtype, elements_per_launch, register_gradient


def token_crossentropy(logits, tokens):
    """logits: [..., V]; tokens: [...], integers.

    Returns [...] in float32, or float64 if logits are float64; NaN for a token not in 0..V-1.
    """
    return _forward(logits, tokens)[0]


def _rows(logits, tokens):
    """logits [N, V]; the index of each token's logit, [N, 1]; which tokens have none, [N, 1]."""
    size = logits.shape[-1]
    tokens = tokens.reshape(-1, 1).long()
    unknown = (tokens < 0) | (tokens >= size)
    return logits.reshape(-1, size), tokens.masked_fill(unknown, 0), unknown


def _blocks(logits):
    """Slices of rows with `elements_per_launch` elements each."""
    rows, size = logits.shape
    step = max(1, elements_per_launch(logits) // size)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


@torch.library.custom_op("keras_recurrent::token_crossentropy", mutates_args=())
def _forward(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the losses; the largest of each row, and the sum of exp(logits - largest)."""
    dtype, shape = accumulation_dtype(logits), tokens.shape
    logits, own, unknown = _rows(logits, tokens)
    largest = logits.amax(-1, keepdim=True).to(dtype)
    total = torch.empty_like(largest)
    for rows in _blocks(logits):
        exponentials = (logits[rows] - largest[rows]).exp_()
        torch.sum(exponentials, -1, keepdim=True, out=total[rows])
    losses = total.log() + (largest - logits.gather(-1, own))
    losses.masked_fill_(unknown, float("nan"))
    return losses.view(shape), largest.view(shape), total.view(shape)


@_forward.register_fake
def _(logits, tokens):
    dtype = accumulation_dtype(logits)
    losses, largest, total = (logits.new_empty(tokens.shape, dtype=dtype) for _ in range(3))
    return losses, largest, total


@torch.library.custom_op("keras_recurrent::token_crossentropy_backward", mutates_args=())
def _backward(
    d_losses: Tensor, largest: Tensor, total: Tensor, logits: Tensor, tokens: Tensor
) -> Tensor:
    d_logits = logits.new_empty(logits.shape)
    logits, own, unknown = _rows(logits, tokens)
    d_losses, largest, total = (x.reshape(-1, 1) for x in (d_losses, largest, total))
    d_losses = d_losses.masked_fill(unknown, float("nan"))
    results = d_logits.view(logits.shape)
    for rows in _blocks(logits):
        softmax = (logits[rows] - largest[rows]).exp_().div_(total[rows])
        softmax.scatter_add_(-1, own[rows], softmax.new_full(own[rows].shape, -1))
        torch.mul(softmax, d_losses[rows], out=results[rows])
    return d_logits


@_backward.register_fake
def _(d_losses, largest, total, logits, tokens):
    return logits.new_empty(logits.shape)


register_gradient(
    _forward,
    _backward,
    ("b t v", "b t"),
    ("b t", "b t", "b t"),
    channels="",
    keep_output=False,
    sums=2,
)
