"""Order of work on the device: chunks of prompts between two decoding steps."""

import collections
import threading
import time
from typing import Any

import numpy as np

from keras_recurrent.serving.prefix_cache import MIN_TOKENS

# While requests wait for slots that are free, more chunks are processed between two steps: one more
# for each `WAITING_PER_CHUNK` of them, up to `MAX_CHUNKS`.
WAITING_PER_CHUNK, MAX_CHUNKS = 4, 4
SECONDS_PER_SEARCH = 0.02  # between two searches of the queue for ended requests


class Scheduler:
    """Sequences from the queue to their end. Other threads may call `add` and read properties.

    Args:
        slots: the `Slots`.
        chunk: integer, maximum number of tokens of a chunk.
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
        self._next_search = 0.0
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
        return self._slots.num_active + (self._prompt is not None)

    @property
    def sequences(self):
        """All sequences that have not ended. May be read from any thread."""
        # In the order in which they move, so that none is missed.
        with self._lock:
            queued = list(self._queue)
        prompt, active = self._prompt, self._slots.active
        return list(dict.fromkeys([*active, *([prompt] if prompt else []), *queued]))

    @property
    def is_idle(self):
        return not (self._queue or self._prompt or self._ahead or self._slots.num_active)

    def advance(self):
        """Processes chunks of prompts, and one token of each sequence in a slot."""
        self._end_from_outside()
        self._process_chunks()
        launched = self._slots.step() if self._slots.num_active else None
        # The host works on the tokens of the step before while the device computes this one.
        before, self._ahead = self._ahead, launched
        if before is not None:
            self._receive(*before)

    def _end_from_outside(self):
        """Ends sequences that are cancelled or late."""
        now, ended = time.monotonic(), []
        if now >= self._next_search:
            self._next_search = now + SECONDS_PER_SEARCH
            with self._lock:
                ended = [s for s in self._queue if s.end_reason(now)]
                for sequence in ended:
                    self._queue.remove(sequence)
        if self._prompt is not None and self._prompt.end_reason(now):
            ended.append(self._prompt)
            self._prompt = None
        for sequence in self._slots.active:
            if sequence.end_reason(now):
                self._slots.remove(sequence, is_active=True)
                ended.append(sequence)
        for sequence in ended:
            sequence.end(sequence.end_reason(now))

    def _process_chunks(self):
        """Processes chunks of prompts, which together delay the next step by a bounded time."""
        num_waiting = min(len(self._queue), self._slots.num_free)
        budget = self._chunk * min(MAX_CHUNKS, 1 + num_waiting // WAITING_PER_CHUNK)
        while 0 <= (cost := self._next_cost()) <= budget:
            if not self._process_chunk():
                break
            budget -= cost

    def _next_cost(self):
        """Returns the cost of the next chunk in tokens, or -1 if there is none."""
        sequence = self._prompt
        if sequence is None:
            if not self._queue or not self._slots.num_free:
                return -1
            sequence = self._queue[0]
        # The time of a short chunk does not decrease with its length: it reads all weights.
        return max(self._chunk_end(sequence) - sequence.num_processed, self._chunk // 2)

    def _chunk_end(self, sequence):
        """Returns the position at which the next chunk of a prompt ends.

        Chunks end at multiples from the start of the prompt, whatever was cached, and where states
        are saved.
        """
        begin, last = sequence.num_processed, len(sequence.prompt) - 1
        return min(begin - begin % self._chunk + self._chunk, last, *self._saved_ends(sequence))

    def _saved_ends(self, sequence):
        """Returns the further positions of a prompt at which its state is saved."""
        last = len(sequence.prompt) - 1
        ends = [end for end in sequence.ends if end - sequence.num_cached >= MIN_TOKENS]
        return [end for end in (*ends, last) if sequence.num_processed < end <= last]

    def _process_chunk(self):
        """Processes the next chunk, and moves a finished prompt to a slot.

        Returns False if there is no prompt, or if its decoding step is still being compiled.
        """
        if self._prompt is None:
            with self._lock:
                if not self._queue:
                    return False
                self._prompt = self._queue.popleft()
            self._prefixes.restore(self._prompt)
        sequence, last = self._prompt, len(self._prompt.prompt) - 1
        begin = sequence.num_processed
        if begin < last:
            stop, saved = self._chunk_end(sequence), self._saved_ends(sequence)
            self._slots.process(sequence, stop)
            self.num_prompt_tokens += stop - begin
            if stop in saved:
                self._prefixes.add(sequence.prompt[:stop], sequence.row)
        if sequence.num_processed == last:
            if not self._slots.is_ready(sequence):
                return False
            self._prompt = None
            self._slots.insert(sequence)
        return True

    def _receive(self, owners, results):
        tokens, logprobs = results()
        tokens, row = tokens.tolist(), None
        for slot, sequence in owners:
            if sequence.request.done:
                continue
            if logprobs:
                row = type(logprobs)(*(a[slot : slot + 1] for a in logprobs))
            self.num_tokens += 1
            reason = sequence.add(tokens[slot], row)
            if reason is not None:
                self._end(sequence, reason)

    def _end(self, sequence, reason):
        # A step that runs ahead has processed the last token, unless the device knew the end.
        is_ahead = not sequence.ends_on_device
        if self._prefixes.is_enabled:
            new = sequence.token_ids if is_ahead else sequence.token_ids[:-1]
            consumed = np.append(sequence.prompt, np.array(new, "int32"))
            self._prefixes.add(consumed, self._slots.state(sequence))
        self._slots.remove(sequence, is_active=is_ahead)
        sequence.end(reason)

    def fail(self, error):
        """Ends all sequences with an error."""
        for sequence in self.sequences:
            if not sequence.request.done:
                sequence.end(error=error)
