"""losses = log Σ_v exp(z_v) - z_token of the logits z = x E^T, or with a cap c tanh(x E^T / c).

Logits are computed for one chunk of tokens at a time and never materialized for all. The gradients
of a sum are known up to one factor as soon as the logits are, so they are computed together; the
gradients of single losses recompute the logits. The devices of a mesh may split the batch, time and
the vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..constants import CROSSENTROPY_CHUNK, SEQUENCE_AXIS
from ..kernel import Kernel
from ._common import accumulation_dtype


class _Split(NamedTuple):
    """The axes of a mesh that split tokens `[B, T]`, and those that split the vocabulary."""

    mesh: jax.sharding.Mesh
    rows: str | None
    time: str | None
    vocabulary: tuple[str, ...]


class _Config(NamedTuple):
    """Static configuration of a call."""

    soft_cap: float | None
    split: _Split | None
    # Computes losses from logits in place of plain JAX, if the vocabulary is not split.
    chunk_losses: Callable | None


def operation(chunk_losses=None):
    """Builds the operation; chunk_losses: has the signature of `_plain_chunk_losses`, or None."""

    def linear_crossentropy(
        x, embedding, tokens, sample_weight=None, soft_cap=None, reduction="sum"
    ):
        """x: [..., D]; embedding: [V, D]; tokens, sample_weight: [...]."""
        config = _Config(soft_cap, None, chunk_losses)
        return _compiled(x, embedding, tokens, sample_weight, config, reduction)

    return linear_crossentropy


def run_sharded(mesh, batch_axis, x, embedding, tokens, **others):
    """Computes `linear_crossentropy` for tokens `[B, T]` that the devices of a mesh split.

    Each device computes the logits of its tokens for its shard of the vocabulary. For each chunk,
    devices exchange the largest logit, the sum of exponentials and the label's logit of every
    token; after all chunks, they sum shared gradients once. An axis that does not divide its
    dimension splits nothing.

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
    return _compiled(x, embedding, tokens, **others, config=_Config(soft_cap, split, None))


@functools.partial(jax.jit, static_argnames=("config", "reduction"))
def _compiled(x, embedding, tokens, sample_weight, config, reduction):
    dtype = accumulation_dtype(x, embedding, sample_weight)
    if sample_weight is None:
        weights = jnp.ones(tokens.shape, dtype)
    else:
        weights = sample_weight.astype(dtype)
        tokens = jnp.where(weights == 0, 0, tokens)
    loss = _total_loss if reduction == "sum" else _single_losses
    return loss(config, x, embedding, weights, tokens.astype(int))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total_loss(config, x, embedding, weights, tokens):
    losses, best = _compute(config, x, embedding, weights, tokens)
    return jnp.sum(weights * losses), best


def _total_loss_and_gradients(config, x, embedding, weights, tokens):
    losses, best, *gradients = _compute(config, x, embedding, weights, tokens, True)
    return (jnp.sum(weights * losses), best), (*gradients, losses)


def _scale_gradients(config, gradients, d_results):
    d_loss, _ = d_results
    return *((d_loss * d.astype(d_loss.dtype)).astype(d.dtype) for d in gradients), None


