"""Decoding steps of a batch on torch: the model, sampling and the ends of sequences.

A `Decoder` calls the functions of a step one by one. A `CapturedDecoder` owns tensors at fixed
addresses and replays CUDA graphs, one for each `Features`, by which the host launches all kernels
of a step at once. It serves one call at a time.
"""

import collections
import contextlib
import functools
import gc
import math
import queue
import threading
import warnings
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from keras_recurrent import dispatch
from keras_recurrent.generation.sampling import Features, Logprobs, argument_names, next_tokens
from keras_recurrent.generation.sequence import DeviceState, advance
from keras_recurrent.generation.torch.step import tracing

_capturing = threading.Lock()  # torch aborts if two threads capture at once

# The tensors of unused decoders take at most 1 / POOL_DIVISOR of the device memory. The most
# recent shapes are always kept, and temporary memory of a step is not counted.
POOL_DIVISOR = 16
ALIGNMENT = 16  # elements, and so at least 16 bytes


class Decoder:
    """Decodes a batch by calling the functions of a step one by one.

    Args:
        step: the `Step` of the model.
        run: the fastest function of `step`.
        prepared: the tensors of `step.prepared()`.
        cache: a list of the tensors of a cache, as the step takes them.
        tensors: `{name: tensor}`, the fields of a `DeviceState` and the arguments of sampling.
        tokens_per_step: integer R, maximum number of tokens between two calls of `latest`.

    Attributes:
        step, cache, tensors: as above, after the latest token. Sampling adds `recent` `[B, R]`,
            `uniform` `[B, R]`, `counts` `[B, vocabulary]` and log probabilities `[B, R, ...]`.
    """

    def __init__(self, step, run, prepared, cache, tensors, tokens_per_step):
        self.step, self._run, self._prepared = step, run, prepared
        self.cache, self.tensors = list(cache), dict(tensors)
        self._tokens_per_step = tokens_per_step
        self._choices: dict = {}  # the functions that choose tokens, by `Features`
        if tokens_per_step > 1:
            self.allocate("recent", (tokens_per_step,), torch.int32)

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

    def allocate_for(self, features):
        """Allocates the tensors for steps with these `Features`; None is without sampling."""
        size = self._tokens_per_step
        if features is None:
            return
        if features.is_random:
            self.allocate("uniform", (size,))
        if features.has_penalties:
            self.allocate("counts", (self.step.vocabulary_size,), torch.int32)
        if features.num_logprobs is not None:
            names = logprob_names(features)
            self.allocate(names[0], (size,))
            self.allocate(names[1], (size, features.num_logprobs))
            self.allocate(names[2], (size, features.num_logprobs), torch.int32)

    def prepare(self, features):
        """Returns a function without arguments, which decodes the next token of each sequence.

        If `features` is None, the function only updates the logits and the cache. If it has a
        grammar, the function only chooses tokens from these logits.
        """
        self.allocate_for(features)
        return self._function(features)

    def _function(self, features):
        has_grammar = features is not None and features.has_grammar
        return functools.partial(self._choose_tokens if has_grammar else self._advance, features)

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
        # logits, and may begin before this has ended (PDL).
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


