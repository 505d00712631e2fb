"""Batches and decoding steps on torch: the model, sampling and the ends of sequences."""

import functools
import threading
from typing import Any

import numpy as np
import optree
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from keras_recurrent import dispatch
from keras_recurrent.generation.batch import TOKENS_AHEAD, TOKENS_ON_CPU, Batch, runs_ahead
from keras_recurrent.generation.sampling import Features, Logprobs, argument_names, next_tokens
from keras_recurrent.generation.sequence import DeviceState, advance

tracing = threading.RLock()  # tracing in Keras and torch uses global state of the process


class TorchBatch(Batch):
    """Batch on torch. Arguments as in `Batch`.

    The state of one sequence is a list with a tensor `[n, 1, ...]` for each group of n tensors of
    one shape and dtype, because the host needs time for each tensor that it copies.
    """

    _decoder: Any = None
    _chunks: Any = None
    _read_slot: Any = None

    def __init__(self, programs, num_slots, keep, reads_tokens=False):
        ahead = runs_ahead(programs.model)
        on_cpu = 1 if keep and reads_tokens else TOKENS_ON_CPU
        tokens_per_step = TOKENS_AHEAD if ahead else on_cpu
        super().__init__(programs, num_slots, keep, reads_tokens, tokens_per_step, ahead)
        self.first_tokens = 1 if self._is_exact else None  # so that a stream begins early
        self._device = programs.model.variables[0].value.device
        self._uploads = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._before_model: Any = None

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
        self._read_slot = self._decoder.slot_reader(self._groups)

    @torch.no_grad()
    def prepare_first_step(self, state):
        self._programs.decoding_step(state, self.num_slots, self._keep)

    @torch.no_grad()
    def write(self, rows, state):
        if self._decoder is None:
            arrays, features = self._inserted
            tensors = {n: torch.as_tensor(a, device=self._device) for n, a in arrays.items()}
            options = self.tokens_per_step, self._keep
            self._decoder = self._programs.decoder(state, tensors, features, *options)
        self._decoder.write(rows, state)

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
    def _launch_model(self, features, uniform, count):
        self._decoder.prepare(features)  # before uploads, because a capture restores tensors
        if self._uploads:
            self._before_model = torch.cuda.current_stream(self._device).record_event()
        self._decoder.prepare(None)()

    @torch.no_grad()
    def _launch_choice(self, features, uniform, masks):
        choose = self._decoder.prepare(features)
        with torch.cuda.stream(self._uploads):  # while the model runs
            if self._uploads:
                self._uploads.wait_event(self._before_model)
            self._upload("uniform", uniform)
            self._upload("grammar", masks)
        if self._uploads:
            torch.cuda.current_stream(self._device).wait_stream(self._uploads)
        choose()
        return self._begin_results(features, 1)

    def _upload(self, name, array):
        if array is not None:
            upload(self._decoder.tensors[name], array)

    def _begin_results(self, features, count):
        """Starts to copy tokens and log probabilities to the host; returns as `_launch` does."""
        latest = self._decoder.latest(features, count)
        copies = optree.tree_map(lambda t: t.to("cpu", non_blocking=True, copy=True), latest)
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
    def _latest_state(self):
        return self._decoder.step.cache(clone_all(self._decoder.cache))

    @torch.no_grad()
    def slot_state(self, slot):
        return self._read_slot(slot)

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
        super().close()
        if self._decoder is not None:
            self._programs.release(self._decoder)
        self._decoder = self._chunks = self._read_slot = None


def _set_row(tensor, slot, value):
    """Sets a row to a NumPy array or number of any dtype, without waiting for the device."""
    if np.size(value) > 1:
        upload(tensor[slot], np.asarray(value))
    else:
        tensor[slot].fill_(np.asarray(value).item())  # an assignment waits for a GPU


