"""Results of one HTTP request, which are passed to the event loop."""

import asyncio
import collections
import contextlib
import time


class Mailbox:
    """Passes items from the thread that makes the text to functions that run in the event loop.

    One wake-up of the event loop passes all items that have arrived, because a wake-up for each
    token would slow that thread down. In the HTTP process, both are the same thread.
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

    is_streamed: boolean. False: `events` only yields the ends of the requests.
    """

    def __init__(self, requests, mailbox, metrics, is_streamed):
        self._requests = requests
        self._metrics, self._is_streamed = metrics, is_streamed
        self._received = {}  # {index of a request: its new deltas, and None at its end}
        self._has_received = asyncio.Event()
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
        if delta is None or self._is_streamed:
            self._received.setdefault(index, []).append(delta)
            self._has_received.set()

    def prompt_logprobs(self, index):
        return self._requests[index].prompt_logprobs

    def cancel(self):
        """Cancels the requests that have not ended."""
        for request, completion in zip(self._requests, self.completions, strict=True):
            if completion is None:
                request.cancel()

    async def events(self):
        """Yields new text and log probabilities of all requests, until they have ended.

        Deltas that arrive while the client is slow are one event. The first log probabilities are
        sent with the first text, which shows whether the tokenizer dropped a space before it.

        Yields:
            The index of a request, a string, a list of `TokenLogprobs`, and the `Completion` if the
            request has ended, else None.

        Raises:
            Exception: the error with which the engine ended a request.
        """
        sent = [0] * len(self._requests)
        withheld = [[] for _ in self._requests]
        while None in self.completions:
            await self._has_received.wait()
            self._has_received.clear()
            received, self._received = self._received, {}
            for index, deltas in received.items():
                if is_done := deltas[-1] is None:
                    deltas.pop()
                text = "".join(delta.text or "" for delta in deltas)
                logprobs = withheld[index] + [x for delta in deltas for x in delta.logprobs]
                sent[index] += len(text)
                has_begun = sent[index] or any(delta.text is None for delta in deltas)
                withheld[index] = [] if has_begun else logprobs
                if is_done:
                    completion = self._requests[index].result(timeout=0)
                    self.completions[index] = completion
                    text += (completion.text or "")[sent[index] :]
                    yield index, text, logprobs, completion
                elif text or (logprobs and has_begun):
                    yield index, text, logprobs, None
