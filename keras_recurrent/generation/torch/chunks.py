"""Chunks of prompts: CUDA graphs on a separate stream on NVIDIA GPUs, else layer by layer."""

import keras
import numpy as np
import torch

from keras_recurrent.generation.modes import add_reason
from keras_recurrent.generation.torch.cuda_graph import capture, clone_stacked, overwrite

GRAPH_ROWS = 2  # prompts of a program on a GPU, which one alone does not occupy


class Chunks:
    """Function of the caches, tokens and masks of some prompts, which returns the next caches.

    On NVIDIA GPUs, each number of tokens is one program of `num_rows` prompts. Programs run on a
    separate CUDA stream, so that decoding steps continue. The weights must not change between
    calls.

    Args:
        model: the language model.
        make_chunk: a function of a cache and, as `chunk`, a number of tokens, which returns the
            `Chunk`.
        device: the `torch.device` of the model.
        graph_reason: the reason for no CUDA graphs, or None.

    Attributes:
        num_rows: integer, maximum number of prompts of a call.
    """

    def __init__(self, model, make_chunk, device, graph_reason):
        self._model, self._make_chunk = model, make_chunk
        self._stream = None if graph_reason else _new_stream(device)
        self.num_rows = 1 if graph_reason else GRAPH_ROWS
        self._device, self._pool = device, None
        self._programs: dict = {}  # {number of tokens: (buffer of tokens and mask, function)}
        self._prepared: list = []
        self._cache: list = []  # the buffers that all programs read and overwrite
        self._stacks: list = []

    @property
    def is_concurrent(self):
        """True if programs run on a separate stream."""
        return self._stream is not None

    @torch.no_grad()
    def __call__(self, caches, tokens, mask):
        """Returns a list of new caches, and a `torch.cuda.Event` after them, or None on a CPU.

        Until the event, the caller must keep `caches`, and must not use the new caches other than
        as arguments of this function. If another stream reads new caches, the caller must keep them
        until it has read them.

        Args:
            caches: a list of at most `num_rows` caches of one sequence each.
            tokens: int32 [num_rows, T], a NumPy array.
            mask: boolean [num_rows, T], a NumPy array, False at padding.
        """
        if self._stream is None:
            return [self._run_layers(caches[0], tokens, mask)], None
        with torch.cuda.stream(self._stream):
            after = self._run_program(caches, np.stack((tokens, mask), dtype="int32"))
            return after, self._stream.record_event()

    def wait(self):
        """Makes later calls begin after all work that was launched on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def synchronize(self):
        """Waits until all calls are finished."""
        if self._stream is not None:
            self._stream.synchronize()

    def _run_layers(self, cache, tokens, mask):
        """Runs the layers for the tokens alone, which on a CPU is as fast as a program."""
        tokens = keras.ops.convert_to_tensor(tokens[:, : mask.sum()])
        return self._model.backbone.hidden_states(tokens, cache=cache)[1]

    def _run_program(self, caches, inputs):
        num_tokens = inputs.shape[2]
        if num_tokens not in self._programs:
            self._programs[num_tokens] = self._make_program(caches[0], num_tokens)
        buffer, run = self._programs[num_tokens]
        rows = [[t[i : i + 1] for t in self._cache] for i in range(len(caches))]
        for row, cache in zip(rows, caches, strict=True):
            overwrite(row, keras.tree.flatten(cache))
        upload(buffer, inputs)
        run()
        return [keras.tree.pack_sequence_as(caches[0], copies(row)) for row in rows]

    def _make_program(self, cache, num_tokens):
        """Returns the buffer of tokens and mask, int32 [2, num_rows, T], and a function."""
        cache = keras.tree.map_structure(lambda t: t.repeat_interleave(self.num_rows, 0), cache)
        if not self._cache:
            self._cache, self._stacks = clone_stacked(keras.tree.flatten(cache))
        chunk = self._make_chunk(cache, chunk=num_tokens)
        prepared = self._shared(chunk.prepared())
        shape = 2, self.num_rows, num_tokens
        inputs = torch.ones(shape, dtype=torch.int32, device=self._device)

        def run():
            after = chunk.traced(*prepared, inputs[0], inputs[1] != 0, *self._cache)
            overwrite(self._cache, list(after), self._stacks)

        reason = chunk.not_captured_reason
        if reason is None:
            try:
                graph, _ = capture(run, self._device, self._pool, self._stream)
            except RuntimeError as error:
                reason = f"torch could not capture a chunk of {num_tokens} tokens: {error}"
            else:
                self._pool = graph.pool()
                return inputs, graph.replay
        add_reason(self._model, "cuda_graph", reason)
        return inputs, run

    def _shared(self, prepared):
        """Returns the tensors of earlier programs if they are equal, to use their memory."""
        is_equal = len(self._prepared) == len(prepared) and all(
            a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
            for a, b in zip(self._prepared, prepared, strict=True)
        )
        if not is_equal:
            self._prepared = list(prepared)
        return self._prepared


def _new_stream(device):
    """Returns a CUDA stream on which torch captures no steps.

    torch has a small pool of streams, which it returns in turn.
    """
    while True:
        stream = torch.cuda.Stream(device)
        if stream != torch.cuda.graph.default_capture_stream:
            return stream


def upload(buffer, array):
    """Copies a NumPy array to a tensor of its shape, without waiting for the device."""
    host = torch.from_numpy(array)
    buffer.copy_(host.pin_memory() if buffer.is_cuda else host, non_blocking=True)


def copies(tensors):
    """Returns copies of tensors, with few launches."""
    new = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    overwrite(new, tensors)
    return new
