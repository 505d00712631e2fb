"""CUDA graphs of decoding steps, and of chunks of prompts, on NVIDIA GPUs."""

import collections
import functools
import math
import queue
import threading
import warnings
from typing import Any

import optree
import torch

from keras_recurrent.devices.cuda_graphs import capture
from keras_recurrent.generation.torch_batch import (
    Decoder,
    clone_all,
    copy_all,
    group_equal,
    overwrite,
    unstack_groups,
    upload,
)

# The tensors of unused decoders take at most 1 / POOL_DIVISOR of the device memory. The most
# recent shapes are always kept, and temporary memory of a step is not counted.
POOL_DIVISOR = 16
ALIGNMENT = 16  # elements, and so at least 16 bytes

# Maximum number of parts of a program on a GPU, and minimum number of operations of a part. A
# program of one part would delay a decoding step by the time of several steps.
MAX_PARTS, MIN_OPERATIONS = 48, 16


class CapturedDecoder(Decoder):
    """Decodes a batch by CUDA graphs, one for each `Features`, in tensors at fixed addresses.

    It serves one call of `generate`, or an engine, at a time. `weights` are the tensors of the
    model's weights, and `key` is the key in the `DecoderPool`.
    """

    logits: Any = None  # of the latest captured step

    def __init__(self, step, weights, prepared, tensors, tokens_per_step, key):
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        super().__init__(step, step.traced, list(prepared), tensors, tokens_per_step)
        self._stacks = allocate_stacks(step.cache_shapes, step.groups, tensors["token"].device)
        self.cache = unstack_groups(self._stacks, step.groups)
        self.key, self._pool = key, None
        # Graphs by `Features`. False: the step cannot be captured. None: out of memory this time.
        self._graphs: dict[Any, Any] = {}
        addresses = {t.untyped_storage().data_ptr() for t in weights}
        owned = [t for t in prepared if t.untyped_storage().data_ptr() not in addresses]
        self._owned_bytes = sum(t.nbytes for t in (*owned, *self.cache))

    @property
    def bytes(self):
        """Number of bytes of the tensors, without the temporary memory of a step."""
        logits = () if self.logits is None else (self.logits,)
        return self._owned_bytes + sum(t.nbytes for t in (*self.tensors.values(), *logits))

    def begin(self, prepared, tensors, features):
        """Copies the initial values of a call and the current weights to this decoder's tensors.

        `write` sets the cache afterwards: without a mask, capturing a graph changes it.
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

    def write(self, rows, cache):
        copy_all([t[rows] for t in self.cache], self.step.flatten_cache(cache))

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
                text = f"Steps run kernel by kernel: a CUDA graph was not captured: {error}"
                warnings.warn(text, stacklevel=3)
                is_final = not isinstance(error, torch.OutOfMemoryError)
                self._graphs[features] = False if is_final else None
        graph = self._graphs[features]
        return graph.replay if graph else super().prepare(features)

    def capture(self, features):
        """Captures the graph for `features`, which changes the cache if there is no mask."""
        if features is not None and features.has_grammar and None not in self._graphs:
            self.capture(None)
        function, device = super().prepare(features), self.tensors["token"].device
        before = {name: t.clone() for name, t in self.tensors.items()}
        if "active" in self.tensors:  # a step without active sequences changes no state
            self.tensors["active"].zero_()
        try:
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

    def _reader(self, apply):
        # When a sequence ends, all others wait for the host, which would take 2 ms to launch the
        # operations one by one.
        buffers = self.read_slot(0)
        stacks = apply(buffers)
        graph, _ = capture(lambda: copy_all(stacks, apply(buffers)), stacks[0].device)

        def replay(slot):
            copy_all(buffers, self.read_slot(slot))
            graph.replay()
            return clone_all(stacks)

        return replay

    def write_slot(self, slot, stacks):
        for stack, value in zip(self._stacks, stacks, strict=True):
            stack[:, slot : slot + 1].copy_(value)

    def logits_of(self, token, cache):
        """Returns copies of the logits after a token of each sequence, and of the next cache."""
        logits, cache = super().logits_of(token, cache)
        return logits.clone(), clone_all(cache)


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

    def acquire(self, key, num_bytes, device):
        """Returns a decoder that was captured for this key.

        If there is none, deletes the decoders that the pool would not keep next to a new one of
        `num_bytes`, and returns None.
        """
        with self._lock:
            self._store_released()
            decoders = self._unused.get(key)
            if decoders:
                return decoders.pop()
            self._limit(device, num_bytes, num_kept=0)
            return None

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
            self._unused.setdefault(decoder.key, []).append(decoder)
            self._unused.move_to_end(decoder.key)
            self._limit(decoder.tensors["token"].device, 0, num_kept=1)

    def _limit(self, device, num_bytes, num_kept):
        """Deletes the oldest decoders until `num_bytes` fit or `num_kept` keys remain."""
        limit = torch.cuda.get_device_properties(device).total_memory // POOL_DIVISOR
        while len(self._unused) > num_kept and self._bytes() + num_bytes > limit:
            self._unused.popitem(last=False)

    def _bytes(self):
        return sum(d.bytes for decoders in self._unused.values() for d in decoders)


def allocate_stacks(shapes, groups, device):
    """Returns a tensor of zeros `[n, *shape]` for each group of n tensors.

    One launch then copies a slot of all tensors of a group. Each tensor begins at an aligned
    address, which kernels require. `shapes` are the `(shape, dtype)` of all tensors, and `groups`
    the result of `group_equal` for them.
    """
    stacks = []
    for group in groups:
        shape, dtype = shapes[group[0]]
        size = math.ceil(shape.numel() / ALIGNMENT) * ALIGNMENT
        flat = torch.zeros(len(group), size, dtype=dtype, device=device)[:, : shape.numel()]
        stacks.append(flat.unflatten(1, shape))
    return stacks


class Chunks:
    """Processes chunks of some prompts. A call is a generator, which returns the next states.

    A program is made for each number of tokens. It processes `num_prompts` prompts in several
    parts. The weights must not change between calls.

    Args:
        steps: the `Programs` of the model.
        num_prompts: integer, the number of prompts of a program.
        cache: the cache of one sequence before all tokens.
    """

    def __init__(self, steps, num_prompts, cache):
        self._steps, self._num_prompts, self._example = steps, num_prompts, cache
        self._programs: dict = {}  # {number of tokens: result of `_make_program`}
        self._prepared: list = []
        # The buffers that all programs read and overwrite are views of stacks, so that one launch
        # per group copies the state of a prompt. The next step waits for these launches.
        examples = [t.repeat_interleave(num_prompts, 0) for t in optree.tree_leaves(cache)]
        groups = group_equal(examples, examples)
        shapes = [(t.shape, t.dtype) for t in examples]
        stacks = allocate_stacks(shapes, groups, examples[0].device)
        self._slots = [[s[:, i : i + 1] for s in stacks] for i in range(num_prompts)]
        self._buffers = unstack_groups(stacks, groups)
        copy_all(self._buffers, examples)
        self._pool = None

    @torch.no_grad()
    def __call__(self, states, tokens, mask):
        """Generator of `TorchBatch.process`; `states` are results of `TorchBatch.pack`."""
        num_tokens = tokens.shape[1]
        if num_tokens not in self._programs:
            self._programs[num_tokens] = self._make_program(num_tokens)
        program_tokens, program_mask, parts, _ = self._programs[num_tokens]
        slots = self._slots[: len(states)]
        for slot, state in zip(slots, states, strict=True):
            for target, value in zip(slot, state, strict=True):
                target.copy_(value)
        upload(program_tokens, tokens)
        upload(program_mask, mask)
        for run in parts:
            yield
            run()
        return [[part.clone() for part in slot] for slot in slots]

    def _make_program(self, num_tokens):
        """Returns the tokens and mask that a program reads, and its parts, a list of functions.

        The last result keeps alive the other tensors that captured parts read.
        """
        chunk = self._steps.step(self._example, self._num_prompts, chunk=num_tokens)
        shape, buffers = (self._num_prompts, num_tokens), self._buffers
        tokens = torch.ones(shape, dtype=torch.int32, device=buffers[0].device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        arguments = *self._shared(chunk.prepared()), tokens, mask, *buffers
        parts = [lambda: overwrite(buffers, chunk.traced(*arguments))]
        reason = chunk.not_captured_reason
        if reason is None:
            try:
                parts, self._pool = capture_parts(chunk.traced, arguments, buffers, self._pool)
            except RuntimeError as error:
                reason = f"torch could not capture a chunk of {num_tokens} tokens: {error}"
        if reason is not None:
            refused = {**self._steps.mode.refused, "cuda_graph": reason}
            self._steps.mode = self._steps.mode._replace(refused=refused)
        return tokens, mask, parts, (chunk, arguments)

    def _shared(self, prepared):
        """Returns the tensors of the latest program if they are equal, to save memory."""
        is_equal = len(self._prepared) == len(prepared) and all(
            a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
            for a, b in zip(self._prepared, prepared, strict=True)
        )
        if not is_equal:
            self._prepared = list(prepared)
        return self._prepared


def capture_parts(function, arguments, cache, pool):
    """Captures a chunk of tokens as CUDA graphs of some nodes each.

    Args:
        function: a `torch.fx.GraphModule`, which returns the next cache.
        arguments: a tuple of tensors, at addresses that later calls read.
        cache: a list of the tensors of a cache, which the last part overwrites.
        pool: the pool of programs that do not run between these parts, or None.

    Returns:
        The parts, a list of functions to be called in this order, and their memory pool.
    """
    graph = function.graph
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    size = max(math.ceil(len(nodes) / MAX_PARTS), MIN_OPERATIONS)
    interpreter = torch.fx.Interpreter(function)
    values = dict(zip(graph.find_nodes(op="placeholder"), arguments, strict=True))
    interpreter.env, parts = values, []

    def run(part):
        own = set(part)
        for node in part:
            values[node] = interpreter.run_node(node)
            for used in own.intersection(interpreter.user_to_last_uses.get(node, ())):
                del values[used]
        if part[-1] is nodes[-1]:
            after = [values[node] for node in graph.output_node().args[0]]
            overwrite(cache, after)

    for start in range(0, len(nodes), size):
        run_part = functools.partial(run, nodes[start : start + size])
        captured, _ = capture(run_part, cache[0].device, pool)
        pool = captured.pool()
        parts.append(captured.replay)
        captured.replay()  # computes the inputs of the next part, which runs before its capture
        later = {*nodes[start + size :], graph.output_node()}
        for node in [n for n in values if n.op != "placeholder"]:
            if later.isdisjoint(node.users):
                del values[node]  # no later part reads it; later parts may use its memory
    return parts, pool
