"""Sequence of one request of an engine, which the engine's thread generates."""

import time
from threading import TIMEOUT_MAX
from typing import Any

import numpy as np

from keras_recurrent.generation.sequence import Sequence
from keras_recurrent.serving.request import Delta, EngineClosed


class RequestSequence(Sequence):
    """Sequence that passes its tokens, as text, to a request.

    Args:
        request: the `EngineRequest`.
        arguments: as in `Sequence`, without a listener.
        text: the `StreamedText`, or None without a preprocessor.
        timeout: number, seconds from now, or None.
        ends: integers, numbers of prompt tokens after which the state is saved.
        salt: string, `cache_salt` of the request, or None.

    Attributes:
        num_cached: integer, number of tokens of the prompt from the prefix cache.
        num_processed: integer, number of tokens of the prompt whose state is known.
        state: the state of the backbone after these tokens, until the sequence has a slot. None:
            before all tokens.
        error: the error that ended the sequence, or None.
    """

    def __init__(self, request, *arguments, text, timeout, ends, salt):
        super().__init__(*arguments)
        self.request, self.ends, self.salt = request, ends, salt
        self.num_cached, self.num_processed, self._num_sent = 0, 0, 0
        self.state: Any = None
        self.error: BaseException | None = None
        self._text = text
        self._deadline = None if timeout is None else time.monotonic() + min(timeout, TIMEOUT_MAX)

    def end_reason(self, now):
        """Returns `"cancelled"`, `"timeout"` or None at a time of `time.monotonic`."""
        if self.request._is_cancelled:
            return "cancelled"
        return "timeout" if self._deadline is not None and now >= self._deadline else None

    @property
    def tokens_in_state(self):
        """Tokens in the state of the slot; None if it contains tokens beyond the sequence."""
        count = len(self.token_ids) if self.ends_on_device else self.num_launched
        if count > len(self.token_ids) + 1:
            return None
        return np.append(self.prompt, np.array(self.token_ids[: count - 1], "int32"))

    def fail(self, error):
        """Ends the sequence because of an error in the engine."""
        self.error = EngineClosed(f"The engine failed: {error!r}")
        self.error.__cause__ = error
        self.end("error")

    def _notify(self):
        text = None
        if self._text is not None and self.error is None:
            try:
                self._text.read(self)
                text = self._text.take()
            except UnicodeDecodeError as error:  # of a strict tokenizer
                self.error, self.finish_reason = error, "error"
        first, self._num_sent = self._num_sent, len(self.token_ids)
        if self._num_sent > first and self.error is None:
            self.request._add(Delta(text, self.token_ids[first:], self.logprobs[first:]))
        if self.finish_reason is not None:
            self.request._end(self, self._text and self._text.shown)
