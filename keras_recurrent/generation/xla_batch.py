"""Batches on JAX and TensorFlow. Each step is one program; on JAX, it overwrites the state."""

import threading
import weakref
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_recurrent.devices.jax_layouts import drop_uneven_axes
from keras_recurrent.devices.jax_processes import begin_gathering, gather_to_numpy
from keras_recurrent.generation.batch import (
    TOKENS_AHEAD,
    TOKENS_ON_CPU,
    Batch,
    num_stops,
    runs_ahead,
)
from keras_recurrent.generation.grammar import neutral_masks
from keras_recurrent.generation.sampling import Features, argument_names, features_of, option_arrays
from keras_recurrent.generation.sequence import DeviceState

if keras.config.backend() == "jax":
    import jax
    import jax.numpy as jnp

# Tokens per step if they are needed soon: in a stream on a CPU, and in the engine on accelerators.
# On these, the launch of a program takes about half as long as a token of 128 sequences.
TOKENS_OF_STREAM = 2
# Tokens per step of a sequence without a grammar, on accelerators, if another sequence has one.
# Such a step has two launches, and the host makes masks and processes tokens meanwhile.
TOKENS_PER_MASK = 3
# Blocks of memory of each size that the engine leaves free for the small arrays of steps.
FREE_BLOCKS = 8
# Tokens per step if they are only read at its end, on a device that does not run ahead. The step
# ends with its last sequence, and its launch takes as long as one or two tokens of a small model.
MOST_TOKENS = 64


class BatchState(NamedTuple):
    """State of a batch between two steps.

    Attributes:
        sequences: the `DeviceState`.
        cache: the cache of the backbone before the tokens of `sequences`.
        counts: int32 `[B, vocabulary_size]`, how often each token was generated; () without
            penalties.
    """

    sequences: DeviceState
    cache: Any
    counts: Any


