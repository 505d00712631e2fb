"""Requests of an engine, as callers see them, and their results."""

import collections
import concurrent.futures
import dataclasses
import logging
import os
import threading
import time
from typing import Any, NamedTuple

from keras_recurrent.generation.sampling_params import TokenLogprobs


class EngineFull(RuntimeError):
    """Error of `Engine.submit` while the queue has its maximum number of requests."""


class EngineClosed(RuntimeError):
    """Error of `Engine.submit` after `close`, and of requests whose engine failed."""


def check_process(pid):
    """Raises an `EngineClosed` unless this is the process `pid`, which has the engine's thread."""
    if pid != os.getpid():
        raise EngineClosed(
            f"The engine runs in process {pid}, of which this process, {os.getpid()}, is a fork "
            "without the engine's thread. Create the engine after the fork."
        )


class PromptTooLong(ValueError):
    """Error of `Engine.submit` for a prompt that leaves too few tokens for the answer."""

    def __init__(self, num_tokens, max_new_tokens, max_length):
        relation, remedy = "leaves no tokens for the answer within", ""
        if max_new_tokens is not None and num_tokens < max_length:
            relation = f"and `max_new_tokens` ({max_new_tokens}) exceed"
            remedy = " or reduce `max_new_tokens`"
        super().__init__(
            f"The prompt ({num_tokens} tokens) {relation} {max_length} tokens, the `max_length` of "
            f"the engine. Shorten the prompt{remedy}."
        )


class Delta(NamedTuple):
    """Next part of an answer.

    Attributes:
        text: string, text that became certain; it may be empty, also after several tokens. None
            without a preprocessor.
        token_ids: a list of integers, the new tokens.
        logprobs: a list of `TokenLogprobs`, one for each new token; empty if not requested.
    """

    text: str | None
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


@dataclasses.dataclass(frozen=True)
class Completion:
    """Answer to a request.

    Attributes:
        text: string, the text before the stop string, and without an end token of the
            preprocessor. None without a preprocessor.
        token_ids: a list of integers, the new tokens, including a stop token or string.
        logprobs: a list of `TokenLogprobs`, one for each new token; empty if not requested.
        finish_reason: `"stop"` at a stop token or string, `"length"` at the maximum number of
            tokens, `"cancelled"`, or `"timeout"`. In the last two cases, the answer is incomplete.
        num_prompt_tokens: integer.
        num_cached_tokens: integer, number of tokens of the prompt that were in the prefix cache.
        time_to_first_token: float, seconds from `submit` to the first token. None: no token.
        prompt_logprobs: a list of `TokenLogprobs`, one for each token of the prompt. None if they
            were not requested.
    """

    text: str | None
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    time_to_first_token: float | None
    prompt_logprobs: list[TokenLogprobs] | None = None