class Decoder:
    """Decodes a batch by calling the functions of a step one by one.

    Args:
        step: the `Step` of the model, also an attribute.
        run: the fastest function of `step`.
        prepared: the tensors of `step.prepared()`.
        tensors: `{name: tensor}`, the fields of a `DeviceState` and the arguments of sampling.
        tokens_per_step: integer R, maximum number of tokens between two calls of `latest`.

    Attributes:
        cache: a list of the tensors of a cache, as the step takes them, after the latest token.
        tensors: as above, after the latest token. Sampling adds `recent` `[B, R]`, `uniform`
            `[B, R]`, `counts` `[B, vocabulary]` and log probabilities `[B, R, ...]`.
    """

    cache: Any = None

    def __init__(self, step, run, prepared, tensors, tokens_per_step):
        self.step, self._run, self._prepared = step, run, prepared
        self.tensors = dict(tensors)
        self._tokens_per_step = tokens_per_step
        self._choices: dict = {}  # the functions that choose tokens, by `Features`
        if tokens_per_step > 1:
            self.allocate("recent", (tokens_per_step,), torch.int32)

    def write(self, rows, cache):
        """Overwrites the caches of some sequences, the slice `rows`; `cache` may be kept."""
        flat = self.step.flatten_cache(cache)
        if len(flat[0]) == len(self.tensors["token"]):
            self.cache = flat
            return
        if self.cache is None:
            self.cache = self.step.allocate_cache(flat[0].device)
        copy_all([t[rows] for t in self.cache], flat)

    def allocate(self, name, shape, dtype=torch.float32):
        """Adds a tensor of zeros `[B, *shape]`, unless there is one of this name."""
        if name not in self.tensors:
            token = self.tensors["token"]
            size = len(token), *shape
            self.tensors[name] = torch.zeros(size, dtype=dtype, device=token.device)

    def set_tensor(self, name, value):
        """Replaces a tensor; the shape may change."""
        self.tensors[name] = value
        self._choices.clear()

    def prepare(self, features):
        """Allocates tensors, and returns a function that decodes the next token of each sequence.

        The function has no arguments. If `features` is None, it only updates the logits and the
        cache. If they have a grammar, it only chooses tokens from these logits.
        """
        if features is None:
            return functools.partial(self._advance, None)
        size = self._tokens_per_step
        if features.is_random:
            self.allocate("uniform", (size,))
        if features.has_penalties:
            self.allocate("counts", (self.step.vocabulary_size,), torch.int32)
        if features.num_logprobs is not None:
            names = logprob_names(features)
            self.allocate(names[0], (size,))
            self.allocate(names[1], (size, features.num_logprobs))
            self.allocate(names[2], (size, features.num_logprobs), torch.int32)
        function = self._choose_tokens if features.has_grammar else self._advance
        return functools.partial(function, features)

    def _choose_tokens(self, features):
        self._store(self.cache, self._choice(features, self.logits))

    def _choice(self, features, logits):
        """Returns the tensors that change with the next tokens, `{name: tensor}`."""
        if features not in self._choices:
            masked = self.step.masked
            self._choices[features] = make_choice(features, masked, logits, self.tensors)
        return self._choices[features](logits, self.tensors)

    def _advance(self, features):
        self.step.count += 1
        tensors = self.tensors
        mask = (tensors["active"],) if self.step.masked else ()
        logits, *cache = self._run(*self._prepared, tensors["token"], *mask, *self.cache)
        # Sampling precedes the copies, so that its kernel directly follows the kernel of the
        # logits, and may begin before that kernel ends (PDL).
        if features is None:
            self.logits, new = logits, {}
        else:
            new = self._choice(features, logits)
        self._store(cache, new)

    def _store(self, cache, new):
        """Replaces the tensors of the cache, and `tensors` by `new`, `{name: tensor}`."""
        self.cache = cache
        self.tensors.update(new)

    def read_slot(self, slot):
        """Returns a copy of the cache of a slot: a `[n, 1, ...]` tensor for each step group."""
        return stack_groups([t[slot : slot + 1] for t in self.cache], self.step.groups)

    def slot_reader(self, groups):
        """Returns a function that maps a slot to its state, with recent tokens applied.

        groups: the result of `group_equal` for a state, without recent tokens.
        """
        if len(groups) == len(self.step.groups):
            return self.read_slot

        def apply(stacks):
            cache = self.step.cache(unstack_groups(stacks, self.step.groups))
            return stack_groups(optree.tree_leaves(cache), groups)

        return self._reader(apply)

    def _reader(self, apply):
        """Returns a function that maps a slot to `apply(read_slot(slot))`."""
        return lambda slot: apply(self.read_slot(slot))

    def write_slot(self, slot, stacks):
        """Overwrites the cache of a slot; `stacks` are as `read_slot` returns them."""
        values = unstack_groups(stacks, self.step.groups)
        copy_all([t[slot : slot + 1] for t in self.cache], values)

    def latest(self, features, count):
        """Returns the `count` latest tokens `[B, count]`, and their `Logprobs` or ()."""
        tokens = self.tensors["token"]
        if "recent" in self.tensors:
            tokens = self.tensors["recent"][:, -count:]
        names = [] if features.num_logprobs is None else logprob_names(features)
        logprobs = [self.tensors[name][:, -count:] for name in names]
        return tokens, Logprobs(*logprobs) if logprobs else ()

    def logits_of(self, token, cache):
        """Returns the logits after a token of each sequence, and the next cache."""
        self._store(cache, {"token": token})
        self.prepare(None)()
        return self.logits, self.cache


def logprob_names(features):
    """Returns the names of the tensors of `Logprobs`, in the order of its fields."""
    return [f"{name}_{features.num_logprobs}" for name in Logprobs._fields]


