"""Sequence of one request, as the thread of the engine generates it."""

import time
from threading import TIMEOUT_MAX
from typing import Any

from keras_recurrent.generation.output import token_logprobs
from keras_recurrent.serving.request import Delta

NUMBERS_PER_BLOCK = 64  # random numbers that are drawn at once


class Sequence:
    """Prompt, options and new tokens of one request.

    Args:
        request: the `EngineRequest`.
        prompt: int32 array, at least one token.
        sampling: the `Sampling` of this sequence alone.
        max_new_tokens: integer.
        stop_token_ids: a tuple of integers, which may be empty.
        text: the `StreamedText`, or None without a preprocessor.
        timeout: number, seconds from now, or None.
        ends: a tuple of integers, numbers of tokens after which the state is saved.
        salt: string, `cache_salt` of the request, or None.

    Attributes:
        token_ids: a list of integers, the new tokens.
        num_cached: integer, number of tokens of the prompt from the prefix cache.
        num_processed: integer, number of tokens of the prompt whose state is known.
        row: the state after these tokens, until the sequence has a slot: from the prefix cache, or
            as `Slots.process` returns it. None: before all tokens.
    """

    def __init__(
        self,
        request,
        prompt,
        sampling,
        max_new_tokens,
        stop_token_ids,
        text=None,
        timeout=None,
        ends=(),
        salt=None,
    ):
        self.request, self.prompt, self.sampling, self.ends = request, prompt, sampling, ends
        self.max_new_tokens, self.stop_token_ids = max_new_tokens, frozenset(stop_token_ids)
        self.salt = salt
        self.params = sampling.params[0]
        self.token_ids: list[int] = []
        self.num_cached, self.num_processed = 0, 0
        self.row: Any = None
        self._text, self._numbers = text, iter(())
        self._deadline = None if timeout is None else time.monotonic() + min(timeout, TIMEOUT_MAX)

    def next_number(self):
        """Returns the random number of the next token."""
        if not self.sampling.features.is_random:
            return 0.0
        number = next(self._numbers, None)
        if number is None:
            self._numbers = iter(self.sampling.uniform(NUMBERS_PER_BLOCK)[0])
            number = next(self._numbers)
        return number

    def end_reason(self, now):
        """Returns the reason to end the request from outside, or None.

        now: float, the time of `time.monotonic`.

        Returns:
            `"cancelled"`, `"timeout"` or None.
        """
        if self.request._is_cancelled:
            return "cancelled"
        return "timeout" if self._deadline is not None and now >= self._deadline else None

    @property
    def ends_on_device(self):
        """True if the last token is a stop token, or the maximum number is reached."""
        is_last = len(self.token_ids) >= self.max_new_tokens
        return is_last or self.token_ids[-1] in self.stop_token_ids

    def add(self, token, logprobs):
        """Appends a token and passes it to the request.

        Args:
            token: integer.
            logprobs: its `Logprobs` as NumPy arrays [1] and [1, K], or None.

        Returns:
            The finish reason, or None.
        """
        self.token_ids.append(token)
        is_last, is_stopped, text = self.ends_on_device, False, None
        if self._text is not None:
            text = self._text.add(token, is_last)
            is_stopped = self._text.is_stopped
        found = [] if logprobs is None else token_logprobs(self.params, [token], logprobs)
        self.request._add(Delta(text, [token], found))
        if not is_last and not is_stopped:
            return None
        return "stop" if is_stopped or token in self.stop_token_ids else "length"

    def end(self, finish_reason=None, error=None):
        text = self._text and self._text.shown
        self.request._end(finish_reason, text, self.token_ids, self.num_cached, error)