class EngineRequest:
    """Request of an engine: an iterator over the `Delta`s of its answer.

    All methods may be called from any thread. Iteration blocks until the next delta, and ends with
    the request.

    Attributes:
        num_prompt_tokens: integer.
        prompt_logprobs: as in `Completion`, from the first delta on.
    """

    def __init__(self, num_prompt_tokens, text, stop):
        """Makes the request, with the `StreamedText` of the answer or None.

        stop: a function. `stop(n)` ends the request after its first `n` new tokens, and
            `stop(None)` cancels it.
        """
        self.num_prompt_tokens, self._pid = num_prompt_tokens, os.getpid()
        self._begin, self._first = time.monotonic(), None
        self._text, self._stop = text, stop
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self._deltas: collections.deque[Delta] = collections.deque()
        self._future: concurrent.futures.Future[Completion] = concurrent.futures.Future()
        self._listener: Any = None
        self._changed = threading.Condition()

    def __iter__(self):
        return self

    def __next__(self):
        check_process(self._pid)
        with self._changed:
            self._changed.wait_for(lambda: self._deltas or self.done)
            if self._deltas:
                return self._deltas.popleft()
        self._future.result()  # raises the error of a failed engine
        raise StopIteration

    @property
    def done(self):
        """True if the request has ended."""
        return self._future.done()

    @property
    def finish_reason(self):
        """As in `Completion`, or None while the request runs or if its engine failed."""
        has_ended = self.done and self._future.exception() is None
        return self._future.result().finish_reason if has_ended else None

    def result(self, timeout=None):
        """Waits for the `Completion`.

        Args:
            timeout: number, seconds. None: waits without limit.

        Raises:
            TimeoutError: the request has not ended; it continues.
            EngineClosed: the engine failed, or this process is a fork of the engine's process.
        """
        check_process(self._pid)
        seconds = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        if not concurrent.futures.wait([self._future], seconds).done:
            raise TimeoutError(f"The request has not ended after {timeout} seconds.")
        return self._future.result()

    def cancel(self):
        """Ends the request, at the latest after two more tokens; later calls have no effect."""
        self._stop(None)

    def add_done_callback(self, function):
        """Calls `function(request)` at the end of the request, or at once if it has ended.

        It runs in the generation thread, which it must not block, or in the calling thread if the
        request has already ended. Its errors are logged, `SystemExit` as well.
        """
        self._future.add_done_callback(lambda future: self._call(function, self))

    def set_listener(self, function):
        """Passes deltas to `function(delta)` instead of the iterator.

        Earlier deltas are passed in the calling thread, later ones in the generation thread, which
        `function` must not block. If `function` raises an error, the error is logged, the request
        is cancelled, and `function` is not called again.
        """
        with self._changed:
            self._listener = function
            while self._deltas:
                self._call(self._listener, self._deltas.popleft())

    def _receive(self, token_ids, logprobs, finish_reason, num_cached, error, prompt=None):
        """Adds new tokens, after which the request may have ended.

        Args:
            token_ids, logprobs: as in `Delta`.
            finish_reason, num_cached: as in `Completion`, or None.
            error: the error that ended the request, or None.
            prompt: in the first call, `prompt_logprobs` as in `Completion`; in later calls, None.

        Returns:
            The arguments of `_end` if the request has ended, else None.
        """
        text = None
        self.prompt_logprobs = prompt if self.prompt_logprobs is None else self.prompt_logprobs
        if self._text is not None and error is None:
            try:
                num_tokens = self._text.read(token_ids, finish_reason is not None)
            except Exception as failure:  # of the tokenizer, such as a UnicodeDecodeError
                error = failure
                self.cancel()
            else:
                if self._text.is_stopped:
                    token_ids, logprobs = token_ids[:num_tokens], logprobs[:num_tokens]
                    if finish_reason is None:
                        self._stop(len(self._token_ids) + num_tokens)
                    finish_reason = "stop"
                text = self._text.take()
        if error is None:
            self._token_ids += token_ids
            self._logprobs += logprobs
            if token_ids:
                self._add(Delta(text, token_ids, logprobs))
            if finish_reason is None:
                return None
        return finish_reason, num_cached, error

    def _add(self, delta):
        with self._changed:
            if self._first is None:
                self._first = time.monotonic() - self._begin
            if self._listener is not None:
                self._call(self._listener, delta)
            else:
                self._deltas.append(delta)
                self._changed.notify_all()

    def _end(self, finish_reason, num_cached, error):
        self._stop = lambda num_tokens: None  # releases the engine
        if error is None:
            text = self._text and self._text.shown
            answer = text, self._token_ids, self._logprobs, finish_reason
            counts = self.num_prompt_tokens, num_cached
            completion = Completion(*answer, *counts, self._first, self.prompt_logprobs)
            self._future.set_result(completion)
        else:
            self._future.set_exception(error)
        with self._changed:
            self._changed.notify_all()

    def _call(self, function, argument):
        """Calls a function of the caller, whose error must not end the engine."""
        try:
            function(argument)
        except BaseException as error:
            is_signal = threading.current_thread() is threading.main_thread()
            if is_signal and not isinstance(error, Exception):
                raise
            logging.getLogger(__name__).exception(
                "A callback failed. Its request is cancelled if it has not ended."
            )
            self._listener = lambda delta: None
            self.cancel()
