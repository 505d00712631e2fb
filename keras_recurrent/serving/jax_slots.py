"""Rows of a batch on JAX: one program for each step, which overwrites its state."""

import functools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_recurrent.generation import loop
from keras_recurrent.generation.xla_programs import (
    make_network,
    program_variant,
    program_weights,
)

_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # programs, by decoding loops


class JaxRows:
    """State of all slots on the device, and the programs that change it.

    Args:
        model: the language model.
        loops: its decoding loops, `xla_programs.Programs`.
        num_slots: integer, number of rows.
        max_length: integer, the capacity of a row in tokens.
    """

    _state: Any

    def __init__(self, model, loops, num_slots, max_length):
        self._model, self._max_length = model, max_length
        if loops not in _known:
            _known[loops] = _programs(model, loops.snapshot)
        self._process, self._step = _known[loops]
        self._free_length = np.zeros(num_slots, "int32")
        self._stops, self._counts = np.zeros((num_slots, 0), "int32"), None
        zeros = jnp.zeros(num_slots, "int32")
        # The tokens are copied: a program must not get an array twice that it overwrites.
        token, done = jnp.zeros((num_slots, 1), "int32"), jnp.ones(num_slots, bool)
        self._state = loop.DecodingState(done, zeros, token, self.initial_row(num_slots), ())

    def initial_row(self, batch_size=1):
        return self._model.backbone.get_initial_state(batch_size, max_length=self._max_length)

    def asarray(self, array):
        return jnp.asarray(array)

    def set_row(self, array, slot, value):
        return _set_row(array, slot, np.asarray(value, array.dtype))

    def process(self, row, tokens, mask):
        weights, variant = self._fixed
        return self._process(row, tokens, mask, weights, variant=variant)

    def insert(self, slot, row, token, max_new_tokens, stops):
        if len(stops) > self._stops.shape[1]:
            more = len(stops) - self._stops.shape[1]
            self._stops = np.pad(self._stops, ((0, 0), (0, more)), constant_values=-1)
        # A step may still read the arrays of an earlier call.
        self._stops, self._free_length = self._stops.copy(), self._free_length.copy()
        self._stops[slot], self._free_length[slot] = stops, max_new_tokens
        self._state = _insert(self._state, slot, row, int(token))
        if self._counts is not None:
            self._counts = _set_row(self._counts, slot, np.int32(0))

    def stop(self, slot):
        self._state = self._state._replace(done=self._state.done.at[slot].set(True))

    def extract(self, slot):
        return _extract(self._state.cache, slot)

    def step(self, features, numbers, values):
        if features.has_penalties and self._counts is None:
            shape = len(self._free_length), self._model.backbone.vocabulary_size
            self._counts = jnp.zeros(shape, "int32")
        memory = self._counts if features.has_penalties else ()
        inputs = self._free_length, self._stops, numbers, dict(sorted(values.items()))
        weights, variant = self._fixed
        self._state, token, logprobs = self._step(
            *(self._state._replace(memory=memory), weights, inputs),
            features=features,
            variant=variant,
        )
        if features.has_penalties:
            self._counts = self._state.memory
        self._state = self._state._replace(memory=())
        return lambda: (np.asarray(token), keras.tree.map_structure(np.asarray, logprobs))

    def close(self):
        """Drops the arrays."""
        self._state = None
        vars(self).pop("_fixed", None)

    @functools.cached_property
    def _fixed(self):
        """Weights and variant of the programs; each step would take longer if it collected them."""
        return program_weights(self._model), program_variant(self._model)


def _programs(model, snapshot):
    network = functools.partial(make_network, model, snapshot)

    @functools.partial(jax.jit, static_argnames="variant")
    def process(row, tokens, mask, weights, variant):
        return network(weights).prefill(tokens, mask, row)

    @functools.partial(jax.jit, static_argnames=("features", "variant"), donate_argnums=0)
    def step(state, weights, inputs, features, variant):
        free_length, stops, numbers, arguments = inputs
        functions = network(weights, (features, stops, arguments))
        state, logprobs = loop.advance(functions, state, free_length, stops, numbers, keep=True)
        return state, state.token[:, 0], logprobs

    return process, step


@functools.partial(jax.jit, donate_argnums=0)
def _set_row(array, slot, value):
    return array.at[slot].set(value)


@functools.partial(jax.jit, donate_argnums=0)
def _insert(state, slot, row, token):
    return state._replace(
        done=state.done.at[slot].set(False),
        count=state.count.at[slot].set(0),
        token=state.token.at[slot, 0].set(token),
        cache=keras.tree.map_structure(lambda a, r: a.at[slot].set(r[0]), state.cache, row),
    )


@jax.jit
def _extract(cache, slot):
    def row(array):
        return jax.lax.dynamic_slice_in_dim(array, slot, 1)

    return keras.tree.map_structure(row, cache)
