"""Requests of an engine as token ids, which the generation thread generates."""

from typing import Any

import numpy as np

from keras_recurrent.generation.grammar import GrammarError
from keras_recurrent.generation.sampling_params import TokenLogprobs, answer_seeds
from keras_recurrent.generation.scheduler import Scheduler
from keras_recurrent.generation.sequence import Sequence
from keras_recurrent.serving.request import EngineClosed


class RequestScheduler(Scheduler):
    """Scheduler of numbered requests, whose results are passed on once per step.

    `submit`, `cancel`, `stop` and `close` may be called from any thread.

    Attributes:
        emit: a function of a list of results, tuples of the number of a request and the arguments
            of `EngineRequest._receive`. The generation thread calls it after the tokens of each
            step, with an empty list before the engine becomes idle, and with None at the end of
            `run`. An `EngineClient` sets it.
    """

    emit: Any = None

    def __init__(self, batch, chunks, prefixes):
        super().__init__(batch, chunks, prefixes)
        self._results: list[tuple] = []
        self._numbered: dict[int, RequestSequence] = {}

    def send(self, name, *arguments, **options):
        """Calls a method, as another process does."""
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
        for sequence in sequences:
            try:
                sequence.matcher = self.batch.make_matcher(params, sequence.stop_token_ids)
            except GrammarError as error:  # the client has compiled it, perhaps with more memory
                sequence.error = error
        self._numbered |= dict(enumerate(sequences, number))
        sequences[0].copies = sequences[1:]
        self.add(sequences[0])

    def cancel(self, number):
        """Ends a request, unless it has ended."""
        self.stop(number, None)

    def stop(self, number, num_tokens):
        """Ends a request after `num_tokens` new tokens, which complete a stop string."""
        if (sequence := self._numbered.get(number)) is not None:
            sequence.end_from_outside(num_tokens)

    def cancel_all(self):
        """Ends all requests, and `run`."""
        self.close()
        for sequence in list(self._numbered.values()):
            sequence.end_from_outside(None)

    def run(self):
        try:
            super().run()
        finally:
            self._deliver()
            self.emit(None)

    def stats(self):
        """Returns the counts of `Engine.stats` that the scheduler knows."""
        return {
            "tokens": self.num_tokens,
            "prompt_tokens": self.num_prompt_tokens,
            "prefix_hits": self._prefixes.num_hits,
            "prefix_tokens": self._prefixes.num_tokens,
        }

    def _add_result(self, number, *result):
        self._results.append((number, *result))
        if result[2] is not None:
            self._numbered.pop(number, None)

    def _deliver(self):
        if self._results or self.is_idle:
            results, self._results = self._results, []
            self.emit(results)


class RequestSequence(Sequence):
    """Sequence of one request.

    Args:
        number: integer, by which the results name the request.
        add_result: a function of the number and the arguments of `EngineRequest._receive`.
        arguments: as in `Sequence`, without a listener.
        deadline: time of `time.monotonic` after which the request ends, or None.
        ends: integers, numbers of prompt tokens after which the state is saved.
        salt: string, `cache_salt` of the request, or None.
        num_top: integer, number of most probable tokens in the log probabilities of the prompt.
            None: no log probabilities of the prompt.

    Attributes:
        num_top: the argument.
        prompt_logprobs: a list of the `TokenLogprobs` of the processed prompt tokens and the next.
        copies: a list of sequences with the same prompt, which is processed once; then empty.
        num_cached: integer, number of tokens of the prompt from the prefix cache.
        num_processed: integer, number of tokens of the prompt whose state is known.
        state: the state of the backbone after these tokens, until the sequence has a slot. None if
            no token was processed.
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

    @property
    def tokens_in_state(self):
        """Tokens in the state of the slot; None if it contains tokens beyond the sequence."""
        count = len(self.token_ids) if self.ends_on_device else self.num_launched
        if count > len(self.token_ids) + 1:
            return None
        return np.append(self.prompt, np.array(self.token_ids[: count - 1], "int32"))

    def fail(self, error):
        """Ends the sequence because of an error in the engine."""
        for copy in self.take_copies():
            copy.fail(error)
        self.error = EngineClosed(f"The engine failed: {error!r}")
        self.error.__cause__ = error
        self.end("error")

    def _notify(self):
        first, self._num_sent = self._num_sent, len(self.token_ids)
        new = self.token_ids[first:], self.logprobs[first:]
        end = self.finish_reason, self.num_cached, self.error
        prompt = None if first or self.num_top is None else self.prompt_logprobs
        self._add_result(self._number, *new, *end, prompt)