class XlaBatch(Batch):
    """Batch on JAX or TensorFlow. Arguments as in `Batch`."""

    _state: Any = None
    _logits: Any = None  # of the next token, for a step with a grammar

    def __init__(self, programs, num_slots, keep, reads_tokens=False):
        ahead = runs_ahead(programs.model)
        if ahead:
            tokens_per_step, self.tokens_per_mask = TOKENS_AHEAD, TOKENS_PER_MASK
        elif keep and reads_tokens:
            ahead, tokens_per_step = keras.config.backend() == "jax", TOKENS_OF_STREAM
        else:
            tokens_per_step = TOKENS_ON_CPU if reads_tokens else MOST_TOKENS
        super().__init__(programs, num_slots, keep, reads_tokens, tokens_per_step, ahead)
        programs.record_mode()
        # Collected once: collecting them takes longer than a step on the device.
        self._weights, self._variant = programs.weights(), programs.variant()
        self._options_on_device: dict[str, Any] = {}
        self._counts: Any = None

    def write(self, rows, state):
        arrays, _ = self._inserted
        on_device = {name: distribute(array) for name, array in arrays.items()}
        sequences = DeviceState(*(on_device.pop(name) for name in DeviceState._fields))
        self._options_on_device = on_device
        self._state = BatchState(sequences, self._programs.begin(state), ())

    @property
    def weights(self):
        """The weights, arguments of programs."""
        on_jax = keras.config.backend() == "jax"
        if on_jax and self._weights[0].is_deleted():  # Keras's `predict` replaces them
            self._weights = self._programs.weights()
        return self._weights

    def _launch(self, features, uniform, count):
        arguments, static = self._decoding_arguments(features, uniform)
        return self._begin_results(features, *self._programs.decode(*arguments, **static))

    def _launch_model(self, features, uniform, count):
        arguments, static = self._logits_arguments(features, uniform, count)
        state, self._logits, *found = self._programs.logits(*arguments, **static)
        return self._begin_results(static["features"], state, *found)

    def _launch_choice(self, features, uniform, masks):
        self._options_on_device["grammar"] = distribute(masks)
        arguments, static = self._choice_arguments(features, uniform)
        state, *found = self._programs.choose(*arguments, **static)
        return self._begin_results(features, state._replace(cache=self._state.cache), *found)

    # Each of these methods returns a tuple of the arguments of a program, and a dictionary of the
    # static ones.

    def _decoding_arguments(self, features, uniform):
        state, inputs = self._arguments(features, uniform)
        return (state, self.weights, inputs), self._static(features, self.tokens_per_step)

    def _logits_arguments(self, features, uniform, count):
        features = features.without_grammar if count > 1 else Features()
        if self._logits is None:  # the first step overwrites these zeros
            size = self.num_slots, self._vocabulary_size
            self._logits = distribute(np.zeros(size, self._model.compute_dtype))
        state, inputs = self._arguments(features, uniform if count > 1 else None)
        return (state, self._logits, self.weights, inputs), self._static(features, count)

    def _choice_arguments(self, features, uniform):
        state, inputs = self._arguments(features, uniform)
        static = {"features": features, "variant": self._variant}
        return (state._replace(cache=()), self._logits, inputs), static

    def _begin_results(self, features, state, tokens, logprobs):
        """Stores the next state, starts to copy the rest to the host; returns as `_launch` does."""
        if features.has_penalties:
            self._counts = state.counts
        self._state = state._replace(counts=())
        begin_gathering((tokens, logprobs))
        return lambda: keras.tree.map_structure(gather_to_numpy, (tokens, logprobs))

    def _arguments(self, features, uniform):
        """Returns the state and the inputs of sampling, without unused arrays."""
        counts = ()
        if features.has_penalties:
            if self._counts is None:
                shape = self.num_slots, self._vocabulary_size
                self._counts = distribute(np.zeros(shape, "int32"))
            counts = self._counts
        if uniform is not None:
            uniform = distribute(uniform)
        options = {name: self._options_on_device[name] for name in argument_names(features)}
        return self._state._replace(counts=counts), (uniform, options)

    def _static(self, features, num_tokens):
        return {
            "features": features,
            "keep": self._keep,
            "num_tokens": num_tokens,
            "variant": self._variant,
        }

    def _stop(self, slot):
        others = np.arange(self.num_slots)[:, None] != slot
        sequences = self._state.sequences
        active = ops.logical_and(sequences.active, distribute(others))
        self._state = self._state._replace(sequences=sequences._replace(active=active))

    def _latest_state(self):
        cache = self._state.cache
        return self._programs.finish(self._programs.copy(cache) if self._is_exact else cache)

    def close(self):
        super().close()
        self._state = self._logits = self._counts = None
        self._options_on_device.clear()


