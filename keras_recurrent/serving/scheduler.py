"""Order of work on the device for requests: chunks of prompts between decoding steps."""

import collections
import threading
import time
from typing import Any

import numpy as np

from keras_recurrent.generation.batch import DecodingLoop, is_on_cpu
from keras_recurrent.generation.grammar import GrammarError
from keras_recurrent.generation.prompts import pad_prompts
from keras_recurrent.generation.sampling import Features, Logprobs
from keras_recurrent.generation.sampling_params import TokenLogprobs, answer_seeds, token_logprobs
from keras_recurrent.generation.sequence import Sequence
from keras_recurrent.serving.client import MIN_TOKENS

# While n requests are queued although slots are free, the bound on delays of steps is multiplied by
# 1 + n // `WAITING_PER_FACTOR`, at most by `MAX_FACTOR`.
WAITING_PER_FACTOR, MAX_FACTOR = 2, 4
SECONDS_PER_SEARCH = 0.02  # between two searches for timeouts
MIN_CHUNK = 32  # tokens
MAX_DELAY = 0.43  # of a step by chunks, on average, as a fraction of the step time
TIMED_RUNS = 3
# A program of chunks has one prompt for each `SLOTS_PER_PROMPT` slots. More prompts reduce the time
# per token, but a request waits for the whole program. On CPUs, they do not reduce the time per
# token.
SLOTS_PER_PROMPT, MAX_PROMPTS = 16, 8


