"""Results of one HTTP request, which the engine's thread passes to the event loop."""

import asyncio
import collections
import contextlib
import time
from typing import Any, NamedTuple


class Event(NamedTuple):
    """New text of one choice, or its end.

    Attributes:
        choice: integer, index of the choice.
        text: string, the new text.
        logprobs: a list of `TokenLogprobs` of the new tokens.
        completion: the `Completion` if the choice has ended, else None.
    """

    choice: int
    text: str
    logprobs: list[Any]
    completion: Any = None


class Mailbox:
    """Passes items from the engine's thread to functions that run in the event loop.

    One wake-up of the event loop passes all items that have arrived, because a wake-up for each
    token would slow the engine's thread down.
    """

    def __init__(self, loop):
        self._loop = loop
        self._items = collections.deque()
        self._is_scheduled = False

    def put(self, function, *item):
        """Calls `function(*item)` in the event loop; may be called from any thread."""
        self._items.append((function, item))
        if not self._is_scheduled:
            self._is_scheduled = True
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self):
        self._is_scheduled = False  # first, so that items that arrive meanwhile are delivered
        while self._items:
            function, item = self._items.popleft()
            function(*item)


class RequestGroup:
    """Group of the engine's requests that answer one HTTP request, one for each prompt.

    Args:
        requests: a list of requests of the engine.
        mailbox: the `Mailbox`.
        metrics: the `Metrics`.
    """

    def __init__(self, requests, mailbox, metrics):
        self._requests = requests
        self._metrics = metrics
        self._queue = asyncio.Queue()
        self._times = [None] * len(requests)  # of the last token of each request
        self.completions = [None] * len(requests)

        def put(index, delta):
            mailbox.put(self._receive, index, delta, time.monotonic())

        for index, request in enumerate(requests):
            request.set_listener(lambda delta, index=index: put(index, delta))
            request.add_done_callback(lambda request, index=index: put(index, None))

    def _receive(self, index, delta, now):
        """Records a delta, or None at the end of a request, also if the client has left."""
        if delta is None:
            self._metrics.end(self._requests[index])
        elif delta.token_ids:
            if self._times[index] is not None:
                self._metrics.token_time(now - self._times[index], len(delta.token_ids))
            self._times[index] = now
        self._queue.put_nowait((index, delta))

    def cancel(self):
        """Cancels the requests that have not ended."""
        for request, completion in zip(self._requests, self.completions, strict=True):
            if completion is None:
                request.cancel()

    async def events(self):
        """Yields the `Event`s of all requests, until they have ended.

        Deltas that arrive while the client is slow are one event. The first log probabilities are
        sent with the first text, which shows whether the tokenizer dropped a space before it.

        Raises:
            Exception: the error with which the engine ended a request.
        """
        sent = [0] * len(self._requests)
        withheld = [[] for _ in self._requests]
        while None in self.completions:
            for index, deltas, is_done in self._collect([await self._queue.get()]):
                text = "".join(delta.text or "" for delta in deltas)
                logprobs = withheld[index] + [x for delta in deltas for x in delta.logprobs]
                sent[index] += len(text)
                has_begun = sent[index] or any(delta.text is None for delta in deltas)
                withheld[index] = [] if has_begun else logprobs
                if is_done:
                    completion = self._requests[index].result(timeout=0)
                    self.completions[index] = completion
                    text += (completion.text or "")[sent[index] :]
                    yield Event(index, text, logprobs, completion)
                elif text or (logprobs and has_begun):
                    yield Event(index, text, logprobs)

    def _collect(self, items):
        """Returns `(index, deltas, is_done)` of each request with items in the queue."""
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        groups = {}
        for index, delta in items:
            deltas, is_done = groups.get(index, ([], False))
            if delta is not None:
                deltas.append(delta)
            groups[index] = deltas, is_done or delta is None
        return [(index, *group) for index, group in groups.items()]