class JaxBatch(XlaBatch):
    """Batch on JAX, into which sequences can be inserted one by one."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        # Threads that compile steps, by `Features` and number of stop tokens.
        self._compiling: dict[Any, threading.Thread] = {}

    def prepare_first_step(self, state):
        """As in `Batch`, in a thread, which the first step waits for."""
        arrays, features = self._inserted
        is_placed = any(isinstance(w, jax.Array) and w.committed for w in self.weights)
        if features.has_grammar or is_placed:
            return
        fields = DeviceState(*(arrays[name] for name in DeviceState._fields))
        cache = self._programs.begin(jax.tree.map(_shape, state))
        self._options_on_device, self._state = arrays, BatchState(fields, cache, ())
        self._compile(features, self._num_stops)

    def _launch(self, features, *others):
        if thread := self._compiling.get((features, self._num_stops)):
            thread.join()
        return super()._launch(features, *others)

    def prepare_slots(self, max_length, num_prompts):
        self.num_prompts = num_prompts
        self._prompt_rows: Any = weakref.WeakValueDictionary()  # {index: `PromptRow` in use}
        self._kinds: list[Any] = []  # `SamplingParams` for which steps were compiled
        self._waiting: Any = (None, None)  # the next `Sequence`, and the `Features` of its steps
        tokens_per_step = TOKENS_OF_STREAM if runs_ahead(self._model) else 1
        self.initial_state = self._prepare(max_length, tokens_per_step)
        # The engine starts at most twice as many prompts as a program processes.
        self._prompts = keras.tree.map_structure(
            lambda array: jnp.repeat(array, 2 * num_prompts, 0), self.initial_state
        )

    def warm_up(self):
        super().warm_up()
        if jax.default_backend() == "gpu":
            self._leave_free_blocks()

    def _leave_free_blocks(self):
        """Leaves free blocks of memory for small arrays, between blocks that stay in use.

        XLA puts an array into the smallest free block that is large enough, and merges adjacent
        free blocks. Without these, tokens and masks would often split the free block of a step's
        temporary arrays. These would then move, and XLA would update all kernels of the CUDA graph:
        0.6 ms for HGRN2 1.3B on an H200.
        """
        masks = neutral_masks(self.num_slots, self._vocabulary_size)
        sizes = 4 * self.num_slots * TOKENS_AHEAD, masks.size
        blocks = [jnp.zeros(size, "uint8") for size in sizes for _ in range(2 * FREE_BLOCKS)]
        self._used_blocks = jax.block_until_ready(blocks)[::2]

    def process(self, states, tokens, mask):
        yield from ()  # one part
        is_new = np.array([state is self.initial_state for state in states])
        rows = [
            self._new_row() if state is self.initial_state else self._row(state) for state in states
        ]
        missing = self.num_prompts - len(rows)
        arguments = (
            np.array([row.index for row in rows] + [2 * self.num_prompts] * missing, "int32"),
            np.pad(is_new, (0, missing)),
            *(self.initial_state, tokens, mask, self.weights),
        )
        self._prompts = self._programs.process(self._prompts, *arguments, variant=self._variant)
        return rows

    def _new_row(self):
        """Returns a `PromptRow` that is not in use."""
        rows = self._prompt_rows
        index = next(index for index in range(2 * self.num_prompts) if index not in rows)
        rows[index] = row = PromptRow(index)
        return row

    def _row(self, state):
        """Returns the `PromptRow` of the state of a prompt."""
        if isinstance(state, PromptRow):
            return state
        row = self._new_row()
        self._prompts = self._programs.set_row(self._prompts, row.index, state)
        return row

    def prompt_state(self, state):
        row = self._row(state)  # it may replace `_prompts`
        return self._programs.extract(self._prompts, row.index)

    def wait(self):
        jax.block_until_ready(self._prompts)

    def _write(self, slot, arrays, state):
        first = {name: array[0] for name, array in arrays.items()}
        sequence = DeviceState(*(first.pop(name) for name in DeviceState._fields))
        stops = self._state.sequences.stops
        if more := self._num_stops - stops.shape[1]:
            stops = jnp.pad(stops, ((0, 0), (0, more)), constant_values=-1)
            sequences = self._state.sequences._replace(stops=stops)
            self._state = self._state._replace(sequences=sequences)
        row = self._row(state)
        self._state = self._programs.insert(self._state, slot, sequence, self._prompts, row.index)
        self._reserve(first)
        for name, value in first.items():
            array = self._options_on_device[name]
            value = np.asarray(value, array.dtype)
            self._options_on_device[name] = self._programs.set_row(array, slot, value)
        if self._counts is not None:
            self._counts = self._programs.set_row(self._counts, slot, np.int32(0))

    def _reserve(self, options):
        """Adds arrays for the options of one sequence, with no effect on other slots."""
        for name, value in options.items():
            if name not in self._options_on_device:
                shape = self.num_slots, *np.shape(value)
                neutral = self._neutral_array(name, shape, value.dtype)
                self._options_on_device[name] = jnp.asarray(neutral)

    def is_ready(self, sequence):
        """As `Batch.is_ready`. If False, background threads compile at most two steps.

        A step covers these options and all earlier ones, which keeps the number of steps small.
        If all slots are free, this method waits for each thread, at most 50 ms.
        """
        needed_stops = max(self._num_stops, num_stops(sequence))
        if self._waiting[0] is not sequence:
            params = [s.params for s in (*self.active, sequence)]
            # Sequences with a grammar may end before those without one.
            plain = [p for p in params if p.grammar is None]
            missing = [
                each
                for each in (params, plain)
                if each
                and not self._covering(features_of(each, self._vocabulary_size), needed_stops)
            ]
            if not missing:
                return True
            self._kinds.append(sequence.params)
            self._waiting = sequence, {*map(self._features_of_kinds, missing)}
            options = option_arrays([sequence.params], [sequence.prompt], self._vocabulary_size)
            self._reserve({name: array[0] for name, array in options.items()})
        keys = [(features, needed_stops) for features in self._waiting[1]]
        for key in keys:
            if key not in self._compiling:
                self._compile(*key)
        for key in keys:
            self._compiling[key].join(0 if self.active else 0.05)
            if self._compiling[key].is_alive():
                return False
        self._known[needed_stops] += self._waiting[1]
        return True

    def _features_of_kinds(self, params):
        """Returns the `Features` of a step for `params`, and for all earlier ones if possible."""
        has_grammar = any(p.grammar is not None for p in params)
        kinds = [p for p in self._kinds if has_grammar or p.grammar is None]
        return features_of([*kinds, *params], self._vocabulary_size)

    def _compile(self, features, num_stops):
        """Starts a thread that compiles a step with these `Features`; such steps wait for it.

        If `num_stops` exceeds the number of stop tokens of the slots, it also compiles `insert`.
        """
        uniform = self._uniform(features, (), 0)
        if features.has_grammar:
            counts = {1, self.tokens_per_mask}
            calls = [("logits", *self._logits_arguments(features, uniform, n)) for n in counts]
            calls.append(("choose", *self._choice_arguments(features, uniform)))
        else:
            calls = [("decode", *self._decoding_arguments(features, uniform))]
        stops = np.zeros((self.num_slots, num_stops), "int32")

        def shapes(arguments):
            state, *others = jax.tree.map(_shape, arguments)
            sequences = state.sequences._replace(stops=_shape(stops))
            return state._replace(sequences=sequences), *others

        # Lowers from shapes, because a running step may overwrite these arrays.
        calls = [(name, shapes(arguments), static) for name, arguments, static in calls]
        if num_stops > self._num_stops:
            state, prompts = shapes((self._state, self._prompts))
            row = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.sequences
            )
            calls.append(("insert", (state, 0, row, prompts, 0), {}))

        def compile_programs():
            for name, arguments, static in calls:
                getattr(self._programs, name).lower(*arguments, **static).compile()

        thread = threading.Thread(target=compile_programs, daemon=True)
        self._compiling[features, num_stops] = thread
        thread.start()

    def slot_state(self, slot):
        return self._programs.extract(self._state.cache, slot)

    def close(self):
        for thread in self._compiling.values():
            thread.join()
        self._prompts = self._used_blocks = None
        super().close()


def distribute(array):
    """Moves an array to the device, or to the devices of `keras.distribution` if one is set."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        on_jax = keras.config.backend() == "jax"
        return jax.device_put(array) if on_jax else ops.convert_to_tensor(array)  # Keras is slower
    layout = drop_uneven_axes(distribution.get_data_layout(array.shape), array.shape)
    return keras.distribution.distribute_tensor(array, layout)


class PromptRow:
    """Row of the states of prompts on the device, which is in use as long as this object."""

    def __init__(self, index):
        self.index = index


def _shape(array):
    """Returns the shape and dtype of an array, and its sharding if the array is committed."""
    is_committed = isinstance(array, jax.Array) and array.committed
    sharding = array.sharding if is_committed else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
