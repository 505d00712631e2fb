"""Slots: rows of one batch that decodes with a fixed number of sequences."""

import collections
import math
import time
from typing import Any

import keras
import numpy as np

from keras_recurrent.generation.sampling import (
    STOPS_PER_STEP,
    Features,
    covers,
    features_of,
    neutral_value,
)

MIN_CHUNK = 32  # tokens
MAX_DELAY = 0.43  # of a step, by parts of chunks before it
TIMED_RUNS = 3
# A program of chunks has one prompt for each `SLOTS_PER_PROMPT` slots. With more prompts, a token
# takes less time, but the program takes more. CPUs gain nothing.
SLOTS_PER_PROMPT = 16

Rows: Any
if keras.config.backend() == "torch":
    from keras_recurrent.serving.torch_slots import TorchRows as Rows
elif keras.config.backend() == "jax":
    from keras_recurrent.serving.jax_slots import JaxRows as Rows


class Slots:
    """Sequences that decode together, one in each slot of a batch.

    Args:
        model: the language model.
        loops: its decoding loops.
        num_slots: integer, number of rows.
        max_length: integer, the capacity of a row in tokens.
        max_chunk: integer, maximum number of tokens of a chunk.

    Attributes:
        max_chunk: as above.
        sequences: a list of the `Sequence` in each slot, or None.
    """

    def __init__(self, model, loops, num_slots, max_length, max_chunk):
        self._vocabulary_size = model.backbone.vocabulary_size
        self.sequences: list[Any] = [None] * num_slots
        on_cpu = is_on_cpu(model)
        num_prompts = 1 if on_cpu else max(num_slots // SLOTS_PER_PROMPT, 1)
        self._rows = Rows(model, loops, num_slots, max_length, num_prompts)
        self._num_stops = STOPS_PER_STEP
        self.max_chunk = max_chunk
        # The chunks of prompts that share a program are padded to one size.
        self._chunk_sizes = [max_chunk] if self.num_prompts > 1 else chunk_sizes(max_chunk)
        # The share of the bound on delays that one part takes.
        self._costs = {size: max(size / max_chunk, 1 / 2) for size in self._chunk_sizes}
        self._values: dict[str, Any] = {}  # arguments of sampling, [num_slots, ...]
        # `Features` of steps that have run or are compiled, by number of stop tokens.
        self._known: Any = collections.defaultdict(list)
        # `(slot, sequence)` of the sequences in slots, and `Features` that serve them.
        self._owners: list[Any] = []
        self._features: Any = None
        self._kinds: list[Any] = []  # `SamplingParams` for which steps were compiled
        self._compiling: Any = (None, None)  # the `Sequence` that waits, and `Features`
        if not on_cpu:  # compilation on a CPU takes longer than what it saves
            self._warm_up()

    @property
    def active(self):
        """The sequences in slots."""
        return [sequence for _, sequence in self._owners]

    @property
    def num_active(self):
        return len(self._owners)

    @property
    def num_free(self):
        return len(self.sequences) - len(self._owners)

    def _warm_up(self):
        """Runs the programs of chunks and of a greedy step, so that no request waits for them."""
        row = self._rows.initial_row
        self._rows.insert(0, row, 0, 1, np.full(self._num_stops, -1, "int32"))
        self._rows.stop(0)
        self._rows.extract(0)
        for size in self._chunk_sizes:
            self._time_step(size)  # compiles
        step = min(self._time_step() for _ in range(TIMED_RUNS))[0]
        for size in self._chunk_sizes:
            seconds, num_parts = min(self._time_step(size) for _ in range(TIMED_RUNS))
            cost = (seconds - step) / num_parts / (MAX_DELAY * step)
            self._costs[size] = max(cost, 1 / num_parts)  # a time may be wrong
        self._known[self._num_stops].append(Features())

    def _time_step(self, chunk_size=None):
        """Runs a program of chunks if their size is given, then a greedy step, without sequences.

        Returns:
            The time in seconds, and the number of parts of the program.
        """
        start = time.perf_counter()
        num_parts = 0 if chunk_size is None else self.process_example(chunk_size)
        self._rows.step(Features(), None, {})()
        return time.perf_counter() - start, num_parts

    def process_example(self, chunk_size):
        """Processes chunks of as many prompts as fit into a program; returns the number of parts.

        chunk_size: integer, one of the numbers of tokens to which chunks are padded.
        """
        rows, shape = [self._rows.initial_row] * self.num_prompts, (self.num_prompts, chunk_size)
        parts = self._rows.process(rows, np.ones(shape, "int32"), np.ones(shape, bool))
        return 1 + sum(1 for _ in parts)

    @property
    def num_prompts(self):
        """Maximum number of prompts in one call of `process`."""
        return self._rows.num_prompts

    def _padded_size(self, num_tokens):
        """Returns the number of tokens to which a chunk is padded."""
        return min(size for size in self._chunk_sizes if size >= num_tokens)

    def cost(self, num_tokens):
        """Returns the share of the bound on delays that a part of a program of chunks takes."""
        return self._costs[self._padded_size(num_tokens)]

    def process(self, sequences, stops):
        """Generator that processes a chunk of each sequence's prompt, one part whenever resumed.

        A chunk ends before the token `stop` of its sequence. No other call may begin before the
        generator has returned.
        """
        parts = [s.prompt[s.num_processed : e] for s, e in zip(sequences, stops, strict=True)]
        size = self._padded_size(max(map(len, parts)))
        tokens = np.zeros((self.num_prompts, size), "int32")
        mask = np.zeros(tokens.shape, bool)
        for i, part in enumerate(parts):
            tokens[i, : len(part)], mask[i, : len(part)] = part, True
        rows = [self._rows.initial_row if s.row is None else s.row for s in sequences]
        after = yield from self._rows.process(rows, tokens, mask)
        for sequence, stop, row in zip(sequences, stops, after, strict=True):
            sequence.row, sequence.num_processed = row, stop

    def wait(self):
        """Waits until the device has done all work."""
        self._rows.wait()

    def insert(self, sequence):
        """Moves a sequence to a free slot, after its prompt without the last token is processed."""
        slot = self.sequences.index(None)
        self._reserve(sequence)
        self._num_stops = self._needed_stops(sequence)
        stops = np.full(self._num_stops, -1, "int32")
        stops[: len(sequence.stop_token_ids)] = sorted(sequence.stop_token_ids)
        row = sequence.row if sequence.row is not None else self._rows.initial_row
        self._rows.insert(slot, row, sequence.prompt[-1], sequence.max_new_tokens, stops)
        sequence.row, self.sequences[slot] = None, sequence
        given = sequence.sampling.arguments
        for name, array in self._values.items():
            value = given[name][0] if name in given else neutral_value(name, self._vocabulary_size)
            self._values[name] = self._rows.set_row(array, slot, value)
        self._set_owners()

    def _set_owners(self):
        self._owners = [(slot, s) for slot, s in enumerate(self.sequences) if s is not None]
        self._features = None

    def _reserve(self, sequence):
        """Makes room for the arguments of a sequence."""
        for name, array in sequence.sampling.arguments.items():
            if name not in self._values:
                shape = len(self.sequences), *array.shape[1:]
                neutral = np.full(shape, neutral_value(name, self._vocabulary_size), array.dtype)
                self._values[name] = self._rows.asarray(neutral)

    def is_ready(self, sequence):
        """Returns True if a step of the sequences in slots and this one needs no compilation.

        Otherwise, a background thread compiles one step that covers these options and all earlier
        ones, which keeps the number of steps small. If all slots are free, waits up to 50 ms.
        """
        if not self._rows.compiles_in_background:
            return True
        num_stops, timeout = self._needed_stops(sequence), 0 if self.active else 0.05
        self._reserve(sequence)
        if self._compiling[0] is not sequence:
            params = [s.params for s in (*self.active, sequence)]
            if self._covering(params, num_stops):
                return True
            self._kinds.append(sequence.params)
            features = features_of([*self._kinds, *params], self._vocabulary_size)
            self._compiling = sequence, features
        _, features = self._compiling
        if not self._rows.is_compiled(features, self._values, num_stops, timeout):
            return False
        self._known[num_stops].append(features)
        return True

    def _needed_stops(self, sequence):
        """Returns the number of stop tokens of each slot with this sequence in one."""
        needed = STOPS_PER_STEP * math.ceil(len(sequence.stop_token_ids) / STOPS_PER_STEP)
        return max(self._num_stops, needed)

    def remove(self, sequence, is_active):
        """Frees the slot of a sequence.

        is_active: boolean, True if the next step would still advance the row.
        """
        slot = self.sequences.index(sequence)
        if is_active:
            self._rows.stop(slot)
        self.sequences[slot] = None
        self._set_owners()

    def prompt_state(self, row):
        """Returns the state of the backbone, of batch size 1, from the `row` of a sequence."""
        return self._rows.cache(row)

    def state(self, sequence):
        """Returns a copy of the state of a sequence in a slot, of batch size 1."""
        return self._rows.extract(self.sequences.index(sequence))

    def step(self):
        """Starts one decoding step of all slots.

        Returns:
            A list of the `Sequence`s whose tokens are computed, each with its slot, and a function
            that waits for the tokens [num_slots] and their `Logprobs`, or ().
        """
        owners = self._owners
        if self._features is None:
            self._features = self._choose_features([s.params for _, s in owners])
        numbers = None
        if self._features.is_random:
            numbers = np.zeros(len(self.sequences), "float32")
            for slot, sequence in owners:
                numbers[slot] = sequence.next_number()
        return owners, self._rows.step(self._features, numbers, self._values)

    def _choose_features(self, params):
        """Returns the cheapest known `Features` that serve all params, else new ones.

        A step depends on features, and must not be compiled for each combination of requests.
        """
        known = self._covering(params, self._num_stops)
        if not known:
            known = [features_of(params, self._vocabulary_size)]
            self._known[self._num_stops] += known
        return min(known, key=lambda features: features.cost)

    def _covering(self, params, num_stops):
        """Returns a list of those known `Features` that serve all params."""
        needed = features_of(params, self._vocabulary_size)
        return [f for f in self._known[num_stops] if covers(f, needed, self._vocabulary_size)]

    def close(self):
        """Releases the resources of the device."""
        self._rows.close()


def is_on_cpu(model):
    """Returns True if the weights of a model are in the memory of the host."""
    device = model.variables[0].value.device
    # A device of torch has a type, one of JAX has a platform.
    return getattr(device, "type", None) == "cpu" or getattr(device, "platform", None) == "cpu"


def chunk_sizes(max_chunk):
    """Returns the numbers of tokens to which chunks are padded, in ascending order."""
    sizes = [MIN_CHUNK << n for n in range(max_chunk.bit_length()) if MIN_CHUNK << n < max_chunk]
    if max_chunk >= 4 * MIN_CHUNK:
        sizes = sorted({*sizes, 3 * max_chunk // 4})
    return [*sizes, max_chunk]
