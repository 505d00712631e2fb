"""losses = log Σ_v exp(z_v) - z_token of the logits z = x E^T, perhaps capped, c tanh(x E^T / c).

The tokens go through the vocabulary some at a time, so that there are never the logits of all. The
gradients of a sum are known but for one factor once the logits are, so they are made with it where
they are asked for; those of single losses make the logits once more.
"""

import functools

import torch
from torch import Tensor

from . import _common
from ._autograd import register_autograd

_dtype = _common.accumulation_dtype

# How many numbers there are at a time of logits, in the dtype of sums, and of their gradient, in
# that of x: 1 and 2 gigabytes of float32 and bfloat16. For each piece of the gradient, that of the
# embedding is read and written in float32, which few tokens would not be worth.
LOGITS, GRADIENTS = 2**28, 2**30


def piece(z, weights, tokens, cap, dtype, d_z):
    """What some tokens' logits z [N, V] become, whose memory it may take.

    cap: 0 for none. dtype: that of gradients. d_z: gets the gradient of the sum of the losses by
    weights, or what remains of it without a factor a row; None for no gradient.
    Returns the losses and the best tokens [N], and these factors [N], or None for none.
    """
    if cap:
        z = z.div_(cap).tanh_().mul_(cap)
    own = tokens[:, None]
    unknown = (own < 0) | (own >= z.shape[1])
    own = own.masked_fill(unknown, 0)
    largest, best = z.max(-1, keepdim=True)
    own_logit = z.gather(-1, own)
    slope = 1 - (z / cap).square_() if cap and d_z is not None else None
    exponentials = z.sub_(largest).exp_()
    total = exponentials.sum(-1, keepdim=True)
    losses = total.log() + (largest - own_logit)
    losses = losses.masked_fill_(unknown, float("nan"))[:, 0]
    if d_z is None:
        return losses, best[:, 0], None
    softmax = exponentials.div_(total)
    softmax.scatter_add_(-1, own, softmax.new_full(own.shape, -1))
    softmax.mul_(weights[:, None].masked_fill(unknown, float("nan")))
    if slope is not None:
        softmax.mul_(slope)
    d_z.copy_(softmax)
    return losses, best[:, 0], None


