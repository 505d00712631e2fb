"""Programs of JAX that change one slot of a batch or process chunks of prompts."""

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


class SlotPrograms(NamedTuple):
    """Programs of a language model.

    Attributes:
        process: a function `(rows, tokens [P, T], mask, weights, layout=, variant=)`, which
            returns the next rows. A row is the cache of one sequence, stacked as in `Layout`.
        insert: a function `((state, stops), slot, (sequence, its_stops), row, layout=)`, which
            overwrites a slot of a `BatchState` and of the stop tokens `[B, S]` with the
            `DeviceState`, the stop tokens `[S]` and the row of one sequence.
    """

    process: Any
    insert: Any


def slot_programs(model, network, compiler_options):
    """Returns `SlotPrograms` of a language model.

    Args:
        model: the language model.
        network: a function of weights, which returns the `Network`.
        compiler_options: as in `jax.jit`.
    """
    jit = functools.partial(jax.jit, compiler_options=compiler_options)

    @functools.partial(jit, static_argnames=("layout", "variant"))
    def process(rows, tokens, mask, weights, layout, variant):
        stacks = [jnp.concatenate(group, axis=1) for group in zip(*rows, strict=True)]
        cache = network(weights).prefill(tokens, mask, layout.unstack(stacks))
        parts = [jnp.split(stacked, len(rows), axis=1) for stacked in layout.stack(cache)]
        return [list(row) for row in zip(*parts, strict=True)]

    @functools.partial(jit, static_argnames="layout", donate_argnums=0)
    def insert(before, slot, after, row, layout):
        def set_slot(array, value):
            return array.at[slot].set(value)

        state, stops = before
        given = layout.unstack(row)
        if jax.tree.structure(state.cache) != layout.structure:  # it has recent tokens
            given = model.backbone.add_recent_tokens(given)
        cache = jax.tree.map(lambda array, value: set_slot(array, value[0]), state.cache, given)
        sequences, stops = jax.tree.map(set_slot, (state.sequences, stops), after)
        return state._replace(sequences=sequences, cache=cache), stops

    return SlotPrograms(process, insert)


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
