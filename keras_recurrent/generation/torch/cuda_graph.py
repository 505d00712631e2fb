"""Decoding steps as CUDA graphs: the host launches all kernels of a step at once.

A graph uses fixed addresses. It therefore owns buffers for the token and the cache, to which each
call of `generate` copies its initial values, and it serves one call at a time.
"""

import collections
import contextlib
import gc
import queue
import threading
import warnings

import torch

from keras_recurrent.checks.shapes import group_equal
from keras_recurrent.generation.torch.sampling import RECENT

_capturing = threading.Lock()  # torch aborts if two threads capture at once

ALIGNMENT = 16  # bytes, for vectorized loads
# Caches and logits of unused graphs take at most 1 / POOL_DIVISOR of the device memory. The most
# recent shapes are always kept, and temporary memory of a step is not counted.
POOL_DIVISOR = 16


def capture(function, device, pool=None):
    """Captures a function without arguments as a CUDA graph, after running it once.

    Args:
        function: a function of tensors at fixed addresses.
        device: their `torch.device`.
        pool: the memory pool of another graph, which never runs at the same time, or None.

    Returns:
        The graph, and the result of the function, which each replay overwrites.
    """
    with _capturing, torch.cuda.device(device), torch.no_grad():
        function()  # compiles and loads kernels, which cannot be captured
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during the capture.
        mode = "thread_local"
        context = torch.cuda.graph(graph, pool=pool, capture_error_mode=mode)
        with _no_garbage_collection(), context:
            return graph, function()


class CapturedStep:
    """CUDA graphs of a decoding step, one for each choice of sampling settings.

    The graphs share buffers and memory. The first is captured at once, others when their settings
    are first used; the state of the sequences does not change meanwhile.

    Args:
        run: a function of `prepared`, a token [B, 1], a mask [B, 1] if there are `sequences`, and
            the tensors of a cache. It returns logits [B, vocabulary] and the tensors of the next
            cache.
        weights: the tensors of the model's weights.
        prepared: tensors that depend only on weights; some of them may be weights.
        token, cache: example inputs.
        sampler: the `sampling.TokenSampler`, a copy of which is captured. None: the caller samples.
        sequences: the `loop.ActiveSequences`. None: the state of all sequences is updated, and
            settings must not change.
    """

    def __init__(self, run, weights, prepared, token, cache, sampler, sequences):
        self.sampler, self.sequences = sampler and sampler.copy(), sequences and sequences.copy()
        self._run, self._prepared = run, list(prepared)
        self.token = token.clone()
        self.cache, self.stacks = clone_stacked(cache)
        # A copy between two replays takes three times as long as one more launch in the graph.
        stores_tokens = sampler is not None and self.sequences is None
        self.recent = token.new_zeros(len(token), RECENT) if stores_tokens else None
        self.pool, self._graphs = None, {}
        self._graphs[self._settings] = self._capture()
        addresses = {t.untyped_storage().data_ptr() for t in weights}
        owned = [t for t in self._prepared if t.untyped_storage().data_ptr() not in addresses]
        self._owned_bytes = sum(t.nbytes for t in (*owned, *self.cache, self.logits))

    @property
    def bytes(self):
        """Number of bytes of buffers."""
        buffers = self.sampler.buffers.values() if self.sampler else ()
        return self._owned_bytes + sum(t.nbytes for t in buffers)

    @property
    def _settings(self):
        stops = self.sequences and self.sequences.stops
        stops = stops if stops is None else (stops.data_ptr(), stops.shape)
        return self.sampler and self.sampler.settings, stops

    def _capture(self):
        """Returns the graph of a step with the current settings."""
        changed = [*self.sampler.buffers.values()] if self.sampler else []
        if self.sequences:  # a step without active sequences changes no state
            changed += [self.sequences.active]
        before = [t.clone() for t in changed]
        if self.sequences:
            self.sequences.active.zero_()
        try:
            graph, logits = capture(self._step, self.token.device, self.pool)
        finally:
            for t, value in zip(changed, before, strict=True):
                t.copy_(value)
        self.logits, self.pool = logits, graph.pool()
        return graph

    def _step(self):
        """Computes one token, and overwrites the buffers of the cache and the token."""
        sampler = self.sampler
        mask = (self.sequences.active,) if self.sequences else ()
        logits, *after = self._run(*self._prepared, self.token, *mask, *self.cache)
        tensors, after = list(self.cache), list(after)
        # Sampling precedes the copies: its kernel directly follows that of the logits, and may
        # begin before that has ended.
        stored = self.recent is not None and sampler.store_argmax(logits, self.token, self.recent)
        if sampler is not None and not stored:
            token = sampler(logits).to(self.token.dtype)[:, None]
            if self.sequences:
                token = self.sequences.advance(self.token, token)
            tensors.append(self.token)
            after.append(token)
            if self.recent is not None:
                tensors.append(self.recent)
                after.append(torch.cat((self.recent[:, 1:], token), dim=1))
        overwrite(tensors, after, self.stacks)
        return logits

    def begin(self, prepared, token, cache, sampler, sequences):
        """Copies the initial values of a call, and the current weights, to the buffers."""
        for buffer, value in zip(self._prepared, prepared, strict=True):
            if buffer.data_ptr() != value.data_ptr():
                buffer.copy_(value)
        self._copy_inputs(token, cache)
        if sequences is not None:
            self.sequences.set(sequences)
        if sampler is not None:
            self.sampler.set(sampler)
            settings = self._settings
            self._graphs = {key: graph for key, graph in self._graphs.items() if key == settings}
            if not self._graphs:
                self.pool = None  # nothing may be captured into the pool of deleted graphs
                self._add_graph()

    def _add_graph(self):
        """Captures a graph for the current settings, or warns and stores None."""
        try:
            graph = self._capture()
        except RuntimeError as error:
            warnings.warn(f"Steps run kernel by kernel: no CUDA graph: {error}", stacklevel=3)
            graph = None
        self._graphs[self._settings] = graph

    def _copy_inputs(self, token, cache):
        self.token.copy_(token)
        for buffer, value in zip(self.cache, cache, strict=True):
            buffer.copy_(value)

    def replay(self):
        """Advances the buffers by one token."""
        if self._settings not in self._graphs:
            self._add_graph()
        graph = self._graphs[self._settings]
        if graph is None:
            self._step()
        else:
            graph.replay()

    def run(self, token, cache):
        """Returns copies of the results of the step for a token and a cache."""
        self._copy_inputs(token, cache)
        self.replay()
        return [t.clone() for t in (self.logits, *self.cache)]