def _walk(piece, x, embedding, weights, tokens, cap, gradients):
    """The losses, their best tokens and, if wanted, the gradients of x and embedding by weights."""
    count, vocabulary = len(x), len(embedding)
    losses, best = torch.empty_like(weights), torch.empty_like(tokens, dtype=torch.int32)
    dtype, factors = torch.promote_types(x.dtype, embedding.dtype), torch.empty_like(weights)

    def through_vocabulary(rows, d_z):
        """Whether `factors` of these rows are needed. A function, so that its logits are freed."""
        z = _product(x[rows], embedding.T, weights.dtype)
        given = z, weights[rows], tokens[rows], cap, dtype, d_z
        losses[rows], best[rows], of_rows = piece(*given)
        if of_rows is not None:
            factors[rows] = of_rows
        return of_rows is not None

    if not gradients:
        for rows in _pieces(0, count, LOGITS // vocabulary):
            through_vocabulary(rows, None)
        return losses, best, x.new_empty(0), embedding.new_empty(0)
    d_x, d_embedding = torch.empty_like(x), None
    size = GRADIENTS // vocabulary
    d_z = x.new_empty((min(max(1, size), count), vocabulary), dtype=dtype)
    for rows in _pieces(0, count, size):
        x_rows, of_rows = x[rows], d_z[: rows.stop - rows.start]
        for part in _pieces(rows.start, rows.stop, LOGITS // vocabulary):
            place = slice(part.start - rows.start, part.stop - rows.start)
            lacks_factors = through_vocabulary(part, of_rows[place])
        d_rows = _product(of_rows, embedding, weights.dtype)
        if lacks_factors:
            d_rows *= factors[rows, None]
            x_rows = (x_rows * factors[rows, None]).to(x.dtype)
        d_x[rows] = d_rows
        if d_embedding is None:
            d_embedding = _product(of_rows.T, x_rows, weights.dtype)
        else:
            _add_product(d_embedding, of_rows.T, x_rows)
    if d_embedding is None:
        d_embedding = torch.zeros_like(embedding)
    return losses, best, d_x, d_embedding.to(embedding.dtype)


def _pieces(start, stop, size):
    """Slices of so many tokens, at least one; of many, a number that matrix products like."""
    size = max(1, size if size < 128 else size - size % 128)
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def _product(a, b, dtype):
    """a b, summed in `dtype` and not rounded to that of a and b."""
    if a.dtype == b.dtype == dtype:
        return a @ b
    if a.is_cuda and a.dtype == b.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _add_product(total, a, b):
    """total + a b, in place, as `_product`."""
    if a.dtype == b.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and a.dtype == b.dtype and _adds_to_float32(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += _product(a, b, total.dtype)


@functools.cache
def _adds_to_float32(device, dtype):
    """Whether torch adds a product of 16 bits to float32: 2.8 adds it to 16 bits alone."""
    a = torch.zeros(8, 8, device=device, dtype=dtype)
    try:
        torch.addmm(a.float(), a, a, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


def operation(name, piece):
    """The differentiable operation that makes losses of logits by `piece`.

    name: of its custom operators.
    """
    walk = functools.partial(_walk, piece)

    @torch.library.custom_op(f"keras_recurrent::{name}", mutates_args=())
    def of_sum(
        x: Tensor, embedding: Tensor, weights: Tensor, tokens: Tensor, cap: float, gradients: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns the sum, the best tokens, and what the backward takes: losses and gradients."""
        losses, best, *found = walk(x, embedding, weights, tokens, cap, gradients)
        return (losses * weights).sum(), best, losses, *found

    @of_sum.register_fake
    def _(x, embedding, weights, tokens, cap, gradients):
        found = (torch.empty_like(t) if gradients else t.new_empty(0) for t in (x, embedding))
        best = torch.empty_like(tokens, dtype=torch.int32)
        return weights.new_empty(()), best, torch.empty_like(weights), *found

    @torch.library.custom_op(f"keras_recurrent::{name}_backward", mutates_args=())
    def times(
        d_loss: Tensor, losses: Tensor, d_x: Tensor, d_embedding: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return (
            (d_x * d_loss).to(d_x.dtype),
            (d_embedding * d_loss).to(d_embedding.dtype),
            losses * d_loss,
        )

    @times.register_fake
    def _(d_loss, losses, d_x, d_embedding):
        return torch.empty_like(d_x), torch.empty_like(d_embedding), torch.empty_like(losses)

    def save_gradients(ctx, inputs, output):
        _, best, *found = output
        ctx.mark_non_differentiable(best, *found)
        ctx.set_materialize_grads(False)  # else autograd fills zeros of the embedding's size
        ctx.save_for_backward(*found)

    def gradients_of_sum(ctx, d_loss, *_):
        return *times(d_loss, *ctx.saved_tensors), None, None, None

    register_autograd(of_sum, gradients_of_sum, save_gradients, times)

    @torch.library.custom_op(f"keras_recurrent::{name}_each", mutates_args=())
    def of_each(
        x: Tensor, embedding: Tensor, weights: Tensor, tokens: Tensor, cap: float
    ) -> tuple[Tensor, Tensor]:
        losses, best, *_ = walk(x, embedding, weights, tokens, cap, False)
        return losses * weights, best

    @of_each.register_fake
    def _(x, embedding, weights, tokens, cap):
        return torch.empty_like(weights), torch.empty_like(tokens, dtype=torch.int32)

    @torch.library.custom_op(f"keras_recurrent::{name}_each_backward", mutates_args=())
    def gradients_of(
        d_losses: Tensor,
        x: Tensor,
        embedding: Tensor,
        weights: Tensor,
        tokens: Tensor,
        cap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses, _, *found = walk(x, embedding, weights * d_losses, tokens, cap, True)
        return *found, losses * d_losses

    @gradients_of.register_fake
    def _(d_losses, x, embedding, weights, tokens, cap):
        return torch.empty_like(x), torch.empty_like(embedding), torch.empty_like(weights)

    def save(ctx, inputs, output):
        *tensors, ctx.cap = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors)

    def gradients_of_each(ctx, d_losses, _):
        return *gradients_of(d_losses, *ctx.saved_tensors, ctx.cap), None, None

    register_autograd(of_each, gradients_of_each, save, gradients_of)

    def linear_crossentropy(
        x, embedding, tokens, sample_weight=None, soft_cap=None, reduction="sum"
    ):
        """x: [..., D]; embedding: [V, D]; tokens, sample_weight: [...].

        Returns (losses times their weights, [...] or their sum, in float32, or float64 if a tensor
        is; the token of the largest logit, int32 [...]).
        """
        shape = tokens.shape
        weights = torch.ones_like(tokens, dtype=_dtype(x, embedding))
        if sample_weight is not None:
            weights = sample_weight.to(_dtype(x, embedding, sample_weight))
            tokens = tokens.masked_fill(weights == 0, 0)
        tokens = tokens.reshape(-1).long()
        given = x.reshape(-1, x.shape[-1]), embedding, weights.reshape(-1), tokens
        cap = 0.0 if soft_cap is None else float(soft_cap)
        if reduction == "sum":
            differentiated = torch.is_grad_enabled() and any(
                map(_common.is_differentiated, given[:3])
            )
            loss, best, *_ = of_sum(*given, cap, differentiated)
            return loss, best.view(shape)
        losses, best = of_each(*given, cap)
        return losses.view(shape), best.view(shape)

    return linear_crossentropy


linear_crossentropy = operation("linear_crossentropy", piece)
