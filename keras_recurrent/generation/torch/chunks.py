"""Chunks of prompts of one sequence: CUDA graphs on NVIDIA GPUs, else layer by layer."""

import keras
import numpy as np
import torch

from keras_recurrent.generation.modes import add_reason
from keras_recurrent.generation.torch.cuda_graph import capture, clone_stacked, overwrite


class Chunks:
    """Function of a cache, tokens and their mask, which returns the next cache.

    On NVIDIA GPUs each number of tokens is one program. The weights must not change between calls.

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
        # {number of tokens: function of an int32 array of tokens and mask [2, T], and a flat cache}
        self._programs: dict = {}
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
        device = keras.tree.flatten(cache)[0].device
        if self._graph_reason(device) is not None:
            return self._run_layers(cache)
        chunk = self._make_chunk(cache, chunk=num_tokens)
        prepared = self._shared(chunk.prepared())
        inputs = torch.ones((2, num_tokens), dtype=torch.int32, device=device)

        def run(flat):
            return chunk.traced(*prepared, inputs[:1], inputs[1:] != 0, *flat)

        def overwrite_cache():
            overwrite(self._cache, list(run(self._cache)), self._stacks)

        def traced(array, flat):
            upload(inputs, array)
            return run(flat)

        reason = chunk.not_captured_reason
        if reason is None:
            if not self._cache:
                self._cache, self._stacks = clone_stacked(keras.tree.flatten(cache))
            try:
                graph, _ = capture(overwrite_cache, device, self._pool)
            except RuntimeError as error:
                reason = f"torch could not capture a chunk of {num_tokens} tokens: {error}"
            else:
                self._pool = graph.pool()
                return self._replay(graph, inputs)
        add_reason(self._model, "cuda_graph", reason)
        return traced

    def _run_layers(self, cache):
        """Returns a function that runs the layers, as fast on CPUs, for the tokens alone."""
        structure = keras.tree.map_structure(lambda t: None, cache)

        def run(array, flat):
            tokens = keras.ops.convert_to_tensor(array[:1, : array[1].sum()])
            before = keras.tree.pack_sequence_as(structure, flat)
            return keras.tree.flatten(self._model.backbone.hidden_states(tokens, cache=before)[1])

        return run

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
