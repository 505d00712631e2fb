"""Order of work on the device: chunks of prompts between decoding steps."""

import collections
import threading
import time
from typing import Any

import numpy as np

from keras_recurrent.serving.prefix_cache import MIN_TOKENS
from keras_recurrent.serving.request import EngineClosed

# While n requests are queued although slots are free, the bound on delays of steps is multiplied by
# 1 + n // `WAITING_PER_FACTOR`, at most by `MAX_FACTOR`.
WAITING_PER_FACTOR, MAX_FACTOR = 2, 4
SECONDS_PER_SEARCH = 0.02  # between two searches of the queue for ended requests


class Scheduler:
    """Sequences from the queue to their end. Other threads may call `add` and read properties.

    Args:
        slots: the `Slots`.
        prefixes: the `PrefixCache`.

    Attributes:
        num_tokens, num_prompt_tokens: integers, numbers of generated tokens and of processed tokens
            of prompts.
        changed: a `threading.Condition`, which is notified of new sequences and of `close`.
        is_closed: boolean, True after `close` and after a failure.
        error: the `EngineClosed` of a failure, or None.
    """

    def __init__(self, slots, prefixes):
        self._slots, self._prefixes = slots, prefixes
        self._queue: collections.deque[Any] = collections.deque()
        self._lock = threading.Lock()
        self.changed, self.is_closed, self.error = threading.Condition(), False, None
        self._prompts: list[Any] = []  # sequences whose prompts are being processed
        self._ready: list[Any] = []  # sequences that wait for a slot
        self._program: Any = None  # remaining parts of a program, and the cost of one part
        self._excess = 0  # of a long part above the bound on delays; the bound is 1
        self._ahead: Any = None  # owners and results of the step that runs
        self._next_search = 0.0
        self.num_tokens, self.num_prompt_tokens = 0, 0

    def add(self, sequence, max_queued):
        """Appends a sequence to the queue; returns False if `max_queued` sequences wait."""
        with self._lock:
            if self.num_queued >= max_queued:
                return False
            self._queue.append(sequence)
            return True

    @property
    def num_queued(self):
        """Number of sequences that are not started, or started but without a free slot."""
        return len(self._queue) + max(0, self._num_started - self._slots.num_free)

    @property
    def num_active(self):
        """Number of sequences in slots, or with a free slot and a started prompt."""
        return self._slots.num_active + min(self._num_started, self._slots.num_free)

    @property
    def _num_started(self):
        return len(self._prompts) + len(self._ready)

    @property
    def sequences(self):
        """All sequences that have not ended. May be read from any thread."""
        # In the order in which they move; each is added to its next list before it is removed from
        # the last one, so that none is missed.
        with self._lock:
            queued = list(self._queue)
        prompts, ready = [*self._prompts], [*self._ready]
        return list(dict.fromkeys([*self._slots.active, *ready, *prompts, *queued]))

    @property
    def is_idle(self):
        waiting = self._queue or self._prompts or self._ready
        return not (waiting or self._program or self._ahead or self._slots.num_active)

    def run(self):
        """Runs the device until `close` and the end of all sequences."""
        try:
            while True:
                with self.changed:
                    while self.is_idle and not self.is_closed:
                        self.changed.wait()
                if self.is_idle:
                    break
                self.advance()
        except BaseException as error:
            failure = EngineClosed(f"The engine failed: {error!r}")
            failure.__cause__ = error
            with self.changed:
                self.is_closed, self.error = True, failure
            self.fail(failure)
        finally:
            self._slots.close()
            self._prefixes.close()

    def close(self):
        """Ends `run` after the last sequence; no sequences are added from now on."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def advance(self):
        """Processes chunks of prompts, and one token of each sequence in a slot."""
        self._end_from_outside()
        self._process_chunks()
        launched = self._slots.step() if self._slots.num_active else None
        # While the device computes this step, the host processes the tokens of the previous one.
        before, self._ahead = self._ahead, launched
        if before is not None:
            self._receive(*before)
        elif launched is None:
            self._slots.wait()  # a request that arrives meanwhile joins the next program

    def _end_from_outside(self):
        """Ends sequences that are cancelled or past their timeout."""
        now = time.monotonic()
        waiting: list[Any] = [self._prompts, self._ready]
        if now >= self._next_search:
            self._next_search = now + SECONDS_PER_SEARCH
            waiting.append(self._queue)
        for sequences in waiting:
            with self._lock:
                ended = [s for s in sequences if s.end_reason(now)]
                for sequence in ended:
                    sequences.remove(sequence)
            for sequence in ended:
                sequence.end(sequence.end_reason(now))
        for sequence in self._slots.active:
            if reason := sequence.end_reason(now):
                self._slots.remove(sequence, is_active=True)  # it may fail
                sequence.end(reason)

    def _process_chunks(self):
        """Processes parts of chunks, which delay steps by a bounded time on average."""
        self._start_prompts()
        num_waiting = min(len(self._queue), self._slots.num_free)
        rest = min(MAX_FACTOR, 1 + num_waiting // WAITING_PER_FACTOR)
        if self._slots.num_active:
            rest -= self._excess
        self._excess, is_first = max(0, -rest), True
        while self._program or (sequences := self._next_chunks()):
            if self._program:
                parts, cost = self._program
            else:
                longest = max(self._chunk_end(s) - s.num_processed for s in sequences)
                parts, cost = None, self._slots.cost(longest)
            # Takes the number of parts whose cost is closest to the bound, but at least one.
            if rest <= (0 if is_first else cost / 2):
                break
            if is_first:
                self._excess, is_first = max(0, cost - rest), False
            rest -= cost
            if parts is None:
                parts = self._process(sequences)
            if next(parts, None):
                self._program = parts, cost
            else:
                self._program = None
                self._start_prompts()  # its sequences may be ready

    def _next_chunks(self):
        """Returns a list of the sequences whose chunks are processed next, in one program."""
        # A program takes equally long for any number of prompts. While no slot is free, it runs
        # only if it is full.
        fewest = 1 if self._slots.num_free else self._slots.num_prompts
        return self._prompts[: self._slots.num_prompts] if len(self._prompts) >= fewest else []

    def _start_prompts(self):
        """Takes sequences from the queue, and moves those that are ready to free slots."""
        while True:
            while self._ready and self._slots.num_free and self._slots.is_ready(self._ready[0]):
                self._slots.insert(self._ready[0])
                del self._ready[0]
            # More prompts are started than fit into a program, so that slots need not wait.
            limit = 2 * self._slots.num_prompts
            if not self._queue or self._num_started >= limit:
                return
            with self._lock:
                sequence = self._queue.popleft()
                self._prompts.append(sequence)
            self._prefixes.restore(sequence)
            if sequence.num_processed == len(sequence.prompt) - 1:
                self._finish([(sequence, sequence.num_processed, None)])

    def _chunk_end(self, sequence):
        """Returns the position at which the next chunk of a prompt ends.

        Chunks end at multiples of `max_chunk` from the start of the prompt, whatever was cached,
        and where states are saved.
        """
        begin, last = sequence.num_processed, len(sequence.prompt) - 1
        chunk = self._slots.max_chunk
        return min(begin - begin % chunk + chunk, last, *self._saved_ends(sequence))

    def _saved_ends(self, sequence):
        """Returns the further positions of a prompt at which its state is saved."""
        last = len(sequence.prompt) - 1
        if not self._prefixes.is_enabled:
            return []
        ends = [end for end in sequence.ends if end - sequence.num_cached >= MIN_TOKENS]
        return [end for end in (*ends, last) if sequence.num_processed < end <= last]

    def _process(self, sequences):
        """Generator that processes the next chunk of each sequence, one part whenever resumed."""
        stops = [self._chunk_end(sequence) for sequence in sequences]
        are_saved = [e in self._saved_ends(s) for s, e in zip(sequences, stops, strict=True)]
        self.num_prompt_tokens += sum(stops) - sum(s.num_processed for s in sequences)
        for _ in self._slots.process(sequences, stops):
            yield True
        rows = [s.row if saved else None for s, saved in zip(sequences, are_saved, strict=True)]
        self._finish(zip(sequences, stops, rows, strict=True))

    def _finish(self, parts):
        """Saves states after chunks, and moves sequences whose prompt is processed."""
        for sequence, stop, row in parts:
            if sequence not in self._prompts:  # it has ended
                continue
            if row is not None:
                state = self._slots.prompt_state(row)
                self._prefixes.add(sequence.prompt[:stop], state, sequence.salt)
            if stop == len(sequence.prompt) - 1:
                self._ready.append(sequence)
                self._prompts.remove(sequence)

    def _receive(self, owners, results):
        tokens, logprobs = results()
        tokens, row, ended = tokens.tolist(), None, []
        for slot, sequence in owners:
            if sequence.request.done:
                continue
            if logprobs:
                row = type(logprobs)(*(a[slot : slot + 1] for a in logprobs))
            self.num_tokens += 1
            try:
                reason = sequence.add(tokens[slot], row)
            except UnicodeDecodeError as error:  # of a strict tokenizer
                self._slots.remove(sequence, is_active=True)
                sequence.end(error=error)
                continue
            if reason is not None:
                ended.append((sequence, reason))
        for sequence, reason in ended:  # last, so that no token waits for it
            self._end(sequence, reason)

    def _end(self, sequence, reason):
        # The next step has already processed the last token, unless the device knew the end.
        is_ahead = not sequence.ends_on_device
        if self._prefixes.is_enabled:
            new = sequence.token_ids if is_ahead else sequence.token_ids[:-1]
            consumed = np.append(sequence.prompt, np.array(new, "int32"))
            self._prefixes.add(consumed, self._slots.state(sequence), sequence.salt)
        self._slots.remove(sequence, is_active=is_ahead)
        sequence.end(reason)

    def fail(self, error):
        """Ends all sequences with an error, and drops what is in progress on the device."""
        self._program = self._ahead = None
        for sequence in self.sequences:
            if not sequence.request.done:
                sequence.end(error=error)
