"""Order of work on the device: at most one chunk of a prompt between two decoding steps."""

import collections
import threading
from typing import Any


class Scheduler:
    """Sequences from the queue to their end. Only `add` may be called from other threads.

    Args:
        slots: the `Slots`.
        chunk: integer, maximum number of tokens of a prompt between two steps.
        prefixes: the `PrefixCache`.

    Attributes:
        num_tokens, num_prompt_tokens: integers, numbers of generated and of processed tokens.
    """

    def __init__(self, slots, chunk, prefixes):
        self._slots, self._chunk, self._prefixes = slots, chunk, prefixes
        self._queue: collections.deque[Any] = collections.deque()
        self._lock = threading.Lock()
        self._prompt: Any = None  # the sequence whose prompt is being processed
        self._ahead: Any = None  # owners and results of the step that runs
        self.num_tokens, self.num_prompt_tokens = 0, 0

    def add(self, sequence, max_queued):
        """Appends a sequence to the queue; returns False if it has `max_queued` sequences."""
        with self._lock:
            if len(self._queue) >= max_queued:
                return False
            self._queue.append(sequence)
            return True

    @property
    def num_queued(self):
        return len(self._queue)

    @property
    def num_active(self):
        """Number of sequences in slots or on the way to one."""
        return len(self._slots.active) + (self._prompt is not None)

    @property
    def sequences(self):
        """All sequences that have not ended."""
        prompt = [] if self._prompt is None else [self._prompt]
        with self._lock:
            return [*self._slots.active, *prompt, *self._queue]

    @property
    def is_idle(self):
        return not (self._queue or self._prompt or self._ahead or self._slots.active)

    def advance(self):
        """Processes one chunk of a prompt, and one token of each sequence in a slot."""
        self._end_from_outside()
        self._process_chunk()
        launched = self._slots.step() if self._slots.active else None
        # The host works on the tokens of the step before while the device computes this one.
        before, self._ahead = self._ahead, launched
        if before is not None:
            self._receive(*before)

    def _end_from_outside(self):
        """Ends sequences that are cancelled or late."""
        with self._lock:
            ended = [s for s in self._queue if s.end_reason]
            for sequence in ended:
                self._queue.remove(sequence)
        if self._prompt is not None and self._prompt.end_reason:
            ended.append(self._prompt)
            self._prompt = None
        for sequence in self._slots.active:
            if sequence.end_reason:
                self._slots.remove(sequence, is_active=True)
                ended.append(sequence)
        for sequence in ended:
            sequence.end(sequence.end_reason)

    def _process_chunk(self):
        if self._prompt is None:
            if None not in self._slots.sequences:
                return
            with self._lock:
                if not self._queue:
                    return
                self._prompt = self._queue.popleft()
            self._prefixes.restore(self._prompt)
        sequence, last = self._prompt, len(self._prompt.prompt) - 1
        begin = sequence.num_processed
        if begin < last:
            # Chunks end at multiples from the start of the prompt, whatever was cached.
            stop = min(begin - begin % self._chunk + self._chunk, last)
            self._slots.process(sequence, stop)
            self.num_prompt_tokens += stop - begin
            if stop == last:
                self._prefixes.add(sequence.prompt[:last], sequence.row)
        if sequence.num_processed == last and self._slots.is_ready(sequence):
            self._prompt = None
            self._slots.insert(sequence)

    def _receive(self, owners, results):
        tokens, logprobs = results()
        for slot, sequence in owners:
            if sequence.request.done:
                continue
            row = type(logprobs)(*(a[slot : slot + 1] for a in logprobs)) if logprobs else None
            self.num_tokens += 1
            reason = sequence.add(int(tokens[slot]), row)
            if reason is not None:
                self._end(sequence, reason)

    def _end(self, sequence, reason):
        # A step that runs ahead has processed the last token, unless the device knew the end.
        is_ahead = not sequence.ends_on_device
        if self._prefixes.is_enabled:
            consumed = [*sequence.prompt, *sequence.token_ids]
            consumed = consumed if is_ahead else consumed[:-1]
            self._prefixes.add(consumed, self._slots.state(sequence), is_conversation=True)
        self._slots.remove(sequence, is_active=is_ahead)
        sequence.end(reason)

    def fail(self, error):
        """Ends all sequences with an error."""
        for sequence in self.sequences:
            if not sequence.request.done:
                sequence.end(error=error)
