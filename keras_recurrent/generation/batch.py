"""Batches, sequences that decode together, and their decoding loop."""

import collections
import functools
import math
from typing import Any

import keras
import numpy as np

from keras_recurrent.generation.grammar import make_masks, make_matchers
from keras_recurrent.generation.prompts import pad_prompts
from keras_recurrent.generation.sampling import (
    STOPS_PER_STEP,
    Features,
    Logprobs,
    covers,
    features_of,
    neutral_value,
    option_arrays,
)
from keras_recurrent.generation.sampling_params import SamplingParams
from keras_recurrent.generation.sequence import Sequence

# Tokens of each sequence in one step. With `TOKENS_AHEAD`, an accelerator computes the next step
# while the host processes the tokens of the last one: at most seven tokens of a sequence that has
# ended are unused. CPUs and TensorFlow do not run ahead, and use `TOKENS_ON_CPU`.
TOKENS_AHEAD, TOKENS_ON_CPU = 4, 8


class Batch:
    """Sequences that decode together, one in each slot. Base class of the batches of backends.

    Args:
        programs: the `Programs` of the model.
        num_slots: integer.
        keep: boolean, True if the state of a sequence is unchanged after its end.
        reads_tokens: boolean, True if tokens are read before the sequences have ended on the
            device: in a stream, or with stop strings. `state` may then be called earlier, too.
        tokens_per_step: integer, number of tokens of each sequence that a step computes.
        runs_ahead: boolean, True if the next step is launched before the tokens of the last one
            are processed. Subclasses choose `tokens_per_step` and `runs_ahead`.

    Attributes:
        first_tokens: integer or None, number of tokens of the first step, if it differs from
            `tokens_per_step`.
        tokens_per_mask: integer, number of tokens per step of a sequence without a grammar if
            another sequence of the batch has one.
        num_prompts: integer, maximum number of prompts in one call of `process`.
        initial_state: the state of a sequence before all tokens.
        sequences: a list of the `Sequence` in each slot, or None.
        active_slots: a list of `(slot, sequence)` for the sequences that are still decoding.
    """

    initial_state: Any
    num_prompts: int
    tokens_per_mask = 1
    first_tokens: int | None = None
    _first: Any = None  # the state before the first step, from which `state` can start

    def __init__(self, programs, num_slots, keep, reads_tokens, tokens_per_step, runs_ahead):
        self._keep, self._is_exact = keep, keep and reads_tokens
        self._programs, self._model = programs, programs.model
        self._vocabulary_size = programs.model.backbone.vocabulary_size
        self.tokens_per_step, self.runs_ahead = tokens_per_step, runs_ahead
        self.sequences: list[Any] = [None] * num_slots
        self.active_slots: list[Any] = []
        self._matchers: list[Any] = []  # `(matcher, slot)` of active sequences with a grammar
        self._num_stops = STOPS_PER_STEP
        self._options: set[str] = set()  # names of the sampling options that slots have
        self._features: Any = None  # of the sequences in slots; None after a change
        # `Features` of steps that have run or are compiled, by number of stop tokens.
        self._known: Any = collections.defaultdict(list)
        # Set between the two parts of a step with a grammar: a list of the pairs of `step` that the
        # first part launched, and the `active_slots` and `Features` of the token to be chosen.
        self._with_logits: Any = None
        self._inserted: Any = None  # the arrays and `Features` of the sequences of `insert_all`
        self._delayed: list[tuple] = []  # arguments of `_write`, until these logits are used

    @property
    def num_slots(self):
        return len(self.sequences)

    @property
    def num_active(self):
        return len(self.active_slots)

    @property
    def num_free(self):
        return self.num_slots - self.num_active

    @property
    def num_delayed(self):
        """Number of inserted sequences whose states are not yet copied to their slots."""
        return len(self._delayed)

    @property
    def active(self):
        """The sequences that are still decoding."""
        return [sequence for _, sequence in self.active_slots]

    @property
    def has_work(self):
        """True if a sequence may need more tokens than were launched."""
        return any(s.num_launched < s.max_new_tokens for _, s in self.active_slots)

    @property
    def needs_tokens(self):
        """True if the next tokens depend on the last ones because of a grammar."""
        return bool(self._matchers)

    def insert_all(self, sequences, process):
        """Puts a `Sequence` into each slot; `process` is as in `start_decoding`."""
        # One without room for new tokens needs no slot.
        self.sequences = [s if s.finish_reason is None else None for s in sequences]
        self._set_active_slots()
        arrays = self._arrays(sequences)
        self._features = self._choose_features(sequences)
        self._inserted = arrays, self._features
        state = process(self)
        if state is not None:
            self.write(slice(None), state)
        if self._is_exact and self.tokens_per_step > 1:
            self._first = self.state(sequences)

    def prepare_first_step(self, state):
        """Compiles the first step while `insert_all` processes the prompts of its sequences.

        state: the state of one or more sequences before this step, or its shapes.
        """

    def insert(self, sequence, state):
        """Puts a sequence into a free slot; `state` is the state before the last prompt token."""
        slot = self.sequences.index(None)
        self.sequences[slot] = sequence
        self._set_active_slots()
        arguments = slot, self._arrays([sequence]), state
        if self._with_logits is None:
            self._write(*arguments)
        else:  # the pending logits belong to the slot's previous sequence
            self._delayed.append(arguments)

    def make_matchers(self, params, stop_token_ids):
        """Returns the `LLMatcher`s of new sequences; arguments as in `grammar.make_matchers`."""
        preprocessor, size = self._model.preprocessor, self._vocabulary_size
        return make_matchers(preprocessor, size, params, stop_token_ids)

    def _arrays(self, sequences):
        """Returns `{name: array}` of a `DeviceState` and options, a row for each `Sequence`."""
        self._num_stops = max([self._num_stops, *map(num_stops, sequences)])
        arrays = {
            "token": np.array([[s.prompt[-1]] for s in sequences], "int32"),
            "active": np.array([[s.finish_reason is None] for s in sequences]),
            "remaining_tokens": np.array([s.max_new_tokens for s in sequences], "int32"),
            "count": np.zeros(len(sequences), "int32"),
            "stops": np.full((len(sequences), self._num_stops), -1, "int32"),
            "has_grammar": np.array([[s.params.grammar is not None] for s in sequences]),
        }
        for row, sequence in zip(arrays["stops"], sequences, strict=True):
            row[: len(sequence.stop_token_ids)] = sorted(sequence.stop_token_ids)
        params, prompts = [s.params for s in sequences], [s.prompt for s in sequences]
        options = option_arrays(params, prompts, self._vocabulary_size)
        for name in self._options - options.keys():
            options[name] = self._neutral_array(name, len(sequences), None)
        self._options |= options.keys()
        return arrays | options

    def _neutral_array(self, name, shape, dtype):
        """Returns an array of an option with the value that has no effect."""
        return np.full(shape, neutral_value(name, self._vocabulary_size), dtype)

    def _set_active_slots(self):
        self.active_slots = [(n, s) for n, s in enumerate(self.sequences) if s is not None]
        self._matchers = [
            (s.matcher, slot) for slot, s in self.active_slots if s.params.grammar is not None
        ]
        self._features = None

    def remove(self, sequence):
        """Frees the slot of a sequence. Its state can be read until the next step or `insert`."""
        slot = self.sequences.index(sequence)
        if not sequence.ends_on_device:
            self._stop(slot)  # it may fail
        self._delayed = [arguments for arguments in self._delayed if arguments[0] != slot]
        self.sequences[slot] = None
        self._set_active_slots()

    def step(self):
        """Launches a step of all slots: the next tokens of each sequence.

        Returns:
            Two lists of pairs. A pair has slots, as `active_slots`, and a function that waits for
            their tokens `[num_slots, N]` and `Logprobs`, or (), and returns NumPy arrays. The first
            list has the slots with a grammar, whose tokens must be processed before the next step;
            the second list has the others.
        """
        if self.needs_tokens or self._with_logits is not None:
            return self._step_with_grammar()
        features, slots = self._current_features(), self.active_slots
        left = max(s.max_new_tokens - s.num_launched for _, s in slots)
        most = self.tokens_per_step
        if self.first_tokens and not any(s.num_launched for _, s in slots):
            most = self.first_tokens
        count = max(1, min(most, left))
        uniform = self._uniform(features, slots, count)
        for _, sequence in slots:
            sequence.num_launched += count
        return [], [(slots, self._launch(features, uniform, count))]

    def _step_with_grammar(self):
        """Launches a step in two parts: the model, and the choice of a token from its logits.

        The first part includes further tokens of the sequences without a grammar. If the batch runs
        ahead, the first part of the next step is launched as well. It depends on the tokens, but
        not on the masks, which the host makes meanwhile.
        """
        if self._with_logits is None:
            self._begin_token()
        (launched, slots, features), self._with_logits = self._with_logits, None
        masks = make_masks(self._matchers, self.num_slots, self._vocabulary_size)
        uniform = self._uniform(features, slots, 1)
        results = functools.cache(self._launch_choice(features, uniform, masks))
        delayed, self._delayed = self._delayed, []
        for arguments in delayed:
            self._write(*arguments)
        if self.runs_ahead and self.needs_tokens and self.has_work:
            self._begin_token()
        plain, with_grammar = _split(slots)
        return [(with_grammar, results)], [*launched, (plain, results)]

    def _begin_token(self):
        """Launches the model up to the logits of the token that is chosen with masks."""
        slots, features = self.active_slots, self._current_features()
        plain, _ = _split(slots)
        count = self.tokens_per_mask if plain else 1
        uniform = self._uniform(features, plain, count - 1) if count > 1 else None
        for _, sequence in slots:
            sequence.num_launched += count if sequence.params.grammar is None else 1
        results = self._launch_model(features, uniform, count)
        self._with_logits = [(plain, results)] if count > 1 else [], slots, features

    def _uniform(self, features, slots, count):
        """Returns random numbers `[num_slots, tokens_per_step]` for `count` tokens, or None."""
        if not features.is_random:
            return None
        uniform = np.zeros((self.num_slots, self.tokens_per_step), "float32")
        for slot, sequence in slots:
            uniform[slot, :count] = sequence.uniform(count)
        return uniform

    def _current_features(self):
        if self._features is None:
            self._features = self._choose_features(self.active)
        return self._features

    def _choose_features(self, sequences):
        """Returns the cheapest known `Features` that serve all sequences, else new ones.

        A step is compiled for each `Features`. Reusing known ones avoids a compilation for each
        combination of requests.
        """
        needed = features_of([s.params for s in sequences], self._vocabulary_size)
        known = self._covering(needed, self._num_stops)
        if not known:
            known = [needed]
            self._known[self._num_stops] += known
        return min(known, key=lambda features: features.cost)

    def _covering(self, needed, num_stops):
        """Returns a list of the known `Features` that cover `needed`."""
        return [f for f in self._known[num_stops] if covers(f, needed, self._vocabulary_size)]

    def write(self, rows, state):
        """Writes the states of the sequences of `insert_all` in the slots `rows`, a slice.

        state: the state of the backbone before the last token of each prompt, which the batch may
            overwrite.
        """
        raise NotImplementedError

    def _write(self, slot, arrays, state):
        """Overwrites a slot with arrays of one row, and a state of batch size 1."""
        raise NotImplementedError

    def _launch(self, features, uniform, count):
        """Launches at least `count` tokens of each slot; returns the function of `step`.

        Args:
            features: the `Features` of the step, without a grammar.
            uniform: float32 `[num_slots, tokens_per_step]`, random numbers, or None.
            count: integer.
        """
        raise NotImplementedError

    def _launch_model(self, features, uniform, count):
        """Launches the model up to the logits of the token that `_launch_choice` chooses.

        Args:
            features, uniform: as in `_launch_choice`.
            count: integer, 1 or `tokens_per_mask`. Sequences without a grammar first generate
                `count - 1` tokens. The logits are then those of the next token of each sequence.

        Returns:
            The function that `step` returns for these tokens; unused if `count` is 1.
        """
        raise NotImplementedError

    def _launch_choice(self, features, uniform, masks):
        """Launches the choice of one token of each slot; returns the function that `step` returns.

        Args:
            features, uniform: as in `_launch`, with a grammar.
            masks: uint8 `[num_slots, N]`, the masks from `make_masks`.
        """
        raise NotImplementedError

    def _stop(self, slot):
        """Makes later steps leave the state of a slot unchanged."""
        raise NotImplementedError

    def state(self, sequences):
        """Returns the state of the backbone before the last token of the sequences of all slots.

        If the device is ahead of the tokens on the host, the new tokens are processed again from
        the state before the first step.
        """
        if any(not s.ends_on_device and s.num_launched > len(s.token_ids) for s in sequences):
            return process_new_tokens(self._programs, self._first, sequences)
        return self._latest_state()

    def _latest_state(self):
        """Returns the current state on the device. If `_is_exact`, later steps do not change it."""
        raise NotImplementedError

    def close(self):
        """Releases the memory of the device."""
        self._first = self._with_logits = None

    # The engine inserts sequences one by one, after chunks of their prompts. The state of one
    # sequence is a state of the backbone of batch size 1, or a value that only the batch reads.

    def pack(self, cache):
        """Converts a state of the backbone, of batch size 1, to the state of a sequence."""
        return cache

    def unpack(self, state):
        """Converts a result of `pack` or `prompt_state` to a state of the backbone."""
        return state

    def prepare_slots(self, max_length, num_prompts):
        """Prepares free slots, each with a capacity of `max_length` tokens.

        num_prompts: integer, the preferred `num_prompts` of this batch.
        """
        raise NotImplementedError

    def _prepare(self, max_length, tokens_per_step=1):
        """Fills the slots with initial states; returns the initial state of one sequence."""
        self.tokens_per_step, self.runs_ahead = tokens_per_step, True
        arrays = self._arrays([_greedy_sequence(max_new_tokens=0)] * self.num_slots)
        self._inserted, backbone = (arrays, Features()), self._model.backbone
        state = backbone.get_initial_state(self.num_slots, max_length=max_length)
        self.write(slice(None), state)
        return backbone.get_initial_state(1, max_length=max_length)

    def is_ready(self, sequence):
        """Returns True if a step of the sequences in slots and this one needs no compilation."""
        return True

    def warm_up(self):
        """Runs what the first sequence needs: `insert`, a greedy step, `slot_state`, `remove`."""
        sequence = _greedy_sequence(max_new_tokens=1)
        self.insert(sequence, self.initial_state)
        self.slot_state(0)
        self.prompt_state(self.initial_state)
        self.remove(sequence)
        self._known[self._num_stops].append(Features())
        self.run_empty_step(Features())

    def run_empty_step(self, features):
        """Computes a step while all slots are free."""
        self._launch(features, None, 1)()

    def process(self, states, tokens, mask):
        """Generator that processes a chunk of each prompt, one part each time it is resumed.

        No other call may begin before the generator has returned.

        Args:
            states: a list with the state of each prompt; they are not overwritten.
            tokens, mask: int32 and boolean `[num_prompts, T]`, NumPy arrays.

        Returns:
            A list of the next states.
        """
        raise NotImplementedError

    def score(self, tokens, targets, mask, state, num_top):
        """Returns the `Logprobs` of a chunk of one prompt, NumPy arrays, and the next state.

        Arguments are as in `_score_tokens` of the model. The state before the chunk remains valid.
        """
        state = self.unpack(state)
        if num_top:  # a power of two, so that few programs serve all values
            num_top = min(1 << (num_top - 1).bit_length(), self._vocabulary_size)
        *found, state = self._programs.score(tokens, targets, mask, state, num_top)
        return Logprobs(*found), self.pack(state)

    def prompt_state(self, state):
        """Converts a result of `process` to a state that may be kept for any time."""
        return state

    def slot_state(self, slot):
        """Returns a copy of the state of the sequence in a slot."""
        raise NotImplementedError

    def wait(self):
        """Waits until the device has done all work."""
        raise NotImplementedError