class CapturedDecoder(Decoder):
    """Decodes a batch by CUDA graphs. It serves one call of `generate`, or an engine, at a time.

    Args: as in `Decoder`, and

        weights: the tensors of the model's weights.
        key: the key in the `DecoderPool`.

    Attributes:
        logits: the logits of the latest captured step.
    """

    logits: Any = None

    def __init__(self, step, weights, prepared, cache, tensors, tokens_per_step, key):
        self._stacks = allocate_stacks(cache, step.groups)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        cache = unstack_groups(self._stacks, step.groups)
        super().__init__(step, step.traced, list(prepared), cache, tensors, tokens_per_step)
        self.key, self._pool = key, None
        # By `Features`. False: the step cannot be captured. None: memory was short in this call.
        self._graphs: dict[Any, Any] = {}
        addresses = {t.untyped_storage().data_ptr() for t in weights}
        owned = [t for t in prepared if t.untyped_storage().data_ptr() not in addresses]
        self._owned_bytes = sum(t.nbytes for t in (*owned, *self.cache))

    @property
    def bytes(self):
        """Number of bytes of the tensors, without the temporary memory of a step."""
        logits = () if self.logits is None else (self.logits,)
        return self._owned_bytes + sum(t.nbytes for t in (*self.tensors.values(), *logits))

    def begin(self, prepared, cache, tensors, features):
        """Copies the initial values of a call and the current weights to this decoder's tensors.

        The cache is copied last, because without a mask, capturing a graph changes it.
        """
        for buffer, value in zip(self._prepared, prepared, strict=True):
            if buffer.data_ptr() != value.data_ptr():
                buffer.copy_(value)
        for name, value in tensors.items():
            self.set_tensor(name, value)
        self._graphs = {f: graph for f, graph in self._graphs.items() if graph is not None}
        self.prepare(features)
        if "counts" in self.tensors:
            self.tensors["counts"].zero_()
        copy_all(self.cache, cache)

    def set_tensor(self, name, value):
        """Overwrites a tensor. A value of another shape replaces it, and discards all graphs."""
        known = self.tensors.get(name)
        if known is not None and known.shape == value.shape:
            known.copy_(value)
            return
        super().set_tensor(name, value.clone())
        if known is not None:
            self._graphs, self._pool = {}, None  # nothing may use the pool of deleted graphs

    def prepare(self, features):
        if features not in self._graphs:
            try:
                self.capture(features)
            except RuntimeError as error:
                text = f"Steps run kernel by kernel: no CUDA graph: {error}"
                warnings.warn(text, stacklevel=3)
                is_final = not isinstance(error, torch.OutOfMemoryError)
                self._graphs[features] = False if is_final else None
        graph = self._graphs[features]
        return graph.replay if graph else super().prepare(features)

    def capture(self, features):
        """Captures the graph for `features`, which changes the cache if there is no mask."""
        if features is not None and features.has_grammar and None not in self._graphs:
            self.capture(None)
        self.allocate_for(features)
        before = {name: t.clone() for name, t in self.tensors.items()}
        if "active" in self.tensors:  # a step without active sequences changes no state
            self.tensors["active"].zero_()
        try:
            function, device = self._function(features), self.tensors["token"].device
            graph, _ = capture(function, device, self._pool)
        finally:
            for name, value in before.items():
                self.tensors[name].copy_(value)
        self._pool, self._graphs[features] = graph.pool(), graph

    def _store(self, cache, new):
        tensors = [*self.cache, *(self.tensors[name] for name in new)]
        overwrite(tensors, [*cache, *new.values()])

    def read_slot(self, slot):
        return [stack[:, slot : slot + 1].clone() for stack in self._stacks]

    def write_slot(self, slot, stacks):
        for stack, value in zip(self._stacks, stacks, strict=True):
            stack[:, slot : slot + 1].copy_(value)

    def logits_of(self, token, cache):
        """Returns copies of the logits after a token of each sequence, and of the next cache."""
        logits, cache = super().logits_of(token, cache)
        return logits.clone(), clone_all(cache)


def logprob_names(features):
    """Returns the names of the tensors of `Logprobs`, in the order of its fields."""
    return [f"{name}_{features.num_logprobs}" for name in Logprobs._fields]


def make_choice(features, masked, logits, tensors):
    """Returns a function `(logits, tensors)` that chooses the next tokens without calling Keras.

    The function is a torch graph that was traced once for each shape, or a kernel. It returns the
    tensors that change as `{name: tensor}`, or overwrites them and returns an empty dictionary.

    Args:
        features: the `Features`.
        masked: boolean, True if sequences end on the device.
        logits: example logits `[B, vocabulary]`.
        tensors: as in `Decoder`.
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


def _append(tensors, latest):
    """Returns the tensors `[B, R, ...]` in `latest`, shifted to end with its `[B, 1, ...]`."""
    known = [name for name in latest if name in tensors]
    return {name: torch.cat((tensors[name][:, 1:], latest[name]), dim=1) for name in known}


def _choose(features, is_argmax, logits, tensors):
    """Returns the tensors that change, as the function of `make_choice`."""
    uniform = tensors["uniform"] if features.is_random else None
    counts = tensors["counts"] if features.has_penalties else None
    state = None if is_argmax else DeviceState(*(tensors[name] for name in DeviceState._fields))
    if features == Features():
        token, logprobs = dispatch.run("argmax", {"x": logits}), ()
    else:
        first = None if uniform is None else uniform[:, 0]
        arguments = {name: tensors[name] for name in argument_names(features)}
        token, counts, logprobs = next_tokens(features, logits, state, first, counts, arguments)
    if is_argmax:
        new = {"token": token.to(tensors["token"].dtype)[:, None]}
    else:
        new = advance(state, token)._asdict()
        del new["stops"]  # which do not change
    latest = {"recent": new["token"]}
    if uniform is not None and uniform.shape[1] > 1:
        latest["uniform"] = uniform[:, :1]  # the next number becomes the first
    if logprobs:
        latest |= dict(zip(logprob_names(features), (t[:, None] for t in logprobs), strict=True))
    new |= _append(tensors, latest)
    return new if counts is None else {**new, "counts": counts}


@functools.lru_cache(maxsize=32)
def _traced(features, is_argmax, names, specs, implementation):
    """Returns the traced `_choose`, a function of logits and tensors, and the names of its results.

    Args:
        features, is_argmax: as in `_choose`.
        names: a tuple of the names of the tensors.
        specs: shape, dtype and device of the logits and of each tensor.
        implementation: the name that `dispatch.choose` takes, or None.
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


