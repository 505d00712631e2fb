"""losses = log Σ_v exp(z_v) - z_token of the logits z = x E^T, or with a cap c tanh(x E^T / c).

Logits are computed for one chunk of tokens at a time and never materialized for all. The gradients
of a sum are known up to one factor as soon as the logits are, so they are computed together if
requested; the gradients of single losses recompute the logits.
"""

import functools

import torch
from torch import Tensor

from . import _common
from ._autograd import register_autograd

_dtype = _common.accumulation_dtype

# Number of logits in a chunk, in the accumulation dtype, and of elements of their gradient, in the
# dtype of x: 1 and 2 gigabytes of float32 and bfloat16. Each chunk of the gradient reads and writes
# the gradient of the embedding in float32, a cost that small chunks would not amortize.
LOGITS, GRADIENTS = 2**28, 2**30


def chunk_losses(z, weights, tokens, cap, dtype, d_z):
    """Losses from logits z [N, V], whose memory may be reused.

    cap: 0 for none. dtype: of gradients. d_z: output buffer for the gradient of the weighted sum of
    the losses, up to a factor for each token; None for no gradient. Returns losses and predicted
    tokens [N], and these factors [N], or None if all are 1.
    """
    if cap:
        z = z.div_(cap).tanh_().mul_(cap)
    label = tokens[:, None]
    unknown = (label < 0) | (label >= z.shape[1])
    label = label.masked_fill(unknown, 0)
    largest, best = z.max(-1, keepdim=True)
    label_logit = z.gather(-1, label)
    slope = 1 - (z / cap).square_() if cap and d_z is not None else None
    exponentials = z.sub_(largest).exp_()
    total = exponentials.sum(-1, keepdim=True)
    losses = total.log() + (largest - label_logit)
    losses = losses.masked_fill_(unknown, float("nan"))[:, 0]
    if d_z is None:
        return losses, best[:, 0], None
    softmax = exponentials.div_(total)
    softmax.scatter_add_(-1, label, softmax.new_full(label.shape, -1))
    softmax.mul_(weights[:, None].masked_fill(unknown, float("nan")))
    if slope is not None:
        softmax.mul_(slope)
    d_z.copy_(softmax)
    return losses, best[:, 0], None


