"""Prompt processing and decoding on torch, step by step in Python.

Sequences advance from their own lengths, as in `generation/loop.py`. The loop waits for the device
only every `RECENT` tokens, to check whether all sequences have ended.
"""

import collections
import contextlib

import keras
import torch

from keras_recurrent.generation.beam_search import search_request
from keras_recurrent.generation.lengths import cache_max_length, max_chunk_length
from keras_recurrent.generation.request import Ended, Result
from keras_recurrent.generation.torch.runner import Runner
from keras_recurrent.generation.torch.sampling import RECENT, TokenSampler


class Loop:
    """Prompt processing and decoding of a language model.

    Args:
        model: the language model.
    """

    def __init__(self, model):
        self._model, self.runner = model, Runner(model)

    @torch.no_grad()
    def prefill(self, token_ids, lengths, cache=None, max_length=None):
        """Returns the cache after the first `lengths` tokens of each sequence.

        Args:
            token_ids: integers `[B, T]`, a NumPy array.
            lengths: integers `[B]`, a NumPy array.
            cache: the cache before these tokens. None: the first chunk starts without a state, as a
                forward pass, which attention computes faster than a chunk after an empty cache.
            max_length: integer or None, the `max_length` of a new cache.
        """
        backbone = self._model.backbone
        for tokens, mask in self._chunks(token_ids, lengths):
            _, cache = backbone.hidden_states(
                tokens, mask, cache=cache, return_cache=True, max_length=max_length
            )
        if cache is None:
            return backbone.get_initial_state(len(lengths), max_length=max_length)
        return cache

    def _chunks(self, token_ids, lengths):
        """Yields the tokens and mask of each chunk of the first `lengths` tokens."""
        token_ids = keras.ops.convert_to_tensor(token_ids)
        ends = torch.as_tensor(lengths, device=token_ids.device)[:, None]
        size = max_chunk_length(len(lengths))
        for start in range(0, int(lengths.max()), size):
            stop = min(start + size, int(lengths.max()))
            mask = None
            if stop > lengths.min():
                mask = torch.arange(start, stop, device=token_ids.device) < ends
            yield token_ids[:, start:stop], mask

    @torch.no_grad()
    def generate(self, request, cache=None, keep=False):
        """Processes prompts and generates tokens after them.

        Args:
            request: the `Request`.
            cache: the cache before these tokens. None: the initial cache.
            keep: boolean, True if the final cache is returned.

        Returns:
            A `Result`, whose cache is None without `keep`.
        """
        token_ids, lengths, free_length = request.token_ids, request.lengths, request.free_length
        max_tokens = int(free_length.max())
        if max_tokens == 0 and not keep:
            return Result(token_ids, lengths, None, None)
        cache = self._process_prompts(request, cache, keep)
        if max_tokens == 0:
            return Result(token_ids, lengths, cache, None)
        token, sampler = self._begin(request)
        sequences = ActiveSequences(request, token) if keep else None
        generated = token.new_zeros(len(lengths), max_tokens)
        ended = Ended(request)
        # Until the host knows the tokens, a kept cache would be ahead of a stop string.
        block = 1 if keep and request.stop_strings else RECENT
        # While the host searches a block for stop strings, the device computes the next one.
        num_ahead = 1 if request.stop_strings and not keep else 0
        may_end = request.stop_strings is not None or len(request.stop_token_ids) > 0
        blocks: collections.deque = collections.deque()
        logprobs = []
        decoding = self.runner.decode(token, cache, sampler, sequences)
        del cache  # a CUDA graph has a copy
        with decoding as decoder:
            for start in range(0, max_tokens, block):
                stop = min(start + block, max_tokens)
                decoder.generate(generated, start, stop)
                logprobs.append(decoder.sampler.logprobs(stop - start))
                if stop == max_tokens or not may_end:
                    continue
                blocks.append(Fetch(generated[:, start:stop]))
                if len(blocks) > num_ahead and ended.after(blocks.popleft()()):
                    break
                if request.stop_strings and sequences:
                    decoder.sequences.stop(torch.as_tensor(ended.rows))
            cache = decoder.cache() if keep else None
        new = generated.cpu().numpy()
        logprobs = keras.tree.map_structure(lambda *x: torch.cat(x, 1).cpu().numpy(), *logprobs)
        return request.result(new, ended.counts(new), cache, logprobs or None)

    @torch.no_grad()
    def search(self, request, sampler, cache=None):
        """Returns the `Hypotheses` of beam search, NumPy arrays.

        Args:
            request: the `Request`.
            sampler: the `BeamSampler`.
            cache: as in `generate`.
        """
        cache = self._process_prompts(request, cache, keep=False)
        with self.runner.step_function() as step:
            return search_request(step, cache, request, sampler)

    def _begin(self, request):
        """Returns the last token of each prompt [B, 1], and the `TokenSampler`."""
        token = keras.ops.convert_to_tensor(request.last_token)
        stops = torch.as_tensor(request.stop_token_ids, dtype=token.dtype, device=token.device)
        size = self._model.backbone.vocabulary_size
        return token, TokenSampler(request.sampling, stops, size)

    @torch.no_grad()
    def steps(self, request, cache=None):
        """Returns the `Steps` that generate token by token.

        Args:
            request, cache: as in `generate`.
        """
        cache = self._process_prompts(request, cache, keep=True)
        token, sampler = self._begin(request)
        return Steps(self.runner, token, cache, sampler, ActiveSequences(request, token))

    def _process_prompts(self, request, cache, keep):
        """Returns the cache before the last token of each prompt, which a step may overwrite."""
        max_length = None
        if cache is None:
            max_length = cache_max_length(self._model, request.token_ids.shape[1], keep)
        else:
            cache = keras.tree.map_structure(torch.clone, cache)
        return self.prefill(request.token_ids, request.lengths - 1, cache, max_length)


