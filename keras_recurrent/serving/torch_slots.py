"""Rows of a batch on torch: the decoding step is a CUDA graph on NVIDIA GPUs, traced on CPUs."""

import contextlib
from typing import Any

import keras
import torch

from keras_recurrent import dispatch
from keras_recurrent.generation.sampling import Features, Logprobs
from keras_recurrent.generation.torch.loop import ActiveSequences, fetch
from keras_recurrent.generation.torch.sampling import choose_tokens


class TorchRows:
    """State of all slots on the device, and the programs that change it.

    Args:
        model: the language model.
        loops: its decoding loops, a `torch.loop.Loop`.
        num_slots: integer, number of rows.
        max_length: integer, the capacity of a row in tokens.
    """

    compiles_steps = False  # sampling is not part of the CUDA graph

    @torch.no_grad()
    def __init__(self, model, loops, num_slots, max_length):
        self._backbone, self._max_length = model.backbone, max_length
        self._stack = contextlib.ExitStack()
        state = self.initial_row(num_slots)
        self._structure = keras.tree.map_structure(lambda t: None, state)
        device = keras.tree.flatten(state)[0].device
        token = torch.zeros(num_slots, 1, dtype=torch.int32, device=device)
        decoder = loops.runner.decode(token, state, _Sampler(), _Sequences(token))
        self._decoder = self._stack.enter_context(decoder)
        self._device = device

    def warm_up(self, chunk_sizes):
        """Does nothing."""

    def initial_row(self, batch_size=1):
        return self._backbone.get_initial_state(batch_size, max_length=self._max_length)

    def asarray(self, array):
        return torch.as_tensor(array, device=self._device)

    def set_row(self, array, slot, value):
        array[slot] = torch.as_tensor(value)
        return array

    @torch.no_grad()
    def process(self, row, tokens, mask):
        count = int(mask.sum())
        tokens = keras.ops.convert_to_tensor(tokens[:, :count])
        return self._backbone.hidden_states(tokens, cache=row)[1]

    @torch.no_grad()
    def insert(self, slot, row, token, max_new_tokens, stops):
        self._decoder.sequences.insert(slot, max_new_tokens, stops)
        token = self.asarray([int(token)]).to(torch.int32)
        targets = [t[slot] for t in self._decoder.tensors]
        values = [*(t[0] for t in keras.tree.flatten(row)), token]
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
        sampler = self._decoder.sampler
        if sampler.counts is not None:
            sampler.counts[slot] = 0

    def stop(self, slot):
        self._decoder.sequences.active[slot] = False

    @torch.no_grad()
    def extract(self, slot):
        rows = [t[slot : slot + 1].clone() for t in self._decoder.tensors[:-1]]
        return keras.tree.pack_sequence_as(self._structure, rows)

    @torch.no_grad()
    def step(self, features, numbers, values):
        sampler, sequences = self._decoder.sampler, self._decoder.sequences
        sampler.features, sampler.arguments, sampler.sequences = features, values, sequences
        sampler.numbers = None if numbers is None else self.asarray(numbers)
        token = fetch(self._decoder.next_token())
        logprobs = [fetch(t) for t in sampler.logprobs]

        def results():
            return token()[:, 0], Logprobs(*(f() for f in logprobs)) if logprobs else ()

        return results

    def close(self):
        self._stack.close()


class _Sampler:
    """Chooses the next token of each slot, outside the CUDA graph of the step."""

    is_capturable = False  # its features change between steps
    features: Any
    arguments: dict[str, Any]
    numbers: Any
    sequences: Any
    counts: Any
    logprobs: list[Any]

    def __init__(self):
        self.features, self.arguments, self.numbers, self.sequences = Features(), {}, None, None
        self.counts, self.logprobs = None, []

    def prepare(self):
        """Does nothing; `TorchRows.step` sets the attributes."""

    def __call__(self, logits):
        features, self.logprobs = self.features, []
        if features == Features():
            return dispatch.run("argmax", {"x": logits})
        if features.has_penalties and self.counts is None:
            self.counts = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
        counts = self.counts if features.has_penalties else None
        token, *new = choose_tokens(
            *(features, logits, self.sequences.stops, self.sequences.count),
            *(self.numbers, counts, dict(sorted(self.arguments.items()))),
        )
        if counts is not None:
            self.counts = new.pop(0)
        self.logprobs = new
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
        self.stops = torch.full_like(token, -1)
        self.active = torch.zeros_like(token, dtype=torch.bool)

    def insert(self, slot, free_length, stops):
        if len(stops) > self.stops.shape[1]:
            more = len(stops) - self.stops.shape[1]
            self.stops = torch.nn.functional.pad(self.stops, (0, more), value=-1)
        self.stops[slot] = torch.as_tensor(stops)
        self.free_length[slot], self.count[slot] = free_length, 0
        self.active[slot] = True

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
        self.stops = other.stops.clone()
        for name in ("free_length", "count", "active"):
            getattr(self, name).copy_(getattr(other, name))