def capture(function, device, pool=None):
    """Captures a function without arguments as a CUDA graph, after running it once.

    Args:
        function: a function of tensors at fixed addresses.
        device: their `torch.device`.
        pool: the memory pool of another graph, which never runs at the same time, or None.

    Returns:
        The graph, and the result of the function, which each replay overwrites.
    """
    # A failed capture leaves its own stream current; `stream` restores the stream of the caller.
    stream = torch.cuda.stream(torch.cuda.current_stream(device))
    with _capturing, torch.cuda.device(device), stream, torch.no_grad():
        function()  # compiles and loads kernels, which is not allowed during a capture
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during the capture.
        mode = "thread_local"
        context = torch.cuda.graph(graph, pool=pool, capture_error_mode=mode)
        with _no_garbage_collection(), context:
            return graph, function()


@contextlib.contextmanager
def _no_garbage_collection():
    """Disables garbage collection, which could destroy another graph and so end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
    """Returns contiguous copies of tensors, as `copy_all`."""
    copies = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    copy_all(copies, tensors)
    return copies


def allocate_stacks(tensors, groups):
    """Returns a tensor `[n, ...]` for each group of n tensors of one shape and dtype.

    One launch then copies a slot of all tensors of a group. Each tensor begins at an aligned
    address, which kernels require.
    """
    stacks = []
    for group in groups:
        example = tensors[group[0]]
        size = math.ceil(example.numel() / ALIGNMENT) * ALIGNMENT
        flat = example.new_zeros(len(group), size)[:, : example.numel()]
        stacks.append(flat.unflatten(1, example.shape))
    return stacks


def stack_groups(tensors, groups):
    """Returns a new tensor `[n, ...]` for each group of n tensors of one shape and dtype."""
    return [torch.stack([tensors[index] for index in group]) for group in groups]


def unstack_groups(stacks, groups):
    """Returns views of the stacks in the order of the original tensors; inverts `stack_groups`."""
    tensors: dict = {}
    for stack, group in zip(stacks, groups, strict=True):
        tensors.update(zip(group, stack.unbind(), strict=True))
    return [tensors[index] for index in range(len(tensors))]


class DecoderPool:
    """Unused captured decoders of a model.

    A call acquires a decoder and releases it at its end. A decoder that another thread uses, or
    whose call raised an exception, is not in the pool: two calls never share tensors.
    """

    def __init__(self):
        self._unused: collections.OrderedDict = collections.OrderedDict()
        self._lock = threading.Lock()
        # Garbage collection of a stream releases its decoder at any moment, even while this thread
        # holds the lock, so released decoders are put in a queue first.
        self._released: queue.SimpleQueue = queue.SimpleQueue()

    def acquire(self, key):
        """Returns a decoder that was captured for this key, or None."""
        with self._lock:
            self._store_released()
            decoders = self._unused.get(key)
            return decoders.pop() if decoders else None

    def drop(self, step):
        """Deletes the decoders whose keys begin with `step`."""
        with self._lock:
            self._store_released()
            for key in [key for key in self._unused if key[0] is step]:
                del self._unused[key]

    def release(self, decoder):
        """Returns a decoder to the pool."""
        self._released.put(decoder)
        if self._lock.acquire(blocking=False):
            try:
                self._store_released()
            finally:
                self._lock.release()

    def _store_released(self):
        while not self._released.empty():
            decoder = self._released.get()
            device = torch.cuda.get_device_properties(decoder.tensors["token"].device)
            self._unused.setdefault(decoder.key, []).append(decoder)
            self._unused.move_to_end(decoder.key)
            while self._bytes() > device.total_memory // POOL_DIVISOR and len(self._unused) > 1:
                self._unused.popitem(last=False)

    def _bytes(self):
        return sum(d.bytes for decoders in self._unused.values() for d in decoders)
