"""losses = log Σ_v exp(z_v) - z_token of the logits z = x E^T, perhaps capped, c tanh(x E^T / c).

The tokens go through the vocabulary some at a time, so that there are never the logits of all. The
gradients of a sum are known but for one factor once the logits are, so they are made with it;
those of single losses make the logits once more.
"""

import functools
import math

import jax
import jax.numpy as jnp

from keras_recurrent.backends.constants import TOKENS_OF_A_PIECE
from keras_recurrent.backends.jax._common import accumulation_dtype


@functools.partial(jax.jit, static_argnames=("soft_cap", "reduction"))
def linear_crossentropy(x, embedding, tokens, sample_weight=None, soft_cap=None, reduction="sum"):
    """x: [..., D]; embedding: [V, D]; tokens, sample_weight: [...].

    Returns (losses times their weights, [...] or their sum, in float32, or float64 if a tensor is;
    the token of the largest logit, int32 [...]).
    """
    dtype = accumulation_dtype(x, embedding, sample_weight)
    if sample_weight is None:
        weights = jnp.ones(tokens.shape, dtype)
    else:
        weights = sample_weight.astype(dtype)
        tokens = jnp.where(weights == 0, 0, tokens)
    of = _sum if reduction == "sum" else _each
    return of(soft_cap, x, embedding, weights, tokens.astype(int))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(soft_cap, x, embedding, weights, tokens):
    losses, best = _walk(soft_cap, x, embedding, weights, tokens)
    return jnp.sum(weights * losses), best


def _sum_and_gradients(soft_cap, x, embedding, weights, tokens):
    losses, best, *gradients = _walk(soft_cap, x, embedding, weights, tokens, True)
    return (jnp.sum(weights * losses), best), (*gradients, losses)


def _times(soft_cap, gradients, d_results):
    d_loss, _ = d_results
    return *((d_loss * d.astype(d_loss.dtype)).astype(d.dtype) for d in gradients), None


_sum.defvjp(_sum_and_gradients, _times)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each(soft_cap, x, embedding, weights, tokens):
    losses, best = _walk(soft_cap, x, embedding, weights, tokens)
    return weights * losses, best


def _save(soft_cap, *tensors):
    return _each(soft_cap, *tensors), tensors


def _gradients(soft_cap, tensors, d_results):
    x, embedding, weights, tokens = tensors
    d_losses, _ = d_results
    losses, _, *gradients = _walk(soft_cap, x, embedding, weights * d_losses, tokens, True)
    return *gradients, losses * d_losses, None


_each.defvjp(_save, _gradients)


def _walk(soft_cap, x, embedding, weights, tokens, with_gradients=False):
    """The losses, their best tokens, and if wanted the gradients of x and embedding by `weights`.

    Time is cut and the batch is not: devices may each have some of its rows.
    """
    shape, width = tokens.shape, x.shape[-1]
    length = shape[-1] if shape else 1
    batch = math.prod(shape[:-1])
    size = min(length, max(1, TOKENS_OF_A_PIECE // max(1, batch)))
    count = -(-length // max(1, size))

    def cut(array, *rest):
        array = array.reshape(batch, length, *rest)
        array = jnp.pad(array, [(0, 0), (0, count * size - length)] + [(0, 0)] * len(rest))
        return jnp.moveaxis(array.reshape(batch, count, size, *rest), 1, 0)

    def joined(array, *rest):
        array = jnp.moveaxis(array, 0, 1).reshape(batch, count * size, *rest)
        return array[:, :length].reshape(*shape, *rest)

    def step(d_embedding, piece):
        *found, d_more = _piece(soft_cap, embedding, piece, with_gradients)
        return d_embedding + d_more if with_gradients else None, found

    zeros = jnp.zeros(embedding.shape, weights.dtype) if with_gradients else None
    pieces = cut(x, width), cut(weights), cut(tokens)
    d_embedding, (losses, best, d_x) = jax.lax.scan(step, zeros, pieces)
    found = joined(losses), joined(best)
    if not with_gradients:
        return found
    assert d_embedding is not None
    return *found, joined(d_x, width), d_embedding.astype(embedding.dtype)


def _piece(soft_cap, embedding, piece, with_gradients):
    """Of some tokens: the losses, the best tokens, and the gradients of x and embedding."""
    x, weights, tokens = piece
    dtype = weights.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)
    z = product("btd,vd->btv", x, embedding).astype(dtype)
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    known = (tokens >= 0) & (tokens < embedding.shape[0])
    largest = jnp.max(z, axis=-1, keepdims=True)
    exponentials = jnp.exp(z - largest)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    place = jnp.where(known, tokens, 0)[..., None]
    losses = (jnp.log(total) + (largest - jnp.take_along_axis(z, place, axis=-1)))[..., 0]
    losses = jnp.where(known, losses, jnp.nan)
    best = jnp.argmax(z, axis=-1).astype("int32")
    if not with_gradients:
        return losses, best, None, None
    weights = jnp.where(known, weights, jnp.nan)[..., None]
    is_own = jnp.arange(embedding.shape[0]) == place
    d_z = (exponentials / total - is_own) * weights
    if soft_cap is not None:
        d_z = d_z * (1 - jnp.square(z / soft_cap))
    d_z = d_z.astype(jnp.promote_types(x.dtype, embedding.dtype))
    d_x = product("btv,vd->btd", d_z, embedding).astype(x.dtype)
    return losses, best, d_x, product("btv,btd->vd", d_z, x).astype(dtype)
