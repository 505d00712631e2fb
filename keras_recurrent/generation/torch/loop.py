"""Prompt processing and decoding on torch, step by step in Python.

Sequences advance from their own lengths, as in `generation/loop.py`. The loop waits for the device
only every `RECENT` tokens, to check whether all sequences have ended.
"""

import contextlib

import keras
import numpy as np
import torch

from keras_recurrent.generation.lengths import initial_cache, max_chunk_length
from keras_recurrent.generation.torch.cuda_graph import RECENT
from keras_recurrent.generation.torch.runner import Runner
from keras_recurrent.generation.torch.sampling import TokenSampler


class Loop:
    """Prompt processing and decoding of a language model.

    Args:
        model: the language model, whose sampler only samples from probabilities.
        compiled: `jit_compile` of `model.compile`, None for "auto".
        snapshot: the `Snapshot` of the model.
    """

    def __init__(self, model, compiled, snapshot):
        self.compiled, self.snapshot = compiled, snapshot
        self._model, self.runner = model, Runner(model, compiled, snapshot)

    @torch.no_grad()
    def prefill(self, token_ids, lengths, cache):
        """Returns the cache after the first `lengths` tokens of each sequence.

        Args:
            token_ids: integers `[B, T]`, a NumPy array.
            lengths: integers `[B]`, a NumPy array.
            cache: the cache before these tokens.
        """
        for tokens, mask in self._chunks(token_ids, lengths):
            _, cache = self._model.backbone.hidden_states(tokens, mask, cache=cache)
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
    def generate(self, token_ids, lengths, stop_token_ids, cache=None, keep=False):
        """Processes prompts and generates tokens after them.

        Args:
            token_ids: integers `[B, T]`, a NumPy array, prompts followed by padding.
            lengths: integers `[B]`, a NumPy array, lengths of the prompts, at least 1.
            stop_token_ids: a tuple of integers, or None.
            cache: the cache before these tokens. None: the initial cache.
            keep: boolean, True if the final cache is returned.

        Returns:
            `(token_ids [B, T], lengths [B], cache)`, the first two NumPy arrays. With `keep`, the
            cache is that after all tokens of each sequence but the last, else None.
        """
        free_length = token_ids.shape[1] - lengths
        max_tokens = int(free_length.max())
        if max_tokens == 0 and not keep:
            return token_ids, lengths, None
        cache = self._new_cache(token_ids, cache, keep)
        for tokens, mask in self._chunks(token_ids, lengths - 1):
            _, cache = self._model.backbone.hidden_states(tokens, mask, cache=cache)
        token = _last_token(token_ids, lengths)
        if max_tokens == 0:
            return token_ids, lengths, cache
        sampler = TokenSampler(self._model.sampler)
        sampler.begin(max_tokens)
        stops = torch.as_tensor(stop_token_ids or (), dtype=token.dtype, device=token.device)
        full_at = torch.as_tensor(free_length, device=token.device)
        stopped = torch.zeros_like(full_at, dtype=torch.bool)
        generated = token.new_zeros(len(lengths), max_tokens)
        sequences = ActiveSequences(full_at, stops) if keep else None
        with self.runner.decode(token, cache, sampler, sequences) as decoder:
            for start in range(0, max_tokens, RECENT):
                stop = min(start + RECENT, max_tokens)
                decoder.generate(generated, start, stop)
                if stop_token_ids and stop < max_tokens:
                    stopped |= torch.isin(generated[:, start:stop], stops).any(dim=1)
                    if bool((stopped | (full_at <= stop)).all()):
                        break
            cache = decoder.cache() if keep else None

        token_ids, new = token_ids.copy(), generated.cpu().numpy()
        is_stop = np.isin(new, stop_token_ids or ())
        counts = np.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, max_tokens)
        counts = np.minimum(counts, free_length).astype(lengths.dtype)
        for row, (start, count) in enumerate(zip(lengths, counts, strict=True)):
            token_ids[row, start : start + count] = new[row, :count]
        sampler.end(int(counts.max()))
        return token_ids, lengths + counts, cache

    @torch.no_grad()
    def steps(self, token_ids, lengths, stop_token_ids, cache=None):
        """Returns the `Steps` that generate token by token.

        Args:
            token_ids, lengths, stop_token_ids, cache: as in `generate`.
        """
        cache = self.prefill(token_ids, lengths - 1, self._new_cache(token_ids, cache, keep=True))
        token = _last_token(token_ids, lengths)
        free_length = torch.as_tensor(token_ids.shape[1] - lengths, device=token.device)
        stops = torch.as_tensor(stop_token_ids or (), dtype=token.dtype, device=token.device)
        sequences = ActiveSequences(free_length, stops)
        return Steps(self._model.sampler, self.runner, token, cache, sequences)

    def _new_cache(self, token_ids, cache, keep):
        """Returns a copy of `cache`, since a step may overwrite it, or the initial cache."""
        if cache is None:
            return initial_cache(self._model, len(token_ids), token_ids.shape[1], keep)
        return keras.tree.map_structure(torch.clone, cache)


def _last_token(token_ids, lengths):
    last = token_ids[np.arange(len(lengths)), lengths - 1][:, None]
    return keras.ops.convert_to_tensor(last)


class Steps:
    """Function that returns the next token of each sequence.

    Args:
        sampler: the sampler of the model.
        runner: the `Runner` of the model.
        token: integers [B, 1], the last token of each prompt.
        cache: the cache before it, which may be overwritten.
        sequences: the `ActiveSequences`.
    """

    def __init__(self, sampler, runner, token, cache, sequences):
        self._sampler, self._stack = TokenSampler(sampler), contextlib.ExitStack()
        decoder = runner.decode(token, cache, self._sampler, sequences)
        self._decoder = self._stack.enter_context(decoder)

    @torch.no_grad()
    def __call__(self):
        """Returns tokens [B], a NumPy array; for a sequence that has ended, its last one again."""
        # For each token, since other calls may use the sampler's generator in between.
        self._sampler.begin(1)
        self._sampler.seed(0)
        token = self._decoder.next_token()
        return token[:, 0].cpu().numpy()

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
        free_length: int64 [B], maximum number of new tokens.
        stops: integers [S], the stop tokens.

    Attributes:
        active: boolean [B, 1], False for sequences that have ended.
    """

    def __init__(self, free_length, stops):
        self.free_length, self.stops = free_length.clone(), stops.clone()
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

    def copy(self):
        copy = ActiveSequences(self.free_length, self.stops)
        copy.active = self.active.clone()
        return copy

    def set(self, other):
        """Copies the values of another object, in place."""
        self.free_length.copy_(other.free_length)
        self.stops.copy_(other.stops)
        self.active.copy_(other.active)