_total_loss.defvjp(_total_loss_and_gradients, _scale_gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _single_losses(config, x, embedding, weights, tokens):
    losses, best = _compute(config, x, embedding, weights, tokens)
    return weights * losses, best


def _save_tensors(config, *tensors):
    return _single_losses(config, *tensors), tensors


def _gradients(config, tensors, d_results):
    x, embedding, weights, tokens = tensors
    d_losses, _ = d_results
    losses, _, *gradients = _compute(config, x, embedding, weights * d_losses, tokens, True)
    return *gradients, losses * d_losses, None


_single_losses.defvjp(_save_tensors, _gradients)


def _compute(config, x, embedding, weights, tokens, with_gradients=False):
    """Returns losses, predicted tokens and, if requested, the gradients of x and embedding."""
    compute, split = functools.partial(_compute_shard, config, with_gradients), config.split
    if split is not None:
        token_spec, x_spec = jax.P(split.rows, split.time), jax.P(split.rows, split.time, None)
        embedding_spec = jax.P(split.vocabulary or None, None)
        compute = jax.shard_map(
            compute,
            mesh=split.mesh,
            in_specs=(x_spec, embedding_spec, token_spec, token_spec),
            out_specs=(
                token_spec,
                token_spec,
                *((x_spec, embedding_spec) if with_gradients else ()),
            ),
            check_vma=False,
        )
    return compute(x, embedding, weights, tokens)


def _compute_shard(config, with_gradients, x, embedding, weights, tokens):
    """`_compute` for the tokens of one device, over the whole vocabulary.

    Chunks cut time, not the batch: where XLA partitions the work, each device has some batch rows.
    """
    shape, width, split = tokens.shape, x.shape[-1], config.split
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

    def step(d_embedding, chunk):
        *results, d_chunk = _compute_chunk(config, vocabulary, chunk, with_gradients)
        return d_embedding + d_chunk if with_gradients else None, results

    zeros = jnp.zeros(embedding.shape, weights.dtype) if with_gradients else None
    chunks = cut(x, width), cut(weights), cut(tokens)
    d_embedding, (losses, best, d_x) = jax.lax.scan(step, zeros, chunks)
    results = joined(losses), joined(best)
    if not with_gradients:
        return results
    assert d_embedding is not None
    d_x = vocabulary.sum(joined(d_x, width)).astype(x.dtype)
    token_spec = [name for name in (split.rows, split.time) if name] if split else []
    if token_spec:
        d_embedding = jax.lax.psum(d_embedding, token_spec)
    return *results, d_x, d_embedding.astype(embedding.dtype)


class _Vocabulary:
    """The vocabulary shard of a device, and reductions over the shards of all devices.

    Args:
        embedding: `[V, D]`, the shard; all shards have the same size.
        axes: the axes of a mesh that split the vocabulary; empty if it is not split.
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
        """The first token whose logit is the largest one `[..., 1]` of all shards."""
        best = jnp.argmax(z, axis=-1).astype("int32") + self.first
        if not self.axes:
            return best
        is_largest = jnp.max(z, axis=-1) == largest[..., 0]
        # With NaN logits no shard has the largest one: return the first token.
        best = jax.lax.pmin(jnp.where(is_largest, best, self.size), self.axes)
        return jnp.where(best == self.size, 0, best)


def _compute_chunk(config, vocabulary, chunk, with_gradients):
    """Losses, predicted tokens, and gradients of x and embedding for a chunk of tokens.

    If the vocabulary is split, the gradient of x is that of the device's shard, in the accumulation
    dtype, before the sum over shards.
    """
    x, weights, tokens = chunk
    embedding, dtype = vocabulary.embedding, weights.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)
    z = product("btd,vd->btv", x, embedding).astype(dtype)
    losses_from_logits = functools.partial(_losses_from_logits, vocabulary)
    if config.chunk_losses is not None and not vocabulary.axes:
        losses_from_logits = config.chunk_losses
    losses, best, *gradient = losses_from_logits(
        *(z, weights, tokens),
        soft_cap=config.soft_cap,
        dtype=jnp.promote_types(x.dtype, embedding.dtype),
        with_gradients=with_gradients,
    )
    if not with_gradients:
        return losses, best, None, None
    d_z, factors = gradient
    d_x = product("btv,vd->btd", d_z, embedding)
    if factors is not None:
        d_x = d_x * factors[..., None]
        x = (x * factors[..., None]).astype(x.dtype)
    d_x = d_x.astype(dtype if vocabulary.axes else chunk[0].dtype)
    return losses, best, d_x, product("btv,btd->vd", d_z, x).astype(dtype)


def _plain_chunk_losses(z, weights, tokens, soft_cap, dtype, with_gradients):
    """Losses from logits z [B, T, V], in plain JAX.

    Returns losses and predicted tokens [B, T]; with gradients, also that of the weighted sum of the
    losses, in `dtype`, and a factor for each token by which it must still be multiplied.
    """
    vocabulary = _Vocabulary(jax.ShapeDtypeStruct((z.shape[-1], 0), dtype), ())
    results = _losses_from_logits(vocabulary, z, weights, tokens, soft_cap, dtype, with_gradients)
    return (*results[:3], jnp.ones_like(weights)) if with_gradients else results


def _losses_from_logits(vocabulary, z, weights, tokens, soft_cap, dtype, with_gradients):
    """`_plain_chunk_losses` for a vocabulary shard; factors are None, since all are 1."""
    if soft_cap is not None:
        z = soft_cap * jnp.tanh(z / soft_cap)
    known = (tokens >= 0) & (tokens < vocabulary.size)
    largest = vocabulary.max(jnp.max(z, axis=-1, keepdims=True))
    exponentials = jnp.exp(z - largest)
    total = vocabulary.sum(jnp.sum(exponentials, axis=-1, keepdims=True))
    label_index = (jnp.where(known, tokens, 0) - vocabulary.first)[..., None]
    last = z.shape[-1] - 1
    label_logit = jnp.take_along_axis(z, jnp.clip(label_index, 0, last), axis=-1)
    label_logit = vocabulary.sum(
        jnp.where((label_index >= 0) & (label_index <= last), label_logit, 0)
    )
    losses = jnp.where(known, (jnp.log(total) + (largest - label_logit))[..., 0], jnp.nan)
    best = vocabulary.best(z, largest)
    if not with_gradients:
        return losses, best
    weights = jnp.where(known, weights, jnp.nan)[..., None]
    d_z = (exponentials / total - (jnp.arange(last + 1) == label_index)) * weights
    if soft_cap is not None:
        d_z = d_z * (1 - jnp.square(z / soft_cap))
    return losses, best, d_z.astype(dtype), None


linear_crossentropy = Kernel(operation(), forward=_plain_chunk_losses, build=operation)
