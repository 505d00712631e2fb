"""Rows of a batch on torch: steps and chunks are CUDA graphs on NVIDIA GPUs."""

import contextlib
from typing import Any

import keras
import numpy as np
import torch

from keras_recurrent import dispatch
from keras_recurrent.generation.sampling import STOPS_PER_STEP, Features, Logprobs, argument_names
from keras_recurrent.generation.torch.chunks import upload
from keras_recurrent.generation.torch.loop import ActiveSequences, Fetch
from keras_recurrent.generation.torch.rows import Extension, Row, Rows
from keras_recurrent.generation.torch.sampling import choose_tokens

MAX_PROMPTS = 8  # of a program: a request waits for it


class TorchRows:
    """State of all slots on the device, and the programs that change it.

    Args:
        model: the language model.
        loops: its decoding loops, a `torch.loop.Loop`.
        num_slots: integer, number of rows.
        max_length: integer, the capacity of a row in tokens.
        num_prompts: integer, the wanted number of prompts of a program.
    """

    compiles_in_background = False  # a CUDA graph capture would stop the device

    @torch.no_grad()
    def __init__(self, model, loops, num_slots, max_length, num_prompts):
        self._backbone, self._max_length = model.backbone, max_length
        self._stack = contextlib.ExitStack()
        state = self._initial_state(num_slots)
        device = keras.tree.flatten(state)[0].device
        token = torch.zeros(num_slots, 1, dtype=torch.int32, device=device)
        decoder = loops.runner.decode(token, state, _Sampler(token), _Sequences(token))
        self._decoder = self._stack.enter_context(decoder)
        self._decoder.sampler.sequences = self._decoder.sequences
        initial = self._initial_state(1)
        self._chunks = loops.runner.chunks(initial, min(num_prompts, MAX_PROMPTS))
        self._device = device
        self.initial_row = self._chunks.row(initial)
        # A step's cache may also have recent tokens, of which a new sequence has none.
        tensors = self._decoder.step.flatten_cache(initial)
        given = {id(t) for t in keras.tree.flatten(initial)}
        indices = [index for index, t in enumerate(tensors) if id(t) in given]
        rows = Rows(tensors)
        self._extend = Extension(rows, rows.copy(0), self._chunks.rows, indices)

    @property
    def num_prompts(self):
        """Maximum number of prompts in one call of `process`."""
        return self._chunks.num_prompts

    def _initial_state(self, batch_size):
        return self._backbone.get_initial_state(batch_size, max_length=self._max_length)

    def asarray(self, array):
        return torch.as_tensor(array, device=self._device)

    def set_row(self, array, slot, value):
        set_row(array, slot, value)
        return array

    def process(self, rows, tokens, mask):
        """Generator that processes a chunk of each of some prompts, one part whenever resumed.

        No other call may begin before the generator has returned.

        Args:
            rows: a list of their states, which are not changed: results of this method,
                `initial_row`, or caches.
            tokens, mask: int32 and boolean [num_prompts, T], NumPy arrays.

        Returns:
            A list of the next states.
        """
        return self._chunks([self._row(row) for row in rows], tokens, mask)

    def _row(self, row):
        return row if isinstance(row, Row) else self._chunks.row(row)

    def cache(self, row):
        """Returns the cache of the backbone, of batch size 1, from a result of `process`."""
        return self._chunks.cache(row)

    @torch.no_grad()
    def insert(self, slot, row, token, max_new_tokens, stops):
        self._decoder.sequences.insert(slot, max_new_tokens, stops)
        self._decoder.rows().set(slot, self._extend(self._row(row)))
        self._decoder.token[slot].fill_(int(token))
        sampler = self._decoder.sampler
        if sampler.counts is not None:
            sampler.counts[slot].zero_()

    def stop(self, slot):
        self._decoder.sequences.active[slot].zero_()

    @torch.no_grad()
    def extract(self, slot):
        rows = self._decoder.rows()
        return self._decoder.step.cache(rows.tensors(rows.copy(slot)))

    @torch.no_grad()
    def step(self, features, numbers, values):
        sampler = self._decoder.sampler
        sampler.begin(features, numbers, values)
        token = Fetch(self._decoder.next_token())
        logprobs = [Fetch(t) for t in sampler.logprobs]

        def results():
            return token()[:, 0], Logprobs(*(f() for f in logprobs)) if logprobs else ()

        return results

    def wait(self):
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self):
        self._stack.close()
        self._chunks = None


