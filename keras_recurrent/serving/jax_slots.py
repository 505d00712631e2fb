"""Rows of a batch on JAX. Each step is one program, which overwrites the state of the rows."""

import functools
import threading
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_recurrent.checks.shapes import group_equal
from keras_recurrent.devices.jax_processes import begin_gathering
from keras_recurrent.generation import loop
from keras_recurrent.generation.recent_tokens import apply_recent_tokens
from keras_recurrent.generation.sampling import STOPS_PER_STEP, argument_names
from keras_recurrent.generation.xla_programs import (
    delay_writes,
    make_network,
    program_variant,
    program_weights,
)

MAX_PROMPTS = 4  # of a program: a step waits for it

_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # programs, by decoding loops


class Layout(NamedTuple):
    """Groups in which the arrays of a cache are stacked: the host needs time for each array.

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


class JaxRows:
    """State of all slots on the device, and the programs that change it.

    Args:
        model: the language model.
        loops: its decoding loops, `xla_programs.Programs`.
        num_slots: integer, number of rows.
        max_length: integer, the capacity of a row in tokens.
        num_prompts: integer, the wanted number of prompts of a program.

    Attributes:
        num_prompts: integer, maximum number of prompts in one call of `process`.
        initial_row: the row before all tokens: its cache, stacked as in `Layout`.
    """

    compiles_in_background = True
    _state: Any

    def __init__(self, model, loops, num_slots, max_length, num_prompts):
        self._model, self._max_length = model, max_length
        if loops not in _known:
            _known[loops] = _programs(model)
        self._process, self._step, self._insert = _known[loops]
        # On the host; `_limits` has both on the device, None after a change.
        self._free_length = np.zeros(num_slots, "int32")
        self._stops = np.full((num_slots, STOPS_PER_STEP), -1, "int32")
        self._limits: Any = None
        self._latest: Any = ()  # the latest result of `process`
        self._counts, self._compiling = None, {}  # threads, by features and number of stop tokens
        zeros = jnp.zeros(num_slots, "int32")
        # The tokens are copied: an array that a program overwrites must not be passed to it twice.
        token, done = jnp.zeros((num_slots, 1), "int32"), jnp.ones(num_slots, bool)
        cache = delay_writes(model, self._initial_state(num_slots))
        self._state = loop.DecodingState(done, zeros, token, cache, ())
        self.num_prompts = min(num_prompts, MAX_PROMPTS)
        initial = self._initial_state(1)
        self._layout = make_layout(initial)
        self.initial_row = self._row(initial)

    def _initial_state(self, batch_size):
        return self._model.backbone.get_initial_state(batch_size, max_length=self._max_length)

    def asarray(self, array):
        return jnp.asarray(array)

    def set_row(self, array, slot, value):
        return _set_row(array, slot, np.asarray(value, array.dtype))

    def process(self, rows, tokens, mask):
        """Processes a chunk of each of some prompts, as in `TorchRows`, in one part."""
        weights, variant = self._fixed
        yield from ()
        rows, num_rows = [*map(self._row, rows)], len(rows)
        rows += [self.initial_row] * (self.num_prompts - num_rows)
        static = {"layout": self._layout, "variant": variant}
        self._latest = self._process(rows, tokens, mask, weights, **static)
        return self._latest[:num_rows]

    def _row(self, row):
        return row if isinstance(row, list) else _stack(row, layout=self._layout)

    def wait(self):
        jax.block_until_ready(self._latest)

    def cache(self, row):
        return _unstack(row, layout=self._layout)

    def is_compiled(self, features, values, num_stops, timeout):
        """Returns True if the step is compiled; otherwise compiles it in a background thread.

        Args:
            features, values: as in `step`.
            num_stops: integer, number of stop tokens of a slot.
            timeout: number, seconds to wait.
        """
        key = features, num_stops
        if key not in self._compiling:
            num_slots = len(self._free_length)
            numbers = np.zeros(num_slots, "float32") if features.is_random else None
            limits = self._free_length, np.zeros((num_slots, num_stops), "int32")
            arguments, static = self._arguments(features, limits, numbers, values)
            # Lowered from shapes: the step that runs overwrites these arrays.
            shapes = jax.tree.map(_shape, arguments)
            # Later calls with such arguments find the program.
            thread = threading.Thread(
                target=lambda: self._step.lower(*shapes, **static).compile(), daemon=True
            )
            thread.start()
            self._compiling[key] = thread
        self._compiling[key].join(timeout)
        return not self._compiling[key].is_alive()

    def insert(self, slot, row, token, max_new_tokens, stops):
        if len(stops) > self._stops.shape[1]:
            more = len(stops) - self._stops.shape[1]
            self._stops = np.pad(self._stops, ((0, 0), (0, more)), constant_values=-1)
        self._stops[slot], self._free_length[slot] = stops, max_new_tokens
        self._limits = None
        row = self._row(row)
        self._state = self._insert(self._state, slot, row, int(token), layout=self._layout)
        if self._counts is not None:
            self._counts = _set_row(self._counts, slot, np.int32(0))

    def stop(self, slot):
        self._state = self._state._replace(done=self._state.done.at[slot].set(True))

    def extract(self, slot):
        return _extract(self._state.cache, slot)

    def step(self, features, numbers, values):
        if self._limits is None:
            # Copies: on CPUs, JAX may read the memory of a NumPy array.
            limits = self._free_length.copy(), self._stops.copy()
            self._limits = tuple(map(jnp.asarray, limits))
        arguments, static = self._arguments(features, self._limits, numbers, values)
        self._state, token, logprobs = self._step(*arguments, **static)
        if features.has_penalties:
            self._counts = self._state.memory
        self._state = self._state._replace(memory=())
        begin_gathering((token, logprobs))
        return lambda: (np.asarray(token), keras.tree.map_structure(np.asarray, logprobs))

    def _arguments(self, features, limits, numbers, values):
        """Returns the arguments of the step, and the static ones by name.

        limits: `free_length` and stop tokens of the slots.
        """
        if features.has_penalties and self._counts is None:
            shape = len(self._free_length), self._model.backbone.vocabulary_size
            self._counts = jnp.zeros(shape, "int32")
        memory = self._counts if features.has_penalties else ()
        values = {name: values[name] for name in argument_names(features)}
        weights, variant = self._fixed
        state = self._state._replace(memory=memory)
        static = {"features": features, "variant": variant}
        return (state, weights, (*limits, numbers, values)), static

    def close(self):
        """Drops the arrays."""
        for thread in self._compiling.values():
            thread.join()
        self._state = self._latest = None
        vars(self).pop("_fixed", None)

    @functools.cached_property
    def _fixed(self):
        """Weights and variant of the programs; each step would take longer if it collected them."""
        return program_weights(self._model), program_variant(self._model)


def _shape(array):
    """Returns the shape and dtype of an array, and its device if the user chose it."""
    is_committed = isinstance(array, jax.Array) and array.committed
    sharding = array.sharding if is_committed else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _programs(model):
    network = functools.partial(make_network, model)

    @functools.partial(jax.jit, static_argnames=("layout", "variant"))
    def process(rows, tokens, mask, weights, layout, variant):
        stacks = [jnp.concatenate(group, axis=1) for group in zip(*rows, strict=True)]
        cache = network(weights).prefill(tokens, mask, layout.unstack(stacks))
        parts = [jnp.split(stacked, len(rows), axis=1) for stacked in layout.stack(cache)]
        return [list(row) for row in zip(*parts, strict=True)]

    @functools.partial(jax.jit, static_argnames=("features", "variant"), donate_argnums=0)
    def step(state, weights, inputs, features, variant):
        free_length, stops, numbers, arguments = inputs
        functions = network(weights, (features, stops, arguments))
        state, logprobs = loop.advance(functions, state, free_length, stops, numbers, keep=True)
        return state, state.token[:, 0], logprobs

    @functools.partial(jax.jit, static_argnames="layout", donate_argnums=0)
    def insert(state, slot, row, token, layout):
        given = layout.unstack(row)
        if jax.tree.structure(state.cache) != layout.structure:  # it has recent tokens
            given = model.backbone.add_recent_tokens(given)
        return state._replace(
            done=state.done.at[slot].set(False),
            count=state.count.at[slot].set(0),
            token=state.token.at[slot, 0].set(token),
            cache=keras.tree.map_structure(lambda a, r: a.at[slot].set(r[0]), state.cache, given),
        )

    return process, step, insert


@functools.partial(jax.jit, donate_argnums=0)
def _set_row(array, slot, value):
    return array.at[slot].set(value)


@functools.partial(jax.jit, static_argnames="layout")
def _stack(cache, layout):
    return layout.stack(cache)


@functools.partial(jax.jit, static_argnames="layout")
def _unstack(row, layout):
    return layout.unstack(row)


@jax.jit
def _extract(cache, slot):
    def row(array):
        return jax.lax.dynamic_slice_in_dim(array, slot, 1)

    return apply_recent_tokens(keras.tree.map_structure(row, cache))
