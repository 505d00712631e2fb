"""Order of work on the device: chunks of prompts between decoding steps."""

import collections
import threading
import time
from typing import Any

from keras_recurrent.generation.decoding_loop import DecodingLoop
from keras_recurrent.generation.prompt_tokens import MIN_TOKENS

# While n requests are queued although slots are free, the bound on delays of steps is multiplied by
# 1 + n // `WAITING_PER_FACTOR`, at most by `MAX_FACTOR`.
WAITING_PER_FACTOR, MAX_FACTOR = 2, 4
SECONDS_PER_SEARCH = 0.02  # between two searches of the queue for ended requests


class Scheduler(DecodingLoop):
    """Decodes the sequences of a queue, on the thread that calls `run`.

    Other threads may call `add` and `close`, and read properties.

    Args:
        batch: the `Batch`, after `prepare_slots`.
        chunks: its `PromptChunks`.
        prefixes: the `PrefixCache`.

    Attributes:
        num_tokens, num_prompt_tokens: integers, numbers of generated tokens and of processed prompt
            tokens.
        changed: a `threading.Condition` that is notified of new sequences and of `close`.
        is_closed: boolean, True after `close` and after a failure.
        error: the error of a failure, or None.
    """

    def __init__(self, batch, chunks, prefixes):
        super().__init__(batch)
        self._chunks, self._prefixes = chunks, prefixes
        self._queue: collections.deque[Any] = collections.deque()
        self.changed, self.is_closed = threading.Condition(), False
        self.error: BaseException | None = None
        self._prompts: list[Any] = []  # sequences whose prompts are being processed
        self._ready: list[Any] = []  # sequences that wait for a slot
        self._running_chunks: Any = None  # remaining parts of chunks, and the cost of one part
        self._debt = 0  # cost beyond the budget, subtracted from later budgets
        self._next_search = 0.0
        self.num_prompt_tokens = 0

    def add(self, sequence):
        """Appends a sequence to the queue."""
        with self.changed:
            self._queue.append(sequence)
            self.changed.notify_all()

    def run(self):
        """Decodes until `close` is called and all sequences have ended, or until an error."""
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.is_closed or not self.is_idle)
                if self.is_idle:
                    break
                self.advance()
                self._deliver()
        except BaseException as error:
            with self.changed:
                self.is_closed, self.error = True, error
            self._fail(error)
        finally:
            self.batch.close()
            self._prefixes.close()

    def close(self):
        """Ends `run` after the last sequence; no sequences may be added from now on."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    @property
    def sequences(self):
        """All sequences that have not ended. May be read from any thread."""
        # The lists are read in the order in which sequences move through them. A sequence is added
        # to the next list before it is removed from the last one, so that none is missed.
        with self.changed:
            queued = list(self._queue)
        prompts, ready = [*self._prompts], [*self._ready]
        return list(dict.fromkeys([*self.batch.active, *ready, *prompts, *queued]))

    @property
    def is_idle(self):
        waiting = self._queue or self._prompts or self._ready
        return not (waiting or self._running_chunks or self.batch.num_active)

    def advance(self):
        """Processes chunks of prompts, and one token of each sequence in a slot."""
        self._end_from_outside()
        self._process_chunks()
        has_advanced = super().advance()
        if not has_advanced:
            self.batch.wait()  # a request that arrives meanwhile joins the next program
        return has_advanced

    def _end_from_outside(self):
        """Ends sequences that are cancelled or past their timeout."""
        now = time.monotonic()
        waiting: list[Any] = [self._prompts, self._ready]
        if now >= self._next_search:
            self._next_search = now + SECONDS_PER_SEARCH
            waiting.append(self._queue)
        for sequences in waiting:
            with self.changed:
                ended = [(s, reason) for s in sequences if (reason := s.end_reason(now))]
                for sequence, _ in ended:
                    sequences.remove(sequence)
            for sequence, reason in ended:
                sequence.end(reason)
        for sequence in self.batch.active:
            if reason := sequence.end_reason(now):
                if reason == "stop":  # a later prompt may continue the state
                    self._end(sequence)
                else:
                    self.batch.remove(sequence)
                sequence.end(reason)  # after the removal, because it may raise

    def _process_chunks(self):
        """Processes parts of chunks, which delay steps by a bounded time on average."""
        self._start_prompts()
        num_waiting = min(len(self._queue), self.batch.num_free)
        budget = min(MAX_FACTOR, 1 + num_waiting // WAITING_PER_FACTOR)
        if self.batch.num_active:
            budget -= self._debt
        self._debt, is_first = max(0, -budget), True
        while self._running_chunks or (sequences := self._next_chunks()):
            if self._running_chunks:
                parts, cost = self._running_chunks
            else:
                longest = max(self._chunk_end(s) - s.num_processed for s in sequences)
                parts, cost = None, self._chunks.cost(longest)
            # Runs the number of parts whose cost is closest to the budget, at least one if it is
            # above 0.
            if budget <= (0 if is_first else cost / 2):
                break
            if is_first:
                self._debt, is_first = max(0, cost - budget), False
            budget -= cost
            if parts is None:
                parts = self._process_next(sequences)
            if next(parts, None):
                self._running_chunks = parts, cost
            else:
                self._running_chunks = None
                self._start_prompts()  # its sequences may be ready

    def _next_chunks(self):
        """Returns a list of the sequences whose chunks are processed next, in one program."""
        # A program takes equally long for any number of prompts. While no slot is free, it runs
        # only if it is full.
        fewest = 1 if self.batch.num_free else self._chunks.num_prompts
        if len(self._prompts) < fewest:
            return []
        if self._prompts[0].num_top is not None:
            return self._prompts[:1]
        plain = [s for s in self._prompts if s.num_top is None]
        return plain[: self._chunks.num_prompts]

    def _start_prompts(self):
        """Takes sequences from the queue, and moves those that are ready to free slots."""
        while True:
            while self._ready and self.batch.num_free and self.batch.is_ready(self._ready[0]):
                sequence = self._ready[0]
                state = self.batch.initial_state if sequence.state is None else sequence.state
                self.batch.insert(sequence, state)
                sequence.state = None
                del self._ready[0]
            # More prompts are started than fit into a program, so that slots need not wait.
            limit = 2 * self._chunks.num_prompts
            if not self._queue or len(self._prompts) + len(self._ready) >= limit:
                return
            with self.changed:
                sequence = self._queue.popleft()
                self._prompts.append(sequence)
            if sequence.num_top is None:
                self._prefixes.restore(sequence)
            if sequence.num_processed == len(sequence.prompt) - 1:
                self._finish([(sequence, sequence.num_processed, None)])

    def _chunk_end(self, sequence):
        """Returns the position at which the next chunk of a prompt ends.

        Chunks end at multiples of `max_chunk` from the start of the prompt, whatever was cached,
        and at positions whose states are saved.
        """
        begin, last = sequence.num_processed, len(sequence.prompt) - 1
        chunk = self._chunks.max_chunk
        return min(begin - begin % chunk + chunk, last, *self._saved_ends(sequence))

    def _saved_ends(self, sequence):
        """Returns the remaining positions of a prompt at which its state is saved."""
        last = len(sequence.prompt) - 1
        if not self._prefixes.is_enabled:
            return []
        ends = [end for end in sequence.ends if end - sequence.num_cached >= MIN_TOKENS]
        return [end for end in (*ends, last) if sequence.num_processed < end <= last]

    def _process_next(self, sequences):
        """Generator that processes a chunk of each sequence, one part each time it is resumed."""
        stops = [self._chunk_end(sequence) for sequence in sequences]
        are_saved = [e in self._saved_ends(s) for s, e in zip(sequences, stops, strict=True)]
        self.num_prompt_tokens += sum(stops) - sum(s.num_processed for s in sequences)
        for _ in self._chunks.process(sequences, stops):
            yield True
        states = [s.state if saved else None for s, saved in zip(sequences, are_saved, strict=True)]
        self._finish(zip(sequences, stops, states, strict=True))

    def _finish(self, parts):
        """Saves states after chunks, and moves sequences with processed prompts to `_ready`."""
        for sequence, stop, state in parts:
            if sequence not in self._prompts:  # it has ended
                continue
            if state is not None:
                self._prefixes.add(
                    sequence.prompt[:stop], self.batch.prompt_state(state), sequence.salt
                )
            if stop == len(sequence.prompt) - 1:
                sequences = [sequence, *sequence.take_copies()]
                self._ready += [each for each in sequences if each.max_new_tokens]
                self._prompts.remove(sequence)
                for each in sequences:
                    if not each.max_new_tokens:
                        each.end("length")

    def _end(self, sequence):
        if self._prefixes.is_enabled and sequence.error is None:
            consumed = sequence.tokens_in_state
            if consumed is not None:
                state = self.batch.slot_state(self.batch.sequences.index(sequence))
                self._prefixes.add(consumed, state, sequence.salt)
        super()._end(sequence)

    def _fail(self, error):
        """Ends all sequences with an error, and drops what is in progress on the device."""
        self._running_chunks = self._launched = None
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                sequence.fail(error)
