"""An engine without a model, with the interface of `keras_recurrent.serving.Engine`.

It answers with `TEXT`, a character at a time. Prompts with some words make it fail.
"""

import threading
import time
from typing import Any, NamedTuple

from keras_recurrent.generation.output import TokenLogprobs
from keras_recurrent.serving.errors import EngineClosed, EngineFull

TEXT = "Größe <b>&amp;</b> 🙂 " * 500
MAX_LENGTH = 2000


class Delta(NamedTuple):
    text: str
    token_ids: list[int]
    logprobs: Any


class Completion(NamedTuple):
    text: str
    token_ids: list[int]
    logprobs: list[Any]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    time_to_first_token: float | None


class Request:
    def __init__(self, prompt, limit, sampling, stop, timeout):
        self.prompt, self.limit, self.sampling, self.stop = prompt, limit, sampling, stop
        self.end = time.monotonic() + (timeout or 1e9)
        self.is_cancelled = False
        self._deltas, self._listener, self._callbacks = [], None, []
        self._completion, self._lock = None, threading.RLock()

    def set_listener(self, listener):
        with self._lock:
            for delta in self._deltas:
                listener(delta)
            self._listener = listener

    def add_done_callback(self, callback):
        with self._lock:
            if self._completion is None:
                self._callbacks.append(callback)
                return
        callback(self)

    def cancel(self):
        self.is_cancelled = True

    def result(self, timeout=None):
        if isinstance(self._completion, Exception):
            raise self._completion
        return self._completion

    def add(self, delta):
        with self._lock:
            self._deltas.append(delta)
            if self._listener:
                self._listener(delta)

    def finish(self, completion):
        with self._lock:
            self._completion = completion
            callbacks = self._callbacks
        for callback in callbacks:
            callback(self)


class FakeEngine:
    """Serves `num_slots` requests at a time, each token of all of them in `step_time` seconds."""

    def __init__(self, num_slots=4, max_queued=8, step_time=0.0005):
        self.num_slots, self.max_queued, self.step_time = num_slots, max_queued, step_time
        self._queue, self._active, self._is_closed, self._tokens = [], [], False, 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, prompt, sampling=None, max_new_tokens=None, stop=None, timeout=None):
        text = prompt[-1]["content"] if prompt and isinstance(prompt[0], dict) else prompt
        if len(text) > MAX_LENGTH:
            raise ValueError(f"`max_length` is {MAX_LENGTH} tokens, and the prompt has {len(text)}")
        sampling.check_vocabulary(300)
        with self._lock:
            if self._is_closed:
                raise EngineClosed
            if len(self._queue) >= self.max_queued:
                raise EngineFull
            limit = len(TEXT) if max_new_tokens is None else max_new_tokens
            self._queue.append(Request(text, limit, sampling, stop, timeout))
            return self._queue[-1]

    def stats(self):
        counts = {"queued": len(self._queue), "active": len(self._active)}
        return {**counts, "num_slots": self.num_slots, "tokens": self._tokens}

    def close(self, wait=True):
        self._is_closed = True
        self._thread.join()

    def _run(self):
        while not self._is_closed:
            time.sleep(self.step_time)
            with self._lock:
                while self._queue and len(self._active) < self.num_slots:
                    self._active.append((self._queue.pop(0), []))
                rows = list(self._active)
            for request, tokens in rows:
                if self._step(request, tokens):
                    self._active.remove((request, tokens))

    def _step(self, request, tokens):
        text = TEXT[: len(tokens)]
        reason = "cancelled" if request.is_cancelled else None
        reason = reason or ("timeout" if time.monotonic() > request.end else None)
        if request.stop and text.endswith(request.stop):
            reason, text = "stop", text[: -len(request.stop)]
        reason = reason or ("length" if len(tokens) >= request.limit else None)
        if request.prompt == "fail":
            request.finish(RuntimeError("the device failed"))
            return True
        if reason:
            entries = self._logprobs(request, tokens)
            request.finish(Completion(text, tokens, entries, reason, len(request.prompt), 0, 0.01))
            return True
        tokens.append(ord(TEXT[len(tokens)]) % 256 + 3)
        self._tokens += 1
        held = request.stop and TEXT[: len(tokens)].endswith(request.stop)
        shown = "" if held else TEXT[len(tokens) - 1]
        request.add(Delta(shown, tokens[-1:], self._logprobs(request, tokens[-1:])))
        return False

    def _logprobs(self, request, tokens):
        number = request.sampling.logprobs
        if number is None:
            return []
        return [TokenLogprobs(t, -0.5, {t + i: -0.5 - i for i in range(number)}) for t in tokens]
