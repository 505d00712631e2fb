"""Chunks of prompts: short CUDA graphs in a row on NVIDIA GPUs, else layer by layer."""

import functools
import math
from typing import Any

import keras
import torch

from keras_recurrent.generation.modes import add_reason
from keras_recurrent.generation.torch.cuda_graph import capture, clone_stacked, overwrite

# Maximum number of parts of a program on a GPU, which in one part would delay a decoding step by
# the time of several, and minimum number of operations of a part.
MAX_PARTS, MIN_OPERATIONS = 24, 32


class Chunks:
    """Function of the caches, tokens and masks of some prompts, which returns the next caches.

    On NVIDIA GPUs, each number of tokens is a program of `num_rows` prompts, in several parts.
    Elsewhere, a call is one part. The weights must not change between calls.

    Args:
        model: the language model.
        make_chunk: a function of a cache and, as `chunk`, a number of tokens, which returns the
            `Chunk`.
        graph_reason: the reason for no CUDA graphs, or None.
        num_rows: integer, the number of prompts of a program.

    Attributes:
        num_rows: integer, maximum number of prompts of a call.
    """

    def __init__(self, model, make_chunk, graph_reason, num_rows):
        self._model, self._make_chunk = model, make_chunk
        self._uses_graphs = graph_reason is None
        self.num_rows = num_rows if self._uses_graphs else 1
        self._programs: dict = {}  # {number of tokens: _Program}
        self._prepared: list = []
        self._cache: list = []  # the buffers that all programs read
        self._pool = None

    @torch.no_grad()
    def __call__(self, caches, tokens, mask):
        """Generator that launches one part each time it is resumed, and returns the new caches.

        No other call may begin before the generator has returned.

        Args:
            caches: a list of at most `num_rows` caches of one sequence each.
            tokens: int32 [num_rows, T], a NumPy array.
            mask: boolean [num_rows, T], a NumPy array, False at padding.
        """
        if not self._uses_graphs:
            return [self._run_layers(caches[0], tokens, mask)]
        num_tokens = tokens.shape[1]
        if num_tokens not in self._programs:
            self._programs[num_tokens] = self._make_program(caches[0], num_tokens)
        program = self._programs[num_tokens]
        for i, cache in enumerate(caches):
            overwrite([t[i : i + 1] for t in self._cache], keras.tree.flatten(cache))
        upload(program.tokens, tokens)
        upload(program.mask, mask)
        for index, run in enumerate(program.parts):
            if index:
                yield
            run()
        rows = ([t[i : i + 1] for t in program.after] for i in range(len(caches)))
        return [keras.tree.pack_sequence_as(caches[0], copies(row)) for row in rows]

    def _run_layers(self, cache, tokens, mask):
        """Runs the layers for the tokens alone, which on a CPU is as fast as a program."""
        tokens = keras.ops.convert_to_tensor(tokens[:, : mask.sum()])
        return self._model.backbone.hidden_states(tokens, cache=cache)[1]

    def _make_program(self, cache, num_tokens):
        cache = keras.tree.map_structure(lambda t: t.repeat_interleave(self.num_rows, 0), cache)
        if not self._cache:
            self._cache, _ = clone_stacked(keras.tree.flatten(cache))
        chunk = self._make_chunk(cache, chunk=num_tokens)
        shape = self.num_rows, num_tokens
        program = _Program(chunk.traced, self._shared(chunk.prepared()), shape, self._cache)
        reason = chunk.not_captured_reason
        if reason is None:
            try:
                self._pool = program.capture(self._pool)
            except RuntimeError as error:
                reason = f"torch could not capture a chunk of {num_tokens} tokens: {error}"
        if reason is not None:
            add_reason(self._model, "cuda_graph", reason)
        return program

    def _shared(self, prepared):
        """Returns the tensors of earlier programs if they are equal, to use their memory."""
        is_equal = len(self._prepared) == len(prepared) and all(
            a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
            for a, b in zip(self._prepared, prepared, strict=True)
        )
        if not is_equal:
            self._prepared = list(prepared)
        return self._prepared


class _Program:
    """A chunk of tokens at fixed addresses, in parts.

    Args:
        function: a function of the `prepared` tensors, tokens, a mask and the tensors of a cache,
            which returns the next cache; a `torch.fx.GraphModule` if `capture` is called.
        prepared, cache: lists of tensors.
        shape: the shape of tokens and mask.

    Attributes:
        tokens, mask: int32 and boolean tensors, which the caller overwrites.
        parts: a list of functions without arguments, to be called in this order.
    """

    def __init__(self, function, prepared, shape, cache):
        self.tokens = torch.ones(shape, dtype=torch.int32, device=cache[0].device)
        self.mask = torch.ones_like(self.tokens, dtype=torch.bool)
        self._function = function
        self._arguments = *prepared, self.tokens, self.mask, *cache
        self.parts: list[Any] = [self._run]
        self._values: Any = ()

    def _run(self):
        self._values = self._function(*self._arguments)

    @property
    def after(self):
        """The tensors of the next cache, which the next run may overwrite."""
        if isinstance(self._values, dict):
            return [self._values[node] for node in self._function.graph.output_node().args[0]]
        return self._values

    def capture(self, pool):
        """Makes each part a CUDA graph of some nodes; returns their memory pool.

        pool: the pool of programs that do not run between these parts, or None.
        """
        graph = self._function.graph
        nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        size = max(math.ceil(len(nodes) / MAX_PARTS), MIN_OPERATIONS)
        interpreter = torch.fx.Interpreter(self._function)
        values = dict(zip(graph.find_nodes(op="placeholder"), self._arguments, strict=True))
        interpreter.env, parts = values, []

        def run(part):
            for node in part:
                values[node] = interpreter.run_node(node)

        for start in range(0, len(nodes), size):
            run_part = functools.partial(run, nodes[start : start + size])
            captured, _ = capture(run_part, self.tokens.device, pool)
            pool = captured.pool()
            parts.append(captured.replay)
            captured.replay()  # the next part runs once before its capture
            later = {*nodes[start + size :], graph.output_node()}
            for node in [n for n in values if n.op != "placeholder"]:
                if later.isdisjoint(node.users):
                    del values[node]  # later parts may use its memory
        self.parts, self._values = parts, values
        return pool


def upload(buffer, array):
    """Copies a NumPy array to a tensor of its shape, without waiting for the device."""
    host = torch.from_numpy(array)
    buffer.copy_(host.pin_memory() if buffer.is_cuda else host, non_blocking=True)


def copies(tensors):
    """Returns copies of tensors, with few launches."""
    new = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    overwrite(new, tensors)
    return new