class Scheduler(DecodingLoop):
    """Generates for numbered requests, on the generation thread, which calls `run`.

    Other threads may call `send` and `cancel_all`, and read attributes.

    Args:
        batch: the `Batch`, after `prepare_slots`.
        chunks: its `PromptChunks`.
        prefixes: the `PrefixCache`.

    Attributes:
        changed: a `threading.Condition` that is notified of new sequences and of `close`.
        is_closed: boolean, True after `close` and after a failure.
        error: the error of a failure, or None.
        emit: a function of a list of results, tuples of the number of a request and the arguments
            of `EngineRequest._receive`. `run` calls it after each step with results, before it
            waits for requests (the list may then be empty), and with None at its end. An
            `EngineClient` sets it.
    """

    emit: Any = None

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
        # True if a sequence may have to end. A search in each step takes 0.1 ms for 128 slots.
        self._must_search, self._next_search = False, 0.0
        self._num_prompt_tokens = 0
        self._results: list[tuple] = []
        self._numbered: dict[int, RequestSequence] = {}  # sequences that have not ended

    def send(self, name, *arguments, **options):
        """Calls `submit`, `stop` or `close`, as another process does."""
        getattr(self, name)(*arguments, **options)

    def submit(self, number, *arguments, **options):
        """Adds a request, and requests with the next numbers for further answers to its prompt.

        Arguments are as in `RequestSequence`.
        """
        prompt, params, seed, *others = arguments
        sequences = [
            RequestSequence(each, self._add_result, prompt, params, seed, *others, **options)
            for each, seed in enumerate(answer_seeds(params, seed), number)
        ]
        try:
            matchers = self.batch.make_matchers([params] * params.n, sequences[0].stop_token_ids)
            for sequence, matcher in zip(sequences, matchers, strict=True):
                sequence.matcher = matcher
        except GrammarError as error:  # the client has compiled it, perhaps with more memory
            self._must_search = True
            for sequence in sequences:
                sequence.error = error
        self._numbered |= dict(enumerate(sequences, number))
        sequences[0].copies = sequences[1:]
        with self.changed:
            self._queue.append(sequences[0])
            self.changed.notify_all()

    def stop(self, number, num_tokens):
        """Ends a request after `num_tokens` new tokens, which complete a stop string.

        None cancels it.
        """
        if (sequence := self._numbered.get(number)) is not None:
            sequence.end_from_outside(num_tokens)
            self._must_search = True

    def cancel_all(self):
        """Ends all requests, and `run`."""
        self.close()
        for sequence in list(self._numbered.values()):
            sequence.end_from_outside(None)
        self._must_search = True

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
            self._running_chunks = self._launched = None
        finally:
            self._deliver()
            try:
                self.batch.close()
                self._prefixes.close()
            finally:
                self.emit(None)

    def close(self):
        """Ends `run` after the last request; no requests may be added from now on."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def stats(self):
        """Returns the counts of `Engine.stats` that the scheduler knows."""
        return {
            "tokens": self.num_tokens,
            "prompt_tokens": self._num_prompt_tokens,
            "prefix_hits": self._prefixes.num_hits,
            "prefix_tokens": self._prefixes.num_tokens,
        }

    def _add_result(self, result):
        self._results.append(result)
        if result[3] is not None:  # the request has ended
            self._numbered.pop(result[0], None)

    def _deliver(self):
        if self._results or self.is_idle:
            results, self._results = self._results, []
            self.emit(results)

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
        if not self._must_search and now < self._next_search:
            return
        self._must_search, self._next_search = False, now + SECONDS_PER_SEARCH
        waiting: list[Any] = [self._prompts, self._ready, self._queue]
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
            # More prompts are started than fit into a program, so that slots need not wait. The
            # batch has room for the states of as many.
            num_states = len(self._prompts) + len(self._ready) + self.batch.num_delayed
            if not self._queue or num_states >= 2 * self._chunks.num_prompts:
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
        self._num_prompt_tokens += sum(stops) - sum(s.num_processed for s in sequences)
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
                self._must_search = True  # the sequence may have waited for its copies to end
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


class RequestSequence(Sequence):
    """Sequence of one request.

    Args:
        number: integer, by which the results name the request.
        add_result: a function of a result of `emit`.
        arguments: as in `Sequence`, without a listener.
        deadline: time of `time.monotonic` after which the request ends, or None.
        ends: integers, numbers of prompt tokens after which the state is saved.
        salt: string, `cache_salt` of the request, or None.
        num_top: integer, number of most probable tokens in the log probabilities of the prompt.
            None: no log probabilities of the prompt.

    Attributes:
        prompt_logprobs: a list of the `TokenLogprobs` of the processed prompt tokens and the next.
        copies: a list of sequences with the same prompt, which is processed once; then empty.
        num_cached: integer, number of tokens of the prompt from the prefix cache.
        num_processed: integer, number of tokens of the prompt whose state is known.
        state: the state after these tokens, as a `Batch` takes it, until the sequence has a slot.
            None if no token was processed.
        error: the error that ended the sequence, or None.
    """

    def __init__(self, number, add_result, *arguments, deadline, ends, salt, num_top=None):
        super().__init__(*arguments)
        self.ends, self.salt, self.num_top = ends, salt, num_top
        self.prompt_logprobs = [TokenLogprobs(int(self.prompt[0]), None, {})]
        self.num_cached, self.num_processed, self._num_sent = 0, 0, 0
        self.state: Any = None
        self.error: BaseException | None = None
        self.copies: list[RequestSequence] = []
        self._number, self._add_result, self._deadline = number, add_result, deadline
        self._outside_end: tuple[str, int | None] | None = None

    def add(self, token, logprobs=None):
        """Like `Sequence.add`, but an error of the grammar only ends this request."""
        try:
            super().add(token, logprobs)
        except GrammarError as error:
            self.error = error
            self.end("error")

    def end_from_outside(self, num_tokens):
        """Lets `end_reason` return `"stop"`, or `"cancelled"` if `num_tokens` is None."""
        self._outside_end = "cancelled" if num_tokens is None else "stop", num_tokens

    def end_reason(self, now):
        """Returns `"cancelled"`, `"stop"`, `"timeout"`, `"error"` or None at a `time.monotonic`.

        In the case of `"stop"`, the tokens after the stop string are dropped. The sequence does not
        end while a copy still needs the prompt.
        """
        if any(copy.end_reason(now) is None for copy in self.copies):
            return None
        if self.error is not None:
            return "error"
        if self._outside_end is not None:
            reason, num_tokens = self._outside_end
            if num_tokens is not None:
                self.stop(num_tokens)
            return reason
        return "timeout" if self._deadline is not None and now >= self._deadline else None

    def take_copies(self):
        """Returns the copies, with the state and log probabilities of the processed prompt."""
        copies, self.copies = self.copies, []
        for copy in copies:
            copy.state, copy.prompt_logprobs = self.state, self.prompt_logprobs
            copy.num_cached, copy.num_processed = self.num_cached, self.num_processed
        return copies

    def end(self, reason):
        super().end(reason)
        for copy in self.take_copies():
            copy.end(reason)
        self.state = None  # a batch may still hold the sequence

    @property
    def tokens_in_state(self):
        """Tokens in the state of the slot; None if it contains tokens beyond the sequence."""
        count = len(self.token_ids) if self.ends_on_device else self.num_launched
        if count > len(self.token_ids) + 1:
            return None
        return np.append(self.prompt, np.array(self.token_ids[: count - 1], "int32"))

    def _notify(self):
        first, self._num_sent = self._num_sent, len(self.token_ids)
        new = self.token_ids[first:], self.logprobs[first:]
        prompt = None if first or self.num_top is None else self.prompt_logprobs
        result = self._number, *new, self.finish_reason, self.num_cached, self.error, prompt
        self._add_result(result)


class PromptChunks:
    """Chunks of the prompts of sequences that wait for a slot, and their costs.

    Args:
        batch: a `Batch` after `prepare_slots`.
        max_chunk: integer, maximum number of tokens of a chunk.
        is_timed: boolean, True measures costs, which compiles programs before the first request.
            False estimates costs from lengths, as on CPUs, where compilation would take too long.

    Attributes:
        num_prompts: integer, maximum number of prompts in one call of `process`.
    """

    def __init__(self, batch, max_chunk, is_timed):
        self._batch, self.max_chunk, self.num_prompts = batch, max_chunk, batch.num_prompts
        # The chunks of prompts that share a program are padded to one size.
        self._sizes = [max_chunk] if self.num_prompts > 1 else chunk_sizes(max_chunk)
        # The cost of one part, as a share of the bound on delays.
        self._costs = {size: max(size / max_chunk, 1 / 2) for size in self._sizes}
        if is_timed:
            self._time_programs()

    def warm_up(self):
        """Runs a program of chunks of each size, which compiles it."""
        for size in self._sizes:
            self._run_example(size)

    def _time_programs(self):
        """Compiles chunks and a greedy step, so that no request waits for them, and times them."""
        self._batch.warm_up()
        for size in self._sizes:
            self._time_step(size)  # compiles
        step = min(self._time_step() for _ in range(TIMED_RUNS))[0]
        for size in self._sizes:
            seconds, num_parts = min(self._time_step(size) for _ in range(TIMED_RUNS))
            token_seconds = step / self._batch.tokens_per_step
            cost = (seconds - step) / num_parts / (MAX_DELAY * token_seconds)
            self._costs[size] = max(cost, 1 / num_parts)  # a measured time may be too short

    def _time_step(self, chunk_size=None):
        """Runs a program of chunks if their size is given, then a greedy step, without sequences.

        Returns:
            The time in seconds, and the number of parts of the program.
        """
        start = time.perf_counter()
        num_parts = 0 if chunk_size is None else self._run_example(chunk_size)
        self._batch.run_empty_step(Features())
        return time.perf_counter() - start, num_parts

    def _run_example(self, size):
        """Processes chunks of as many prompts as fit into a program; returns the part count."""
        states, shape = [self._batch.initial_state] * self.num_prompts, (self.num_prompts, size)
        parts = self._batch.process(states, np.ones(shape, "int32"), np.ones(shape, bool))
        return 1 + sum(1 for _ in parts)

    def _padded_size(self, num_tokens):
        """Returns the number of tokens to which a chunk is padded."""
        return min(size for size in self._sizes if size >= num_tokens)

    def cost(self, num_tokens):
        """Returns the cost of a part of a program of chunks, as a share of the bound on delays."""
        return self._costs[self._padded_size(num_tokens)]

    def process(self, sequences, stops):
        """Generator that processes a chunk of each prompt, one part each time it is resumed.

        Chunks end before the positions in `stops`. No other call may begin before the generator has
        returned. A sequence with `num_top` must be the only sequence.
        """
        if sequences[0].num_top is not None:
            self._score(*sequences, *stops)
            return
        parts = [s.prompt[s.num_processed : e] for s, e in zip(sequences, stops, strict=True)]
        size = self._padded_size(max(map(len, parts)))
        padded = pad_prompts([*parts, *[[]] * (self.num_prompts - len(parts))], size)
        states = [self._batch.initial_state if s.state is None else s.state for s in sequences]
        arrays = padded["token_ids"], padded["padding_mask"]
        after = yield from self._batch.process(states, *arrays)
        for sequence, stop, state in zip(sequences, stops, after, strict=True):
            sequence.state, sequence.num_processed = state, stop

    def _score(self, sequence, stop):
        """Processes a chunk of a prompt, and adds the log probabilities of its tokens."""
        part = sequence.prompt[sequence.num_processed : stop + 1]
        size = self._padded_size(len(part) - 1)
        arrays = pad_prompts([part[:-1]], size), pad_prompts([part[1:]], size)
        tokens, targets = (array["token_ids"] for array in arrays)
        state = self._batch.initial_state if sequence.state is None else sequence.state
        mask, number = arrays[0]["padding_mask"], sequence.num_top
        logprobs, sequence.state = self._batch.score(tokens, targets, mask, state, number)
        for token, row in zip(part[1:].tolist(), zip(*logprobs, strict=True), strict=False):
            found = token_logprobs(number, token, Logprobs(*row))
            sequence.prompt_logprobs.append(found)
        sequence.num_processed = stop


def chunk_sizes(max_chunk):
    """Returns the sizes to which chunks are padded, in ascending order."""
    sizes = [MIN_CHUNK << n for n in range(max_chunk.bit_length()) if MIN_CHUNK << n < max_chunk]
    if max_chunk >= 4 * MIN_CHUNK:
        sizes = sorted({*sizes, 3 * max_chunk // 4})
    return [*sizes, max_chunk]


def num_prompts_of(model, num_slots):
    """Returns the number of prompts of a program of chunks."""
    return 1 if is_on_cpu(model) else min(max(num_slots // SLOTS_PER_PROMPT, 1), MAX_PROMPTS)