class DecodingLoop:
    """Decodes the sequences of a `Batch` until they end.

    Attributes:
        batch: the `Batch`.
        num_tokens: integer, number of new tokens of all sequences so far.
    """

    def __init__(self, batch):
        self.batch, self.num_tokens = batch, 0
        self._launched = None  # result of the latest `Batch.step`, until it is fetched
        self._columns = iter(())  # slots, tokens and log probabilities on the host

    def advance(self):
        """Processes the next token of each sequence; returns False if all have ended.

        If the batch runs ahead, the device computes the next step while the host processes the
        tokens of the previous one, except those on which the next step depends.
        """
        if not self.batch.active_slots:
            return False
        column = next(self._columns, None)
        if column is None:
            with_grammar, others = self._launched or self.batch.step()
            for each in _columns(with_grammar):
                self._process(*each)
            runs_ahead = self.batch.runs_ahead and self.batch.has_work
            self._launched = self.batch.step() if runs_ahead else None
            self._columns = _columns(others)
            column = next(self._columns)
        self._process(*column)
        return True

    def _process(self, slots, tokens, logprobs):
        """Passes the tokens [B] and `Logprobs` of a column to the sequences that have not ended."""
        ended = []
        for slot, sequence in slots:
            if sequence.finish_reason is not None:
                continue
            row = None
            if logprobs and sequence.params.logprobs is not None:
                row = Logprobs(*(array[slot] for array in logprobs))
            self.num_tokens += 1
            sequence.add(tokens[slot], row)
            if sequence.finish_reason is not None:
                ended.append(sequence)
        self._deliver()
        for sequence in ended:  # last, so that no token waits for the removal
            self._end(sequence)

    def _deliver(self):
        """Called after the tokens of a step; listeners have them already."""

    def _end(self, sequence):
        self.batch.remove(sequence)