class Fetch:
    """Copies a tensor to the host; a call waits for the NumPy array."""

    def __init__(self, tensor):
        self._copy = tensor.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        if self._event:
            self._event.record()

    def __call__(self):
        if self._event:
            self._event.synchronize()
        return self._copy.numpy()


class Steps:
    """Function that returns the next tokens [B, 1] of each sequence.

    Args:
        runner: the `Runner` of the model.
        token: integers [B, 1], the last token of each prompt.
        cache: the cache before it, which may be overwritten.
        sampler: the `TokenSampler`.
        sequences: the `ActiveSequences`.

    Attributes:
        logprobs: the `Logprobs` of the latest tokens, NumPy arrays, or ().
    """

    def __init__(self, runner, token, cache, sampler, sequences):
        self._stack = contextlib.ExitStack()
        decoder = runner.decode(token, cache, sampler, sequences)
        self._decoder = self._stack.enter_context(decoder)

    @torch.no_grad()
    def __call__(self):
        """Returns tokens, a NumPy array; for a sequence that has ended, its last one again."""
        token = self._decoder.next_token().cpu().numpy()
        logprobs = self._decoder.sampler.logprobs(1)
        self.logprobs = keras.tree.map_structure(lambda x: x.cpu().numpy(), logprobs)
        return token

    def stop(self, rows):
        """Ends sequences after the latest tokens.

        rows: boolean [B], a NumPy array, True for sequences that end.
        """
        if rows.any():
            self._decoder.sequences.stop(torch.as_tensor(rows))

    @torch.no_grad()
    def cache(self):
        """Returns the cache after all tokens of each sequence but the last."""
        return self._decoder.cache()

    def close(self):
        """Releases the CUDA graph, if there is one, for other calls."""
        self._stack.close()


class ActiveSequences:
    """State of the sequences that have not ended.

    Args:
        request: the `Request`.
        token: integers [B, 1], a tensor on the device of the model.

    Attributes:
        free_length: int64 [B], maximum number of new tokens.
        stops: integers [S], the stop tokens.
        active: boolean [B, 1], False for sequences that have ended.
    """

    def __init__(self, request, token):
        self.free_length = torch.as_tensor(request.free_length.astype("int64"), device=token.device)
        self.stops = token.new_tensor(request.stop_token_ids)
        self.active = self.free_length[:, None] > 0

    def advance(self, token, sampled):
        """Returns the next tokens [B, 1]: the sampled ones, and `token` for ended sequences.

        Updates `free_length` and `active` in place, and may be captured in a CUDA graph.
        """
        token = torch.where(self.active, sampled, token)
        self.free_length.sub_(self.active[:, 0].to(self.free_length.dtype))
        continues = (self.free_length[:, None] > 0) & ~torch.isin(token, self.stops)
        self.active.logical_and_(continues)
        return token

    def stop(self, rows):
        """Ends the sequences for which `rows`, boolean [B], is True."""
        self.active.logical_and_(~rows.to(self.active.device)[:, None])

    def copy(self):
        copy = type(self).__new__(type(self))
        vars(copy).update({name: tensor.clone() for name, tensor in vars(self).items()})
        return copy

    def set(self, other):
        """Copies the values of another object, in place."""
        self.free_length.copy_(other.free_length)
        self.stops.copy_(other.stops)
        self.active.copy_(other.active)
