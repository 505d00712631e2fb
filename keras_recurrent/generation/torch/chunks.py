"""Chunks of prompts on NVIDIA GPUs: a sequence of short CUDA graphs."""

import functools
import math
from typing import Any

import keras
import optree
import torch

from keras_recurrent.generation.modes import add_reason
from keras_recurrent.generation.torch.decoder import (
    allocate_stacks,
    capture,
    copy_all,
    overwrite,
    unstack_groups,
)
from keras_recurrent.generation.torch.step import group_equal

# Maximum number of parts of a program on a GPU, and minimum number of operations of a part. In one
# part, a program would delay a decoding step by the time of several steps.
MAX_PARTS, MIN_OPERATIONS = 48, 16


class Chunks:
    """Processes chunks of some prompts. A call is a generator, which returns the next states.

    A program is made for each number of tokens. It processes `num_prompts` prompts in several
    parts. The weights must not change between calls.

    Args:
        model: the language model.
        make_chunk: a function of a cache and, as `chunk`, a number of tokens, which returns the
            `Chunk`.
        num_prompts: integer, the number of prompts of a program.
        cache: the cache of one sequence before all tokens.
    """

    def __init__(self, model, make_chunk, num_prompts, cache):
        self._model, self._make_chunk, self._example = model, make_chunk, cache
        self._num_prompts = num_prompts
        self._programs: dict = {}  # {number of tokens: _Program}
        self._prepared: list = []
        # The buffers that all programs read and overwrite are views of stacks, so that one launch
        # per group copies the state of a prompt. The next step waits for these launches.
        examples = optree.tree_leaves(self._batch(num_prompts))
        groups = group_equal(examples, examples)
        stacks = allocate_stacks(examples, groups)
        self._slots = [[s[:, i : i + 1] for s in stacks] for i in range(num_prompts)]
        self._buffers = unstack_groups(stacks, groups)
        copy_all(self._buffers, examples)
        self._pool = None

    def _batch(self, size):
        return keras.tree.map_structure(lambda t: t.repeat_interleave(size, 0), self._example)

    @torch.no_grad()
    def __call__(self, states, tokens, mask):
        """Generator that launches one part each time it is resumed, and returns the new states.

        No other call may begin before the generator has returned.

        Args:
            states: a list of the states of at most `num_prompts` sequences. A state has a tensor
                `[n, 1, ...]` for each group of n tensors of a cache, as `group_equal` returns them.
            tokens: int32 [num_prompts, T], a NumPy array.
            mask: boolean [num_prompts, T], a NumPy array, False at padding.
        """
        num_tokens = tokens.shape[1]
        if num_tokens not in self._programs:
            self._programs[num_tokens] = self._make_program(num_tokens)
        program = self._programs[num_tokens]
        slots = self._slots[: len(states)]
        for slot, state in zip(slots, states, strict=True):
            for target, value in zip(slot, state, strict=True):
                target.copy_(value)
        upload(program.tokens, tokens)
        upload(program.mask, mask)
        for run in program.parts:
            yield
            run()
        return [[part.clone() for part in slot] for slot in slots]

    def _make_program(self, num_tokens):
        chunk = self._make_chunk(self._batch(self._num_prompts), chunk=num_tokens)
        prepared, shape = self._shared(chunk.prepared()), (self._num_prompts, num_tokens)
        program = _Program(chunk.traced, prepared, shape, self._buffers)
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
        """Returns the tensors of the latest program if they are equal, to save memory."""
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
        prepared: a list of tensors.
        shape: the shape of tokens and mask.
        cache: a list of tensors, which the last part overwrites.

    Attributes:
        tokens, mask: int32 and boolean tensors, which the caller overwrites.
        parts: a list of functions without arguments, to be called in this order.
    """

    def __init__(self, function, prepared, shape, cache):
        self.tokens = torch.ones(shape, dtype=torch.int32, device=cache[0].device)
        self.mask = torch.ones_like(self.tokens, dtype=torch.bool)
        self._function, self._cache = function, cache
        self._arguments = *prepared, self.tokens, self.mask, *cache
        self.parts: list[Any] = [self._run]

    def _run(self):
        overwrite(self._cache, self._function(*self._arguments))

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
            own = set(part)
            for node in part:
                values[node] = interpreter.run_node(node)
                for used in own.intersection(interpreter.user_to_last_uses.get(node, ())):
                    del values[used]
            if part[-1] is nodes[-1]:
                after = [values[node] for node in graph.output_node().args[0]]
                overwrite(self._cache, after)

        for start in range(0, len(nodes), size):
            run_part = functools.partial(run, nodes[start : start + size])
            captured, _ = capture(run_part, self.tokens.device, pool)
            pool = captured.pool()
            parts.append(captured.replay)
            captured.replay()  # for the next part, which runs once before its capture
            later = {*nodes[start + size :], graph.output_node()}
            for node in [n for n in values if n.op != "placeholder"]:
                if later.isdisjoint(node.users):
                    del values[node]  # no later part reads it; later parts may use its memory
        self.parts = parts
        return pool


def upload(buffer, array):
    """Copies a NumPy array to a tensor of its shape, without waiting for the device."""
    host = torch.from_numpy(array)
    buffer.copy_(host.pin_memory() if buffer.is_cuda else host, non_blocking=True)