@contextlib.contextmanager
def _no_garbage_collection():
    """Context manager during which no other graph is destroyed, which would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def clone_stacked(tensors):
    """Copies tensors, with those of equal shape and dtype in one stacked tensor.

    One launch overwrites a stacked tensor.

    Returns:
        The list of copies, and a list of `(indices, stacked tensor)`, of which the copies are
        views.
    """
    copies, stacks = {}, []
    for indices in group_equal(tensors):
        group = [tensors[index] for index in indices]
        if len(indices) > 1 and group[0].nbytes % ALIGNMENT == 0:
            stack = torch.stack(group)
            stacks.append((indices, stack))
            group = [stack[i] for i in range(len(indices))]
        else:
            group = [t.clone() for t in group]
        copies.update(zip(indices, group, strict=True))
    return [copies[index] for index in range(len(tensors))], stacks


def overwrite(tensors, after, stacks=()):
    """Overwrites tensors with new values, which may be views of the tensors.

    stacks: a list of `(indices, stacked tensor)` of `clone_stacked`.
    """
    addresses = {t.untyped_storage().data_ptr() for t in tensors}
    changed = {}
    for index, (t, new) in enumerate(zip(tensors, after, strict=True)):
        # A tensor that the step has overwritten in place is its own new value. Other views of the
        # tensors are copied before any of these is overwritten.
        if new is not t:
            is_view = new.untyped_storage().data_ptr() in addresses
            changed[index] = new.clone() if is_view else new
    for indices, stack in stacks:
        if changed.keys() >= set(indices):
            torch.stack([changed.pop(index) for index in indices], out=stack)
    by_dtype: dict = {}
    for index, new in changed.items():
        targets, values = by_dtype.setdefault(new.dtype, ([], []))
        targets.append(tensors[index])
        values.append(new)
    for targets, values in by_dtype.values():
        torch._foreach_copy_(targets, values)  # one launch for all of them


class GraphPool:
    """Unused graphs of a model.

    A call acquires a graph and releases it at its end. A graph that another thread uses, or whose
    call raised an exception, is not in the pool: two calls never share buffers.
    """

    def __init__(self):
        self._unused: collections.OrderedDict = collections.OrderedDict()
        self._lock = threading.Lock()
        # Garbage collection of a stream releases its graph at any moment, even while this thread
        # holds the lock, so released graphs are put in a queue first.
        self._released: queue.SimpleQueue = queue.SimpleQueue()

    def acquire(self, key):
        """Returns a graph that was captured for this key, or None."""
        with self._lock:
            self._store_released()
            graphs = self._unused.get(key)
            return graphs.pop() if graphs else None

    def drop(self, step):
        """Deletes the graphs whose keys begin with `step`."""
        with self._lock:
            self._store_released()
            for key in [key for key in self._unused if key[0] is step]:
                del self._unused[key]

    def release(self, key, graph):
        """Returns a graph to the pool."""
        self._released.put((key, graph))
        if self._lock.acquire(blocking=False):
            try:
                self._store_released()
            finally:
                self._lock.release()

    def _store_released(self):
        while not self._released.empty():
            key, graph = self._released.get()
            device = torch.cuda.get_device_properties(graph.token.device)
            self._unused.setdefault(key, []).append(graph)
            self._unused.move_to_end(key)
            while self._bytes() > device.total_memory // POOL_DIVISOR and len(self._unused) > 1:
                self._unused.popitem(last=False)

    def _bytes(self):
        return sum(graph.bytes for graphs in self._unused.values() for graph in graphs)
