"""Stacked caches on JAX, and programs for one slot of a batch."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras

from keras_recurrent.checks.shapes import group_equal
from keras_recurrent.generation.recent_tokens import apply_recent_tokens


class Layout(NamedTuple):
    """Groups of arrays of a cache, stacked because each argument of a program takes host time.

    Attributes:
        structure: the tree of a cache.
        groups: a tuple of tuples of the indices of arrays with equal shapes and dtypes.
    """

    structure: Any
    groups: Any

    def stack(self, cache):
        """Returns a list of arrays [n, B, ...], one for each group of n arrays [B, ...]."""
        arrays = jax.tree.leaves(cache)
        return [jnp.stack([arrays[index] for index in group]) for group in self.groups]

    def unstack(self, stacks):
        """Returns the cache, the inverse of `stack`."""
        arrays: dict = {}
        for group, stacked in zip(self.groups, stacks, strict=True):
            arrays.update(zip(group, stacked, strict=True))
        return jax.tree.unflatten(self.structure, [arrays[index] for index in sorted(arrays)])


def make_layout(cache):
    """Returns the `Layout` of a cache."""
    arrays, structure = jax.tree.flatten(cache)
    return Layout(structure, tuple(map(tuple, group_equal(arrays))))


@functools.partial(jax.jit, donate_argnums=0)
def set_row(array, slot, value):
    """Returns the array with a new value of one row; the given array is overwritten."""
    return array.at[slot].set(value)


@functools.partial(jax.jit, static_argnames="layout")
def stack(cache, layout):
    """Returns a cache stacked as in `Layout`."""
    return layout.stack(cache)


@functools.partial(jax.jit, static_argnames="layout")
def unstack(row, layout):
    """Returns the cache of stacked arrays."""
    return layout.unstack(row)


@jax.jit
def extract(cache, slot):
    """Returns the state of a slot, of batch size 1, from the cache of a `BatchState`."""

    def row(array):
        return jax.lax.dynamic_slice_in_dim(array, slot, 1)

    return apply_recent_tokens(keras.tree.map_structure(row, cache))
