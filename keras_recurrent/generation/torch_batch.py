"""Batches on torch: steps and chunks are CUDA graphs on NVIDIA GPUs."""

from typing import Any

import numpy as np
import optree
import torch

from keras_recurrent.generation.batch import TOKENS_AHEAD, TOKENS_ON_CPU, Batch, runs_ahead
from keras_recurrent.generation.torch.chunks import upload
from keras_recurrent.generation.torch.decoder import (
    CapturedDecoder,
    capture,
    clone_all,
    copy_all,
    stack_groups,
    unstack_groups,
)
from keras_recurrent.generation.torch.step import group_equal


class TorchBatch(Batch):
    """Batch on torch. Arguments as in `Batch`.

    The state of one sequence is a list with a tensor `[n, 1, ...]` for each group of n tensors of
    one shape and dtype, because the host needs time for each tensor that it copies.
    """

    _decoder: Any = None
    _chunks: Any = None
    _read_slot: Any = None

    def __init__(self, model, programs, num_slots, keep, reads_tokens=False):
        is_exact = keep and reads_tokens  # the device must not be ahead when `state` is called
        ahead = runs_ahead(model) and not is_exact
        tokens_per_step = 1 if is_exact else TOKENS_AHEAD if ahead else TOKENS_ON_CPU
        super().__init__(model, num_slots, tokens_per_step, ahead)
        self._programs, self._keep = programs, keep
        self._device = model.variables[0].value.device

    @torch.no_grad()
    def prepare_slots(self, max_length, num_prompts):
        initial = self._prepare(max_length)
        leaves, self._structure = optree.tree_flatten(initial)
        self._groups = group_equal(leaves, leaves)
        self._chunks = self._programs.chunks(initial, num_prompts)
        self.num_prompts = 1 if self._chunks is None else num_prompts
        step = self._decoder.step
        stacks = stack_groups(step.flatten_cache(initial), step.groups)
        # The cache of a step may also have groups of recent tokens, of which a prompt has none.
        count = len(self._groups)
        self.initial_state, self._no_recent_tokens = stacks[:count], stacks[count:]
        self._read_slot = self._make_slot_reader()

    @torch.no_grad()
    def prepare_first_step(self, sequences, state):
        self._programs.decoding_step(state, self._keep)

    @torch.no_grad()
    def _write_all(self, arrays, features, state):
        tensors = {n: torch.as_tensor(array, device=self._device) for n, array in arrays.items()}
        options = self.tokens_per_step, self._keep
        self._decoder = self._programs.decoder(state, tensors, features, *options)

    @torch.no_grad()
    def _write(self, slot, arrays, state):
        tensors = self._decoder.tensors
        for name, array in arrays.items():
            if name not in tensors:
                shape = self.num_slots, *array.shape[1:]
                neutral = torch.as_tensor(self._neutral_array(name, shape, array.dtype))
                tensors[name] = neutral.to(self._device)
            elif tensors[name].shape[1:] < array.shape[1:]:  # more stop tokens
                more = array.shape[1] - tensors[name].shape[1]
                padded = torch.nn.functional.pad(tensors[name], (0, more), value=-1)
                self._decoder.set_tensor(name, padded)
            _set_row(tensors[name], slot, array[0])
        if "counts" in tensors:
            tensors["counts"][slot].zero_()
        self._decoder.write_slot(slot, [*self.pack(state), *self._no_recent_tokens])

    @torch.no_grad()
    def _launch(self, features, uniform, count):
        advance = self._decoder.prepare(features)
        self._upload("uniform", uniform)
        for _ in range(count):
            advance()
        return self._begin_results(features, count)

    @torch.no_grad()
    def _launch_model(self):
        self._decoder.prepare(None)()

    @torch.no_grad()
    def _launch_choice(self, features, uniform, masks):
        choose = self._decoder.prepare(features)
        self._upload("uniform", uniform)
        self._upload("grammar", masks)
        choose()
        return self._begin_results(features, 1)

    def _upload(self, name, array):
        if array is not None:
            upload(self._decoder.tensors[name], array)

    def _begin_results(self, features, count):
        """Starts to copy tokens and log probabilities to the host; returns as `_launch` does."""
        copies = optree.tree_map(_copy_to_host, self._decoder.latest(features, count))
        event = torch.cuda.Event() if self._device.type == "cuda" else None
        if event:
            event.record()

        def results():
            if event:
                event.synchronize()
            return optree.tree_map(torch.Tensor.numpy, copies)

        return results

    def _stop(self, slot):
        self._decoder.tensors["active"][slot].zero_()

    @torch.no_grad()
    def state(self, sequences):
        return self._decoder.step.cache(clone_all(self._decoder.cache))

    @torch.no_grad()
    def slot_state(self, slot):
        return self._read_slot(slot)

    def _make_slot_reader(self):
        """Returns a function that maps a slot to its state.

        Recent tokens are applied by a CUDA graph on NVIDIA GPUs. When a sequence ends, all others
        wait for the host, which would take 2 ms to launch the operations one by one.
        """
        decoder = self._decoder
        if not self._no_recent_tokens:
            return decoder.read_slot

        def apply(stacks):
            cache = decoder.step.cache(unstack_groups(stacks, decoder.step.groups))
            return stack_groups(optree.tree_leaves(cache), self._groups)

        if not isinstance(decoder, CapturedDecoder):
            return lambda slot: apply(decoder.read_slot(slot))
        buffers = decoder.read_slot(0)
        stacks = apply(buffers)
        graph, _ = capture(lambda: copy_all(stacks, apply(buffers)), self._device)

        def replay(slot):
            copy_all(buffers, decoder.read_slot(slot))
            graph.replay()
            return [stack.clone() for stack in stacks]

        return replay

    @torch.no_grad()
    def pack(self, cache):
        if isinstance(cache, list):
            return cache
        return stack_groups(optree.tree_leaves(cache), self._groups)

    def unpack(self, state):
        if not isinstance(state, list):
            return state
        return optree.tree_unflatten(self._structure, unstack_groups(state, self._groups))

    def process(self, states, tokens, mask):
        states = [self.pack(state) for state in states]
        if self._chunks is None:
            cache = self._programs.prefill(tokens, mask.sum(1), *map(self.unpack, states))
            return [self.pack(cache)]
        return (yield from self._chunks(states, tokens, mask))

    def wait(self):
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self):
        if self._decoder is not None:
            self._programs.release(self._decoder)
        self._decoder = self._chunks = self._read_slot = None


def _copy_to_host(tensor):
    return tensor.to("cpu", non_blocking=True, copy=True)


def _set_row(tensor, slot, value):
    """Sets a row to a NumPy array or number of any dtype, without waiting for the device."""
    if np.size(value) > 1:
        upload(tensor[slot], np.asarray(value))
    else:
        tensor[slot].fill_(np.asarray(value).item())  # an assignment waits for a GPU