def make_choice(features, masked, logits, tensors):
    """Returns a function `(logits, tensors)` that chooses the next tokens without calling Keras.

    The function is a torch graph that was traced once for the shapes of `logits` and `tensors`, or
    a kernel. It returns the tensors that change as `{name: tensor}`, or overwrites them and returns
    an empty dictionary. If `masked` is True, sequences end on the device.
    """
    is_argmax = features == Features() and not masked
    writes_argmax = is_argmax and "recent" in tensors
    if writes_argmax and dispatch.choose("argmax", {"x": logits}).implementation == "triton":
        from keras_recurrent.backends.triton.argmax import write_argmax

        def overwrite_token(logits, tensors):
            write_argmax(logits, tensors["token"], tensors["recent"])
            return {}

        return overwrite_token
    names = tuple(sorted(tensors))
    inputs = [logits, *(tensors[name] for name in names)]
    specs = tuple((tuple(t.shape), t.dtype, t.device) for t in inputs)
    choose, changed = _traced(features, is_argmax, names, specs, dispatch.chosen_name())

    def run(logits, tensors):
        new = choose(logits, *[tensors[name] for name in names])
        return dict(zip(changed, new, strict=True))

    return run


def _choose(features, is_argmax, logits, tensors):
    """Chooses the next tokens; returns what the function of `make_choice` returns."""
    uniform = tensors["uniform"] if features.is_random else None
    counts = tensors["counts"] if features.has_penalties else None
    state = None if is_argmax else DeviceState(*(tensors[name] for name in DeviceState._fields))
    first = None if uniform is None else uniform[:, 0]
    arguments = {name: tensors[name] for name in argument_names(features)}
    token, counts, logprobs = next_tokens(features, logits, state, first, counts, arguments)
    if is_argmax:
        new = {"token": token.to(tensors["token"].dtype)[:, None]}
    else:
        new = advance(state, token)._asdict()
        del new["stops"], new["has_grammar"]  # which do not change
    latest = {"recent": new["token"]}
    if uniform is not None and uniform.shape[1] > 1:
        latest["uniform"] = uniform[:, :1]  # the next number becomes the first
    if logprobs:
        latest |= dict(zip(logprob_names(features), (t[:, None] for t in logprobs), strict=True))
    for name, value in latest.items():
        if name in tensors:  # `[B, R, ...]`, of which the first is dropped
            new[name] = torch.cat((tensors[name][:, 1:], value), dim=1)
    return new if counts is None else {**new, "counts": counts}


@functools.lru_cache(maxsize=32)
def _traced(features, is_argmax, names, specs, implementation):
    """Returns the traced `_choose`, a function of logits and tensors, and the names of its results.

    `specs` are the shape, dtype and device of the logits and of each tensor. `implementation` is
    only part of the cache key.
    """
    changed: list[str] = []

    def choose(logits, *tensors):
        new = _choose(features, is_argmax, logits, dict(zip(names, tensors, strict=True)))
        changed[:] = new
        return tuple(new.values())

    examples = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in specs]
    with tracing, torch.no_grad():
        graph = make_fx(choose)(*examples)
    graph.graph.eliminate_dead_code()  # such as the log sum of `top_logits`
    graph.recompile()
    return graph, changed


def upload(buffer, array):
    """Copies a NumPy array to a tensor of its shape, without waiting for the device."""
    host = torch.from_numpy(array)
    buffer.copy_(host.pin_memory() if buffer.is_cuda else host, non_blocking=True)


def overwrite(tensors, after):
    """Overwrites tensors with new values, which may be views of the tensors."""
    addresses = {t.untyped_storage().data_ptr() for t in tensors}
    targets, values = [], []
    for t, new in zip(tensors, after, strict=True):
        # A tensor that the step has overwritten in place is its own new value. Other views of the
        # tensors are copied before any of these is overwritten.
        if new is not t:
            is_view = new.untyped_storage().data_ptr() in addresses
            targets.append(t)
            values.append(new.clone() if is_view else new)
    copy_all(targets, values)


def copy_all(targets, values):
    """Copies tensors to others by one launch for each dtype."""
    by_dtype: dict = {}
    for target, value in zip(targets, values, strict=True):
        pair = by_dtype.setdefault(value.dtype, ([], []))
        pair[0].append(target)
        pair[1].append(value)
    for pair in by_dtype.values():
        torch._foreach_copy_(*pair)


def clone_all(tensors):
    """Returns contiguous copies of tensors, made by one launch for each dtype."""
    copies = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    copy_all(copies, tensors)
    return copies


def group_equal(tensors, first):
    """Groups the indices of tensors by shape and dtype; returns a list of lists.

    first: tensors whose groups precede the groups of all other tensors.
    """
    first, groups = {id(t) for t in first}, ({}, {})
    for index, t in enumerate(tensors):
        groups[id(t) not in first].setdefault((t.shape, t.dtype), []).append(index)
    return [*groups[0].values(), *groups[1].values()]


def stack_groups(tensors, groups):
    """Returns a new tensor `[n, ...]` for each group of n tensors of one shape and dtype."""
    return [torch.stack([tensors[index] for index in group]) for group in groups]


def unstack_groups(stacks, groups):
    """Returns views of the stacks in the order of the original tensors; inverts `stack_groups`."""
    tensors: dict = {}
    for stack, group in zip(stacks, groups, strict=True):
        tensors.update(zip(group, stack.unbind(), strict=True))
    return [tensors[index] for index in range(len(tensors))]
