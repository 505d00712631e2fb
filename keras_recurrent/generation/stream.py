"""Text, or tokens, as they are written."""

from sys import is_finalizing

import numpy as np

from keras_recurrent.generation.cache import GenerationCache
from keras_recurrent.generation.text import TextPieces


class Stream:
    """An iterator over what a language model writes, as `stream` of the model returns it.

    Leaving it early costs nothing. An exception inside a step, such as Ctrl-C, closes it. `close`
    lets others use at once what it runs on; so does its end, or that nothing refers to it any more.
    Weights must stay as they are meanwhile.
    """

    def __init__(self, steps, rows, stop_token_ids, preprocessor, max_length, fit):
        self._steps, self._single, self._fit = steps, rows.single, fit
        self._stops, self._max_length = stop_token_ids or (), max_length
        self._last, self._num_tokens = rows.last_token, rows.num_tokens
        self._room = rows.room
        self._pieces = None
        if preprocessor is not None:
            self._pieces = [TextPieces(preprocessor, token) for token in rows.last_token]
        self._at_end: GenerationCache | None = None

    def __iter__(self):
        return self

    def __next__(self):
        while (self._room > 0).any():
            try:
                found = self._step()
            except BaseException:
                # The steps may be a token further than what is known of them here.
                self.close()
                raise
            if found is not None:
                return found
        if self._steps is not None:  # there was nothing to write
            self._at_end = self.cache
        self.close()
        raise StopIteration

    def _step(self):
        writes = self._room > 0
        token = self._steps_now()()
        self._last = np.where(writes, token, self._last)
        self._num_tokens = self._num_tokens + writes
        self._room = np.where(np.isin(token, self._stops), 0, self._room - writes)
        ends = writes & (self._room <= 0)
        found = self._found(token, writes, ends)
        if not (self._room > 0).any():
            self._at_end = self.cache
            self.close()
        return found

    def _found(self, token, writes, ends):
        """What the new tokens give; None where there is nothing to show yet."""
        if self._pieces is None:
            return [int(t) if w else None for t, w in zip(token, writes, strict=True)]
        texts = [
            (pieces.add(t) + (pieces.end() if end else "")) if writing else ""
            for pieces, t, writing, end in zip(self._pieces, token, writes, ends, strict=True)
        ]
        if not any(texts):
            return None
        return texts[0] if self._single else texts

    @property
    def cache(self):
        """The `GenerationCache` after the tokens so far, to go on from.

        It holds all tokens that were written, also those of a character that is not whole yet.

        Raises:
            RuntimeError: the stream was closed before its end, or an exception broke off a step.
        """
        if self._at_end is not None:
            return self._at_end
        arguments = self._last, self._num_tokens, self._max_length, self._fit
        return GenerationCache(self._steps_now().cache(), *arguments)

    def close(self):
        """Ends the stream."""
        self._room = np.zeros_like(self._room)
        if self._steps is not None:
            self._steps.close()
        self._steps = None

    def __del__(self):
        # At the end of the program there is nobody to give anything back to.
        if getattr(self, "_steps", None) is not None and not is_finalizing():
            self._steps.close()

    def _steps_now(self):
        if self._steps is None:
            raise RuntimeError(
                "The stream was closed, or an exception broke off a step of it. Ask for its "
                "`cache` before, or begin again."
            )
        return self._steps