class _Sampler:
    """Chooses the next token of each slot. Its features may change between steps.

    Args:
        token: integers [B, 1], a tensor on the device of the model.

    Attributes:
        settings: properties that a captured call depends on: features and addresses.
        buffers: `{name: tensor}` of the tensors that calls overwrite.
        counts: int32 [B, vocabulary], how often each token was generated, or None.
        logprobs: the three tensors of the latest `Logprobs`, or an empty list.
        sequences: the `_Sequences` of the decoder.
    """

    sequences: Any = None
    counts: Any = None

    def __init__(self, token):
        self._features, self._arguments = Features(), {}
        self._numbers = torch.zeros(len(token), device=token.device)
        self._logprobs: dict[Any, list[Any]] = {}
        self.settings: Any = (self._features,)

    def copy(self):
        return self

    def set(self, other):
        """Copies another sampler's settings, to reuse a step captured for an earlier engine."""
        attributes = dict(vars(other))  # `other` may be this object
        vars(self).clear()
        vars(self).update(attributes)

    @property
    def buffers(self):
        return {} if self.counts is None else {"counts": self.counts}

    @property
    def logprobs(self):
        return self._logprobs.get(self.settings, [])

    def begin(self, features, numbers, arguments):
        """Sets the features, random numbers [B] or None, and arguments of the next step.

        Each argument must be the tensor of earlier calls.
        """
        if numbers is not None:
            upload(self._numbers, numbers)
        if features is self._features:
            return
        self._features = features
        self._arguments = {name: arguments[name] for name in argument_names(features)}
        if features.has_penalties and self.counts is None:
            size = len(self._numbers), arguments["in_prompt"].shape[1]
            self.counts = torch.zeros(size, dtype=torch.int32, device=self._numbers.device)
        tensors = [*self._arguments.values()]
        if features.is_random:
            tensors.append(self._numbers)
        if features.has_penalties:
            tensors.append(self.counts)
        self.settings = features, *(t.data_ptr() for t in tensors)

    def prepare(self):
        """Does nothing; `TorchRows.step` calls `begin`."""

    def __call__(self, logits):
        features = self._features
        if features == Features():
            return dispatch.run("argmax", {"x": logits})
        token, *new = choose_tokens(
            *(features, logits, self.sequences.stops, self.sequences.count),
            self._numbers if features.is_random else None,
            self.counts if features.has_penalties else None,
            self._arguments,
        )
        if features.has_penalties:
            self.counts.copy_(new.pop(0))
        self._logprobs[self.settings] = new
        return token


class _Sequences(ActiveSequences):
    """`ActiveSequences` with stop tokens of each slot, which `insert` sets.

    Args:
        token: integers [B, 1], a tensor on the device of the model.

    Attributes:
        free_length: int32 [B], maximum number of further tokens.
        count: int32 [B], number of generated tokens.
        stops: int32 [B, S], stop tokens, padded by -1.
        active: boolean [B, 1], False for slots that are free or whose sequence has ended.
    """

    def __init__(self, token):
        self.free_length, self.count = torch.zeros_like(token[:, 0]), torch.zeros_like(token[:, 0])
        self.stops = torch.full_like(token, -1).repeat(1, STOPS_PER_STEP)
        self.active = torch.zeros_like(token, dtype=torch.bool)

    def insert(self, slot, free_length, stops):
        if len(stops) > self.stops.shape[1]:
            more = len(stops) - self.stops.shape[1]
            self.stops = torch.nn.functional.pad(self.stops, (0, more), value=-1)
        set_row(self.stops, slot, stops)
        self.free_length[slot].fill_(free_length)
        self.count[slot].zero_()
        self.active[slot].fill_(True)

    def advance(self, token, sampled):
        """Returns the next tokens [B, 1]; updates the other tensors in place."""
        token = torch.where(self.active, sampled, token)
        advanced = self.active[:, 0].to(self.count.dtype)
        self.free_length.sub_(advanced)
        self.count.add_(advanced)
        is_stop = (token == self.stops).any(dim=1, keepdim=True)
        self.active.logical_and_((self.free_length[:, None] > 0) & ~is_stop)
        return token

    def set(self, other):
        """Copies the values of another object, in place."""
        if self.stops.shape != other.stops.shape:
            self.stops = other.stops.clone()
        for name, tensor in vars(other).items():
            getattr(self, name).copy_(tensor)


def set_row(array, slot, value):
    """Sets a row to a NumPy array or number of any dtype, without waiting for the device."""
    if np.ndim(value):
        upload(array[slot], np.asarray(value))
    else:
        array[slot].fill_(np.asarray(value).item())  # an assignment waits for a GPU