def _compute(chunk_losses, x, embedding, weights, tokens, cap, gradients):
    """Returns losses, predicted tokens and, if requested, gradients of x and embedding."""
    count, vocabulary = len(x), len(embedding)
    losses, best = torch.empty_like(weights), torch.empty_like(tokens, dtype=torch.int32)
    dtype, factors = torch.promote_types(x.dtype, embedding.dtype), torch.empty_like(weights)

    def compute_chunk(rows, d_z):
        """Returns True if `factors` apply. A function, so that its logits are freed."""
        z = _common.product(x[rows], embedding.T, weights.dtype)
        given = z, weights[rows], tokens[rows], cap, dtype, d_z
        losses[rows], best[rows], chunk_factors = chunk_losses(*given)
        if chunk_factors is not None:
            factors[rows] = chunk_factors
        return chunk_factors is not None

    if not gradients:
        for rows in _chunks(0, count, LOGITS // vocabulary):
            compute_chunk(rows, None)
        return losses, best, x.new_empty(0), embedding.new_empty(0)
    d_x, d_embedding = torch.empty_like(x), None
    size = GRADIENTS // vocabulary
    d_z = x.new_empty((min(max(1, size), count), vocabulary), dtype=dtype)
    for rows in _chunks(0, count, size):
        x_rows, d_z_rows = x[rows], d_z[: rows.stop - rows.start]
        for part in _chunks(rows.start, rows.stop, LOGITS // vocabulary):
            index = slice(part.start - rows.start, part.stop - rows.start)
            lacks_factors = compute_chunk(part, d_z_rows[index])
        d_rows = _common.product(d_z_rows, embedding, weights.dtype)
        if lacks_factors:
            d_rows *= factors[rows, None]
            x_rows = (x_rows * factors[rows, None]).to(x.dtype)
        d_x[rows] = d_rows
        if d_embedding is None:
            d_embedding = _common.product(d_z_rows.T, x_rows, weights.dtype)
        else:
            _add_product(d_embedding, d_z_rows.T, x_rows)
    if d_embedding is None:
        d_embedding = torch.zeros_like(embedding)
    return losses, best, d_x, d_embedding.to(embedding.dtype)


def _chunks(start, stop, size):
    """Slices of `size` tokens, at least one; large sizes are rounded for matrix products."""
    size = max(1, size if size < 128 else size - size % 128)
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def _add_product(total, a, b):
    """Adds `product` of a and b to `total`, in place."""
    if a.dtype == b.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and a.dtype == b.dtype and _supports_float32_addmm(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += _common.product(a, b, total.dtype)


@functools.cache
def _supports_float32_addmm(device, dtype):
    """Returns True if `addmm` adds 16-bit products to float32; torch 2.8 requires 16 bits."""
    a = torch.zeros(8, 8, device=device, dtype=dtype)
    try:
        torch.addmm(a.float(), a, a, out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


def _sum_operator(name, compute):
    """Registers the operator of summed losses, whose forward pass also computes gradients."""

    @torch.library.custom_op(f"keras_recurrent::{name}", mutates_args=())
    def summed(
        x: Tensor, embedding: Tensor, weights: Tensor, tokens: Tensor, cap: float, gradients: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns the sum, predicted tokens, and residuals: losses and gradients."""
        losses, best, *results = compute(x, embedding, weights, tokens, cap, gradients)
        return (losses * weights).sum(), best, losses, *results

    @summed.register_fake
    def _(x, embedding, weights, tokens, cap, gradients):
        results = (torch.empty_like(t) if gradients else t.new_empty(0) for t in (x, embedding))
        best = torch.empty_like(tokens, dtype=torch.int32)
        return weights.new_empty(()), best, torch.empty_like(weights), *results

    @torch.library.custom_op(f"keras_recurrent::{name}_backward", mutates_args=())
    def scale_gradients(
        d_loss: Tensor, losses: Tensor, d_x: Tensor, d_embedding: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return (
            (d_x * d_loss).to(d_x.dtype),
            (d_embedding * d_loss).to(d_embedding.dtype),
            losses * d_loss,
        )

    @scale_gradients.register_fake
    def _(d_loss, losses, d_x, d_embedding):
        return torch.empty_like(d_x), torch.empty_like(d_embedding), torch.empty_like(losses)

    def save_gradients(ctx, inputs, output):
        _, best, *results = output
        ctx.mark_non_differentiable(best, *results)
        ctx.set_materialize_grads(False)  # avoids zeros of the embedding's size
        ctx.save_for_backward(*results)

    def gradients_of_sum(ctx, d_loss, *_):
        return *scale_gradients(d_loss, *ctx.saved_tensors), None, None, None

    register_autograd(summed, gradients_of_sum, save_gradients, scale_gradients)
    return summed


def _single_operator(name, compute):
    """Registers the operator of single losses, whose gradient recomputes the logits."""

    @torch.library.custom_op(f"keras_recurrent::{name}_each", mutates_args=())
    def single(
        x: Tensor, embedding: Tensor, weights: Tensor, tokens: Tensor, cap: float
    ) -> tuple[Tensor, Tensor]:
        losses, best, *_ = compute(x, embedding, weights, tokens, cap, False)
        return losses * weights, best

    @single.register_fake
    def _(x, embedding, weights, tokens, cap):
        return torch.empty_like(weights), torch.empty_like(tokens, dtype=torch.int32)

    @torch.library.custom_op(f"keras_recurrent::{name}_each_backward", mutates_args=())
    def recompute_gradients(
        d_losses: Tensor,
        x: Tensor,
        embedding: Tensor,
        weights: Tensor,
        tokens: Tensor,
        cap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses, _, *results = compute(x, embedding, weights * d_losses, tokens, cap, True)
        return *results, losses * d_losses

    @recompute_gradients.register_fake
    def _(d_losses, x, embedding, weights, tokens, cap):
        return torch.empty_like(x), torch.empty_like(embedding), torch.empty_like(weights)

    def save(ctx, inputs, output):
        *tensors, ctx.cap = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors)

    def gradients_of_each(ctx, d_losses, _):
        return *recompute_gradients(d_losses, *ctx.saved_tensors, ctx.cap), None, None

    register_autograd(single, gradients_of_each, save, recompute_gradients)
    return single


def operation(name, chunk_losses):
    """Builds the operation that computes losses from logits with `chunk_losses`.

    name: string, prefix of its custom operators.
    """
    compute = functools.partial(_compute, chunk_losses)
    summed, single = _sum_operator(name, compute), _single_operator(name, compute)

    def linear_crossentropy(
        x, embedding, tokens, sample_weight=None, soft_cap=None, reduction="sum"
    ):
        """x: [..., D]; embedding: [V, D]; tokens, sample_weight: [...]."""
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
            loss, best, *_ = summed(*given, cap, differentiated)
            return loss, best.view(shape)
        losses, best = single(*given, cap)
        return losses.view(shape), best.view(shape)

    return linear_crossentropy


linear_crossentropy = operation("linear_crossentropy", chunk_losses)
