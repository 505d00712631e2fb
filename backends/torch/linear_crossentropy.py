"""losses = log Σ_v exp(z_v) - z_token of the logits z = x E^T, perhaps capped, c tanh(x E^T / c).

The tokens go through the vocabulary some at a time, so that there are never the logits of all. The
gradients of a sum are known but for one factor once the logits are, so they are made with it where
they are asked for; those of single losses make the logits once more.
"""

import torch
from torch import Tensor

from keras_recurrent.backends.constants import TOKENS_OF_A_PIECE
from keras_recurrent.backends.torch import _common
from keras_recurrent.backends.torch._autograd import register_autograd


def linear_crossentropy(x, embedding, tokens, sample_weight=None, soft_cap=None, reduction="sum"):
    """x: [..., D]; embedding: [V, D]; tokens, sample_weight: [...].

    Returns (losses times their weights, [...] or their sum, in float32, or float64 if a tensor is;
    the token of the largest logit, int32 [...]).
    """
    shape = tokens.shape
    weights = torch.ones_like(tokens, dtype=_dtype(x, embedding))
    if sample_weight is not None:
        weights = sample_weight.to(_dtype(x, embedding, sample_weight))
        tokens = tokens.masked_fill(weights == 0, 0)
    given = x.reshape(-1, x.shape[-1]), embedding, weights.reshape(-1), tokens.reshape(-1).long()
    cap = 0.0 if soft_cap is None else float(soft_cap)
    if reduction == "sum":
        differentiated = torch.is_grad_enabled() and any(map(_common.is_differentiated, given[:3]))
        loss, best, *_ = _sum(*given, cap, differentiated)
        return loss, best.view(shape)
    losses, best = _each(*given, cap)
    return losses.view(shape), best.view(shape)


_dtype = _common.accumulation_dtype


def _walk(x, embedding, weights, tokens, cap, gradients):
    """The losses, their best tokens and, if wanted, the gradients of x and embedding by weights."""
    losses, best = torch.empty_like(weights), torch.empty_like(tokens, dtype=torch.int32)
    d_x = torch.empty_like(x) if gradients else x.new_empty(0)
    d_embedding = embedding.new_zeros(embedding.shape if gradients else 0, dtype=weights.dtype)
    for start in range(0, len(x), TOKENS_OF_A_PIECE):
        rows = slice(start, start + TOKENS_OF_A_PIECE)
        z = _product(x[rows], embedding.T, weights.dtype)
        if cap:
            z = z.div_(cap).tanh_().mul_(cap)
        own = tokens[rows, None]
        unknown = (own < 0) | (own >= len(embedding))
        own = own.masked_fill(unknown, 0)
        largest, best_of_rows = z.max(-1, keepdim=True)
        best[rows] = best_of_rows[:, 0]
        own_logit = z.gather(-1, own)
        slope = 1 - (z / cap).square_() if cap and gradients else None
        exponentials = z.sub_(largest).exp_()
        total = exponentials.sum(-1, keepdim=True)
        of_rows = total.log() + (largest - own_logit)
        losses[rows] = of_rows.masked_fill_(unknown, float("nan"))[:, 0]
        if not gradients:
            continue
        d_z = exponentials.div_(total)
        d_z.scatter_add_(-1, own, d_z.new_full(own.shape, -1))
        d_z.mul_(weights[rows, None].masked_fill(unknown, float("nan")))
        if slope is not None:
            d_z.mul_(slope)
        d_z = d_z.to(torch.promote_types(x.dtype, embedding.dtype))
        d_x[rows] = _product(d_z, embedding, weights.dtype).to(x.dtype)
        d_embedding += _product(d_z.T, x[rows], weights.dtype)
    return losses, best, d_x, d_embedding.to(embedding.dtype)


def _product(a, b, dtype):
    """a b, summed in `dtype` and not rounded to that of a and b."""
    if a.dtype == b.dtype == dtype:
        return a @ b
    if a.is_cuda and a.dtype == b.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


@torch.library.custom_op("keras_recurrent::linear_crossentropy", mutates_args=())
def _sum(
    x: Tensor, embedding: Tensor, weights: Tensor, tokens: Tensor, cap: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the sum, the best tokens, and what the backward takes: losses and gradients."""
    losses, best, *found = _walk(x, embedding, weights, tokens, cap, gradients)
    return (losses * weights).sum(), best, losses, *found


@_sum.register_fake
def _(x, embedding, weights, tokens, cap, gradients):
    found = (torch.empty_like(t) if gradients else t.new_empty(0) for t in (x, embedding))
    best = torch.empty_like(tokens, dtype=torch.int32)
    return weights.new_empty(()), best, torch.empty_like(weights), *found


@torch.library.custom_op("keras_recurrent::linear_crossentropy_backward", mutates_args=())
def _times(
    d_loss: Tensor, losses: Tensor, d_x: Tensor, d_embedding: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        (d_x * d_loss).to(d_x.dtype),
        (d_embedding * d_loss).to(d_embedding.dtype),
        losses * d_loss,
    )


@_times.register_fake
def _(d_loss, losses, d_x, d_embedding):
    return torch.empty_like(d_x), torch.empty_like(d_embedding), torch.empty_like(losses)


def _save_gradients(ctx, inputs, output):
    _, best, *found = output
    ctx.mark_non_differentiable(best, *found)
    ctx.save_for_backward(*found)


def _gradients_of_sum(ctx, d_loss, *_):
    return *_times(d_loss, *ctx.saved_tensors), None, None, None


register_autograd(_sum, _gradients_of_sum, _save_gradients, _times)


@torch.library.custom_op("keras_recurrent::linear_crossentropy_each", mutates_args=())
def _each(
    x: Tensor, embedding: Tensor, weights: Tensor, tokens: Tensor, cap: float
) -> tuple[Tensor, Tensor]:
    losses, best, *_ = _walk(x, embedding, weights, tokens, cap, False)
    return losses * weights, best


@_each.register_fake
def _(x, embedding, weights, tokens, cap):
    return torch.empty_like(weights), torch.empty_like(tokens, dtype=torch.int32)


@torch.library.custom_op("keras_recurrent::linear_crossentropy_each_backward", mutates_args=())
def _gradients(
    d_losses: Tensor,
    x: Tensor,
    embedding: Tensor,
    weights: Tensor,
    tokens: Tensor,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    losses, _, *found = _walk(x, embedding, weights * d_losses, tokens, cap, True)
    return *found, losses * d_losses


@_gradients.register_fake
def _(d_losses, x, embedding, weights, tokens, cap):
    return torch.empty_like(x), torch.empty_like(embedding), torch.empty_like(weights)


def _save(ctx, inputs, output):
    *tensors, ctx.cap = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors)


def _gradients_of_each(ctx, d_losses, _):
    return *_gradients(d_losses, *ctx.saved_tensors, ctx.cap), None, None


register_autograd(_each, _gradients_of_each, _save, _gradients)
