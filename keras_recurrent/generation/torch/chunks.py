"""Chunks of prompts of one sequence: CUDA graphs on NVIDIA GPUs, else as traced."""

import keras
import numpy as np
import torch

from keras_recurrent.generation.modes import add_reason
from keras_recurrent.generation.torch.cuda_graph import capture, clone_stacked, overwrite


class Chunks:
    """Function of a cache, tokens and their mask, which returns the next cache.

    Each number of tokens is one program. The weights must not change between calls.

    Args:
        model: the language model.
        make_chunk: a function of a cache and, as `chunk`, a number of tokens, which returns the
            `Chunk`.
        graph_reason: a function of a device, which returns the reason for no CUDA graphs, or None.
        pool: as in `cuda_graph.capture`.
    """

    def __init__(self, model, make_chunk, graph_reason, pool):
        self._model, self._make_chunk = model, make_chunk
        self._graph_reason, self._pool = graph_reason, pool
        self._programs: dict = {}  # {number of tokens: function of an array and a flat cache}
        self._prepared: list = []
        self._cache: list = []  # the buffers that all graphs read and overwrite
        self._stacks: list = []

    @torch.no_grad()
    def __call__(self, cache, tokens, mask):
        """Returns a new cache.

        Args:
            cache: the cache before the tokens, of one sequence.
            tokens: int32 [1, T], a NumPy array.
            mask: boolean [1, T], a NumPy array, False at padding.
        """
        num_tokens = tokens.shape[1]
        if num_tokens not in self._programs:
            self._programs[num_tokens] = self._program(cache, num_tokens)
        inputs = np.concatenate((tokens, mask), dtype="int32")
        after = self._programs[num_tokens](inputs, keras.tree.flatten(cache))
        return keras.tree.pack_sequence_as(cache, after)

    def _program(self, cache, num_tokens):
        chunk, flat = self._make_chunk(cache, chunk=num_tokens), keras.tree.flatten(cache)
        prepared = self._shared(chunk.prepared())
        inputs = torch.ones((2, num_tokens), dtype=torch.int32, device=flat[0].device)

        def run(inputs, flat):
            return chunk.traced(*prepared, inputs[:1], inputs[1:] != 0, *flat)

        if self._graph_reason(inputs.device) is None and chunk.not_captured_reason is None:
            if not self._cache:
                self._cache, self._stacks = clone_stacked(flat)

            def step():
                overwrite(self._cache, list(run(inputs, self._cache)), self._stacks)

            try:
                graph, _ = capture(step, inputs.device, self._pool)
            except RuntimeError as error:
                reason = f"torch could not capture a chunk of {num_tokens} tokens: {error}"
                add_reason(self._model, "cuda_graph", reason)
            else:
                self._pool = graph.pool()
                return self._replay(graph, inputs)

        def traced(array, flat):
            upload(inputs, array)
            return run(inputs, flat)

        return traced

    def _replay(self, graph, inputs):
        def replay(array, flat):
            overwrite(self._cache, flat)
            upload(inputs, array)
            graph.replay()
            return copies(self._cache)

        return replay

    def _shared(self, prepared):
        """Returns the tensors of earlier programs if they are equal, to use their memory."""
        is_equal = len(self._prepared) == len(prepared) and all(
            a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
            for a, b in zip(self._prepared, prepared, strict=True)
        )
        if not is_equal:
            self._prepared = list(prepared)
        return self._prepared


def upload(buffer, array):
    """Copies a NumPy array to a tensor of its shape, without waiting for the device."""
    host = torch.from_numpy(array)
    buffer.copy_(host.pin_memory() if buffer.is_cuda else host, non_blocking=True)


def copies(tensors):
    """Returns copies of tensors, with few launches."""
    new = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    overwrite(new, tensors)
    return new