def _split(slots):
    """Splits pairs of slots and sequences into those without a grammar and those with one."""
    plain = [(slot, s) for slot, s in slots if s.params.grammar is None]
    return plain, [(slot, s) for slot, s in slots if s.params.grammar is not None]


def _columns(launched):
    """Waits for results of a step; yields slots, tokens [B] and `Logprobs` of each position."""
    for slots, results in launched:
        tokens, logprobs = results()
        for t, column in enumerate(tokens.T.tolist()):
            yield slots, column, logprobs and Logprobs(*(array[:, t] for array in logprobs))


def start_decoding(programs, sequences, process, keep=False, reads_tokens=False):
    """Returns the `DecodingLoop` of the sequences of one call of `generate` or `stream`.

    keep and reads_tokens are as in `Batch`.

    process: a function of the `Batch`. It returns the state before the last token of each prompt,
        which the loop may overwrite, or passes it to `Batch.write` and returns None.
    """
    batch = programs.batch(len(sequences), keep, reads_tokens)
    batch.insert_all(sequences, process)
    return DecodingLoop(batch)


def process_new_tokens(programs, state, sequences):
    """Returns the state before the last token of each of the `Sequence`s.

    state: the state before the last tokens of the prompts.
    """
    tokens = [[s.prompt[-1], *s.token_ids][: len(s.token_ids)] for s in sequences]
    lengths = np.array(list(map(len, tokens)), "int32")
    token_ids = pad_prompts(tokens, max(1, lengths.max()))["token_ids"]
    return programs.prefill(token_ids, lengths, state)


def _greedy_sequence(max_new_tokens):
    return Sequence(np.zeros(1, "int32"), SamplingParams(temperature=0), None, max_new_tokens)


def num_stops(sequence):
    """Returns the number of stop tokens of a sequence, as padded for a step."""
    return STOPS_PER_STEP * math.ceil(len(sequence.stop_token_ids) / STOPS_PER_STEP)


def runs_ahead(model):
    """Returns True if the device of a model computes while the host does other work."""
    return keras.config.backend() != "tensorflow" and not is_on_cpu(model)


def is_on_cpu(model):
    """Returns True if the weights of a model are in the memory of the host."""
    device = model.variables[0].value.device
    # A device of torch has a type, one of JAX has a platform, one of TensorFlow is a string.
    name = getattr(device, "type", None) or getattr(device, "platform", device)
    return "cpu" in str(name).lower()
