"""losses = log Σ_v exp(z_v) - z_token of the logits z = x E^T, perhaps capped, c tanh(x E^T / c).

The tokens go through the vocabulary some at a time, so that there are never the logits of all. The
gradients of a sum are known but for one factor once the logits are, so they are made with it;
those of single losses make the logits once more. The devices of a mesh may share rows, their
tokens and the vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..constants import CROSSENTROPY_CHUNK, SEQUENCE_AXIS
from . import _platforms
from ._common import accumulation_dtype


class _Split(NamedTuple):
    """The axes of a mesh that split tokens `[B, T]`, and those that split the vocabulary."""

    mesh: jax.sharding.Mesh
    rows: str | None
    time: str | None
    vocabulary: tuple[str, ...]


class _How(NamedTuple):
    """What is known of a call before its tensors."""

    soft_cap: float | None
    split: _Split | None
    # Makes losses of logits in place of plain JAX, where the vocabulary is not split.
    piece: Callable | None


def operation(piece=None):
    """The operation. piece: makes losses of logits, as `_plain_piece` does; None: plain JAX."""

    def linear_crossentropy(
        x, embedding, tokens, sample_weight=None, soft_cap=None, reduction="sum"
    ):
        """x: [..., D]; embedding: [V, D]; tokens, sample_weight: [...].

        Returns (losses times their weights, [...] or their sum, in float32, or float64 if a tensor
        is; the token of the largest logit, int32 [...]).
        """
        how = _How(soft_cap, None, piece)
        return _compiled(x, embedding, tokens, sample_weight, how, reduction)

    return linear_crossentropy


linear_crossentropy = operation()


def choose_kernels(kernels):
    """The operation that takes the kernel of the platform that it is lowered for.

    kernels: {platform: a module that has a `piece`}.
    """
    pieces = {platform: module.piece for platform, module in kernels.items()}
    return operation(functools.partial(_by_platform, pieces | {"default": _plain_piece}))


def _by_platform(pieces, z, weights, tokens, *options):
    def of(piece):
        return lambda *tensors: piece(*tensors, *options)

    functions = {platform: of(piece) for platform, piece in pieces.items()}
    return _platforms.switch_platform(functions, (z, weights, tokens))


def run_sharded(mesh, batch_axis, x, embedding, tokens, **others):
    """The same, of tokens `[B, T]` that the devices of a mesh share.

    Each device takes its own tokens through its own part of the vocabulary. Of every token, they
    send each other the largest logit, the sum of exponentials and the logit of the label, a piece
    of tokens at a time; of all pieces together, once, the gradients that they have in common. An
    axis that does not divide its dimension splits nothing.

    Args:
        mesh: a `jax.sharding.Mesh`.
        batch_axis: string, the axis of the mesh that splits the batch.
        x, embedding, tokens, **others: as in `linear_crossentropy`.
    """
    others = {"sample_weight": None, "soft_cap": None, "reduction": "sum", **others}
    soft_cap, split = others.pop("soft_cap"), None
    if tokens.ndim == 2:
        batch, length = tokens.shape
        vocabulary = tuple(
            name for name in mesh.axis_names if name not in (batch_axis, SEQUENCE_AXIS)
        )
        parts = math.prod(mesh.shape[name] for name in vocabulary)
        split = _Split(
            mesh,
            batch_axis if batch % mesh.shape[batch_axis] == 0 else None,
            SEQUENCE_AXIS if length % mesh.shape.get(SEQUENCE_AXIS, length + 1) == 0 else None,
            vocabulary if embedding.shape[0] % parts == 0 else (),
        )
    return _compiled(x, embedding, tokens, **others, how=_How(soft_cap, split, None))


@functools.partial(jax.jit, static_argnames=("how", "reduction"))
def _compiled(x, embedding, tokens, sample_weight, how, reduction):
    dtype = accumulation_dtype(x, embedding, sample_weight)
    if sample_weight is None:
        weights = jnp.ones(tokens.shape, dtype)
    else:
        weights = sample_weight.astype(dtype)
        tokens = jnp.where(weights == 0, 0, tokens)
    of = _sum if reduction == "sum" else _each
    return of(how, x, embedding, weights, tokens.astype(int))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(how, x, embedding, weights, tokens):
    losses, best = _walk(how, x, embedding, weights, tokens)
    return jnp.sum(weights * losses), best


def _sum_and_gradients(how, x, embedding, weights, tokens):
    losses, best, *gradients = _walk(how, x, embedding, weights, tokens, True)
    return (jnp.sum(weights * losses), best), (*gradients, losses)


def _times(how, gradients, d_results):
    d_loss, _ = d_results
    return *((d_loss * d.astype(d_loss.dtype)).astype(d.dtype) for d in gradients), None


_sum.defvjp(_sum_and_gradients, _times)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each(how, x, embedding, weights, tokens):
    losses, best = _walk(how, x, embedding, weights, tokens)
    return weights * losses, best


def _save(how, *tensors):
    return _each(how, *tensors), tensors


def _gradients(how, tensors, d_results):
    x, embedding, weights, tokens = tensors
    d_losses, _ = d_results
    losses, _, *gradients = _walk(how, x, embedding, weights * d_losses, tokens, True)
    return *gradients, losses * d_losses, None


_each.defvjp(_save, _gradients)


def _walk(how, x, embedding, weights, tokens, with_gradients=False):
    """The losses, their best tokens, and if wanted the gradients of x and embedding."""
    walk, split = functools.partial(_walk_shard, how, with_gradients), how.split
    if split is not None:
        of_tokens, of_x = jax.P(split.rows, split.time), jax.P(split.rows, split.time, None)
        of_embedding = jax.P(split.vocabulary or None, None)
        walk = jax.shard_map(
            walk,
            mesh=split.mesh,
            in_specs=(of_x, of_embedding, of_tokens, of_tokens),
            out_specs=(of_tokens, of_tokens, *((of_x, of_embedding) if with_gradients else ())),
            check_vma=False,
        )
    return walk(x, embedding, weights, tokens)


def _walk_shard(how, with_gradients, x, embedding, weights, tokens):
    """What `_walk` returns of one device's tokens, which see all of the vocabulary.

    Time is cut and the batch is not: where XLA shares the work, devices have some rows each.
    """
    shape, width, split = tokens.shape, x.shape[-1], how.split
    length = shape[-1] if shape else 1
    batch = math.prod(shape[:-1])
    size = min(length, max(1, CROSSENTROPY_CHUNK // max(1, batch)))
    count = -(-length // max(1, size))
    vocabulary = _Vocabulary(embedding, split.vocabulary if split else ())

    def cut(array, *rest):
        array = array.reshape(batch, length, *rest)
        array = jnp.pad(array, [(0, 0), (0, count * size - length)] + [(0, 0)] * len(rest))
        return jnp.moveaxis(array.reshape(batch, count, size, *rest), 1, 0)

    def joined(array, *rest):
        array = jnp.moveaxis(array, 0, 1).reshape(batch, count * size, *rest)
        return array[:, :length].reshape(*shape, *rest)

    def step(d_embedding, piece):
        *found, d_more = _piece(how, vocabulary, piece, with_gradients)
        return d_embedding + d_more if with_gradients else None, found

    zeros = jnp.zeros(embedding.shape, weights.dtype) if with_gradients else None
    pieces = cut(x, width), cut(weights), cut(tokens)
    d_embedding, (losses, best, d_x) = jax.lax.scan(step, zeros, pieces)
    found = joined(losses), joined(best)
    if not with_gradients:
        return found
    assert d_embedding is not None
    d_x = vocabulary.sum(joined(d_x, width)).astype(x.dtype)
    of_tokens = [name for name in (split.rows, split.time) if name] if split else []
    if of_tokens:
        d_embedding = jax.lax.psum(d_embedding, of_tokens)
    return *found, d_x, d_embedding.astype(embedding.dtype)


class _Vocabulary:
    """A device's part of the embeddings, and what the parts of all devices say of a token.

    Args:
        embedding: `[V, D]`, the part; parts are as long as each other.
        axes: the axes of a mesh that split the vocabulary; none where the part is the whole.
    """

    def __init__(self, embedding, axes):
        self.embedding, self.axes = embedding, axes
        self.first, self.size = 0, embedding.shape[0]
        if axes:
            self.first = jax.lax.axis_index(axes) * self.size
            self.size *= jax.lax.psum(1, axes)

    def sum(self, x):
        return jax.lax.psum(x, self.axes) if self.axes else x

    def max(self, x):
        return jax.lax.pmax(x, self.axes) if self.axes else x

    def best(self, z, largest):
        """The first token whose logit is the largest one `[..., 1]` of all parts."""
        best = jnp.argmax(z, axis=-1).astype("int32") + self.first
        if not self.axes:
            return best
        is_largest = jnp.max(z, axis=-1) == largest[..., 0]
        # Where logits are NaN no part has the largest: the first token, as good as any.
        best = jax.lax.pmin(jnp.where(is_largest, best, self.size), self.axes)
        return jnp.where(best == self.size, 0, best)


def _piece(how, vocabulary, piece, with_gradients):
    """Of some tokens: the losses, the best tokens, and the gradients of x and embedding.

    The gradient of x is that of a device's part of the vocabulary, in the dtype of sums where the
    parts are still to be added.
    """
    x, weights, tokens = piece
    embedding, dtype = vocabulary.embedding, weights.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)
    z = product("btd,vd->btv", x, embedding).astype(dtype)
    of_logits = functools.partial(_of_logits, vocabulary)
    if how.piece is not None and not vocabulary.axes:
        of_logits = how.piece
    options = how.soft_cap, jnp.promote_types(x.dtype, embedding.dtype), with_gradients
    losses, best, *gradient = of_logits(z, weights, tokens, *options)
    if not with_gradients:
        return losses, best, None, None
    d_z, factors = gradient
    d_x = product("btv,vd->btd", d_z, embedding)
    if factors is not None:
        d_x = d_x * factors[..., None]
        x = (x * factors[..., None]).astype(x.dtype)
    d_x = d_x.astype(dtype if vocabulary.axes else piece[0].dtype)
    return losses, best, d_x, product("btv,btd->vd", d_z, x).astype(dtype)


def _plain_piece(z, weights, tokens, soft_cap, dtype, with_gradients):
    """What becomes of logits z [B, T, V], in plain JAX.

    Returns the losses and the best tokens [B, T]; with gradients also that of the sum of the losses
    by weights, in `dtype`, and a factor of each token that it still lacks.
    """
    vocabulary = _Vocabulary(jax.ShapeDtypeStruct((z.shape[-1], 0), dtype), ())
    found = _of_logits(vocabulary, z, weights, tokens, soft_cap, dtype, with_gradients)
    return (*found[:3], jnp.ones_like(weights)) if with_gradients else found


def _of_logits(vocabulary, z, weights, tokens, soft_cap, dtype, with_gradients):
    """As `_plain_piece`, of a device's part of the vocabulary; None for the factors: all are 1."""
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    known = (tokens >= 0) & (tokens < vocabulary.size)
    largest = vocabulary.max(jnp.max(z, axis=-1, keepdims=True))
    exponentials = jnp.exp(z - largest)
    total = vocabulary.sum(jnp.sum(exponentials, axis=-1, keepdims=True))
    place = (jnp.where(known, tokens, 0) - vocabulary.first)[..., None]
    last = z.shape[-1] - 1
    own = jnp.take_along_axis(z, jnp.clip(place, 0, last), axis=-1)
    own = vocabulary.sum(jnp.where((place >= 0) & (place <= last), own, 0))
    losses = jnp.where(known, (jnp.log(total) + (largest - own))[..., 0], jnp.nan)
    best = vocabulary.best(z, largest)
    if not with_gradients:
        return losses, best
    weights = jnp.where(known, weights, jnp.nan)[..., None]
    d_z = (exponentials / total - (jnp.arange(last + 1) == place)) * weights
    if soft_cap is not None:
        d_z = d_z * (1 - jnp.square(z / soft_cap))
    return losses, best, d_z.astype(dtype), None
