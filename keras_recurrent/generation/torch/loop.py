"""Reading prompts and writing after them on torch, step by step in Python.

Each row has a place of its own, as in `loop.py`. The loop waits for the device only to see, every
few tokens, whether all rows have stopped.
"""

import contextlib

import keras
import numpy as np
import torch

from keras_recurrent.generation.lengths import initial_cache, longest_piece
from keras_recurrent.generation.torch.cuda_graph import RECENT
from keras_recurrent.generation.torch.runner import Ways
from keras_recurrent.generation.torch.sampling import Choice


class Loop:
    """What a language model needs to write.

    Args:
        model: the language model, whose sampler chooses tokens from probabilities.
        compiled: what `model.compile` got as `jit_compile`, None for "auto".
    """

    def __init__(self, model, compiled):
        self._model, self.ways = model, Ways(model, compiled)

    @torch.no_grad()
    def read(self, token_ids, lengths, cache):
        """The cache after the first `lengths` (NumPy, [B]) tokens of each row (NumPy, [B, T])."""
        for tokens, mask in self._pieces(token_ids, lengths):
            _, cache = self._model.backbone.hidden_states(tokens, mask, cache=cache)
        return cache

    def _pieces(self, token_ids, lengths):
        """Yields the tokens and masks that a model reads at once, of the first `lengths` tokens."""
        token_ids = keras.ops.convert_to_tensor(token_ids)
        rows = torch.as_tensor(lengths, device=token_ids.device)[:, None]
        size = longest_piece(len(lengths))
        for start in range(0, int(lengths.max()), size):
            stop = min(start + size, int(lengths.max()))
            mask = None
            if stop > lengths.min():
                mask = torch.arange(start, stop, device=token_ids.device) < rows
            yield token_ids[:, start:stop], mask

    @torch.no_grad()
    def write(self, token_ids, lengths, stop_token_ids, cache=None, keep=False):
        """Rows with new tokens.

        Args:
            token_ids: a NumPy array, integers `[B, T]`, prompts at the left.
            lengths: a NumPy array `[B]`, their lengths, at least 1.
            stop_token_ids: a tuple of integers, or None.
            cache: what the rows have seen before these tokens; None: nothing.
            keep: whether the cache after it is wanted.

        Returns:
            `(token_ids [B, T], lengths [B], cache)`, the first two NumPy arrays. In the cache, None
            unless it is kept, each row has seen all its tokens but the last.
        """
        room = token_ids.shape[1] - lengths
        longest = int(room.max())
        if longest == 0 and not keep:
            return token_ids, lengths, None
        cache = self._new_cache(token_ids, cache, keep)
        for tokens, mask in self._pieces(token_ids, lengths - 1):
            _, cache = self._model.backbone.hidden_states(tokens, mask, cache=cache)
        token = _last_token(token_ids, lengths)
        if longest == 0:
            return token_ids, lengths, cache
        choice = Choice(self._model.sampler)
        choice.begin(longest)
        stops = torch.as_tensor(stop_token_ids or (), dtype=token.dtype, device=token.device)
        full_at = torch.as_tensor(room, device=token.device)
        stopped = torch.zeros_like(full_at, dtype=torch.bool)
        written = token.new_zeros(len(lengths), longest)
        rows = Rows(full_at, stops) if keep else None
        with self.ways.tokens(token, cache, choice, rows) as walk:
            for start in range(0, longest, RECENT):
                stop = min(start + RECENT, longest)
                walk.write(written, start, stop)
                if stop_token_ids and stop < longest:
                    stopped |= torch.isin(written[:, start:stop], stops).any(dim=1)
                    if bool((stopped | (full_at <= stop)).all()):
                        break
            cache = walk.cache() if keep else None

        token_ids, new = token_ids.copy(), written.cpu().numpy()
        ends = np.isin(new, stop_token_ids or ())
        counts = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, longest)
        counts = np.minimum(counts, room).astype(lengths.dtype)
        for row, (start, count) in enumerate(zip(lengths, counts, strict=True)):
            token_ids[row, start : start + count] = new[row, :count]
        choice.end(int(counts.max()))
        return token_ids, lengths + counts, cache

    @torch.no_grad()
    def steps(self, token_ids, lengths, stop_token_ids, cache=None):
        """What writes token by token: see `Steps`. The arguments are those of `write`."""
        cache = self.read(token_ids, lengths - 1, self._new_cache(token_ids, cache, keep=True))
        token = _last_token(token_ids, lengths)
        room = torch.as_tensor(token_ids.shape[1] - lengths, device=token.device)
        stops = torch.as_tensor(stop_token_ids or (), dtype=token.dtype, device=token.device)
        return Steps(self._model.sampler, self.ways, token, cache, Rows(room, stops))

    def _new_cache(self, token_ids, cache, keep):
        """A copy of a given cache, since a step may overwrite it, or the initial cache."""
        if cache is None:
            return initial_cache(self._model, len(token_ids), token_ids.shape[1], keep)
        return keras.tree.map_structure(torch.clone, cache)


def _last_token(token_ids, lengths):
    last = token_ids[np.arange(len(lengths)), lengths - 1][:, None]
    return keras.ops.convert_to_tensor(last)


class Steps:
    """Tokens of all rows, one at each call."""

    def __init__(self, sampler, ways, token, cache, rows):
        self._choice, self._stack = Choice(sampler), contextlib.ExitStack()
        self._walk = self._stack.enter_context(ways.tokens(token, cache, self._choice, rows))

    @torch.no_grad()
    def __call__(self):
        """Tokens [B], a NumPy array; of a row that is done, its last one again."""
        # Others may have drawn meanwhile.
        self._choice.begin(1)
        self._choice.seed(0)
        token = self._walk.next_token()
        return token[:, 0].cpu().numpy()

    @torch.no_grad()
    def cache(self):
        """What each row has seen: all its tokens but the last."""
        return self._walk.cache()

    def close(self):
        """Lets others use what the steps run on."""
        self._stack.close()


class Rows:
    """Which rows still write.

    Args:
        room: int64 [B], how many tokens each row may write.
        stops: integers [S], the tokens at which a row stops.

    Attributes:
        active: boolean [B, 1], which rows still write.
    """

    def __init__(self, room, stops):
        self.room, self.stops = room.clone(), stops.clone()
        self.active = self.room[:, None] > 0

    def advance(self, token, chosen):
        """The next token [B, 1] of each row: the chosen one, or again the last of one that is done.

        It changes `room` and `active` in place, and may be a part of a CUDA graph.
        """
        token = torch.where(self.active, chosen, token)
        self.room.sub_(self.active[:, 0].to(self.room.dtype))
        goes_on = (self.room[:, None] > 0) & ~torch.isin(token, self.stops)
        self.active.logical_and_(goes_on)
        return token

    def copy(self):
        rows = Rows(self.room, self.stops)
        rows.active = self.active.clone()
        return rows

    def set(self, other):
        """Takes over the numbers of others, in place."""
        self.room.copy_(other.room)
        self.stops.copy_(other.stops)
        self.active.copy_(other.active)
