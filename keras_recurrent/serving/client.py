"""Submission of requests to an engine, and the text of its answers, without a framework."""

import contextlib
import functools
import os
import threading
import time
from typing import NamedTuple

from keras_recurrent.chat.templates import check_renders_messages, is_messages
from keras_recurrent.chat.tools import marker_tokens
from keras_recurrent.checks.arguments import (
    check_number,
    check_positive_integer,
    check_unicode,
    is_integer,
)
from keras_recurrent.generation.grammar import make_matchers
from keras_recurrent.generation.sampling_params import (
    SamplingParams,
    explains_options,
    seed_sequence,
)
from keras_recurrent.generation.text import (
    StreamedText,
    check_stop_strings,
    hidden_stop_tokens,
    parse_prompt,
    parse_stop_token_ids,
    tokenize_prompt,
    tokenize_prompts,
)
from keras_recurrent.serving.request import (
    EngineClosed,
    EngineFull,
    EngineRequest,
    PromptTooLong,
    check_process,
)

MIN_TOKENS = 32  # minimum tokens between a saved end of a message and the saved state before it
MAX_LOGPROBS = 20  # of a token, as in OpenAI's API


class Limits(NamedTuple):
    """Properties of an engine that its clients need; most are arguments of `Engine`.

    Attributes:
        vocabulary_size: integer.
        state_interval: integer, interval, in prompt tokens, at which states are saved, in
            addition to ends of messages. 0: no further states. None: `prefix_cache_bytes` is 0.
    """

    num_slots: int
    max_queued: int
    max_length: int
    vocabulary_size: int
    state_interval: int | None


class EngineClient:
    """Base class of engines: checks and tokenizes prompts, and makes the text of answers.

    `OpenRequests.deliver` makes the text of the new tokens of each step: in the generation thread
    of an `Engine`, or in the event loop of a server.

    Args:
        link: the `Scheduler`, or a `RemoteLink` to the scheduler of another process. This class
            sets its `emit`.
        preprocessor: the preprocessor, which may be one without Keras, or None.
        limits: the `Limits`.
    """

    def __init__(self, link, preprocessor, limits):
        self.preprocessor, self.limits, self._link = preprocessor, limits, link
        self._requests = OpenRequests(link)
        link.emit = self._requests.deliver
        self._pid, self._num_requests, self._loop = os.getpid(), 0, None

    @explains_options
    def submit(
        self,
        prompt,
        sampling=None,
        max_new_tokens=None,
        stop=None,
        stop_token_ids="auto",
        timeout=None,
        cache_salt=None,
        prompt_logprobs=None,
        tools=None,
    ):
        """Adds a request to the queue.

        Args:
            prompt: a string, such as the output of `preprocessor.apply_chat_template`; a list of
                messages, as in `chat`; or token ids, a list or an array, which get no start token.
                The start token of a string counts: an empty string is a prompt of one token.
            sampling: a `SamplingParams`. None: the sampler of the model.
            max_new_tokens: integer, which may be 0 with `prompt_logprobs`. None: up to `max_length`
                of the engine.
            stop, stop_token_ids: as in `generate`.
            timeout: number, seconds from now, after which the request ends. None: no limit.
            cache_salt: string that other users do not know. Only requests with the same salt share
                prefix states: counts of cached tokens and response times would otherwise reveal the
                prompts of others. None: states are shared among requests without a salt.
            prompt_logprobs: integer, number of most probable tokens at each position of the prompt
                whose log probabilities are returned, in addition to those of its tokens. The whole
                prompt is processed, without saved states. None: no log probabilities of the prompt.
            tools: as in `chat`, for a list of messages. Calls are not parsed: they are part of the
                text, with their marks.

        Returns:
            An `EngineRequest`. With `SamplingParams(n=...)` above 1, a list of `EngineRequest`s,
            one for each answer.

        Raises:
            EngineFull: `max_queued` requests are waiting.
            EngineClosed: the engine is closed, failed, or was created before a fork.
            ValueError: the prompt has no token, prompt and new tokens together exceed `max_length`,
                `logprobs` or `prompt_logprobs` is above 20, `cache_salt` is empty, or an option is
                invalid as in `generate`.
        """
        check_process(self._pid)
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise ValueError(
                f"`cache_salt` must be a string with text, or None; got {cache_salt!r}."
            )
        check_unicode("cache_salt", cache_salt or "")
        preprocessor, size, messages = self.preprocessor, self.limits.vocabulary_size, None
        if is_messages(prompt):
            check_renders_messages(preprocessor)
            messages, prompt = prompt, preprocessor.apply_chat_template(prompt, tools=tools)
        elif tools is not None:
            raise ValueError("`tools` require a list of messages as the prompt.")
        tokens = parse_prompt(preprocessor, size, prompt)
        if max_new_tokens is not None and (max_new_tokens != 0 or prompt_logprobs is None):
            check_positive_integer("max_new_tokens", max_new_tokens)
        remaining_tokens = self.limits.max_length - len(tokens)
        if remaining_tokens < (1 if max_new_tokens is None else max_new_tokens):
            raise PromptTooLong(len(tokens), max_new_tokens, self.limits.max_length)
        remaining_tokens = remaining_tokens if max_new_tokens is None else max_new_tokens
        if timeout is not None:
            check_number("timeout", timeout)
        stops = parse_stop_token_ids(preprocessor, size, stop_token_ids)
        strings = check_stop_strings(stop, preprocessor)
        params, seed = self._resolve_sampling(sampling)
        most = min(MAX_LOGPROBS, size)
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", prompt_logprobs)):
            if count is not None and not (is_integer(count) and 0 <= count <= most):
                raise ValueError(
                    f"`{name}` must be an integer from 0 to {most} in an engine, or None; got "
                    f"{count!r}."
                )
        make_matchers(preprocessor, size, [params], stops)  # only to check the grammar
        texts: list[StreamedText | None] = [None] * params.n
        if preprocessor is not None:
            hidden = [id for id in hidden_stop_tokens(preprocessor) if id in stops]
            shown = marker_tokens(preprocessor) if tools else {}
            texts = [StreamedText(preprocessor, tokens[-1], strings, hidden, shown) for _ in texts]
        options = {"deadline": None, "ends": (), "salt": cache_salt, "num_top": prompt_logprobs}
        if timeout is not None:
            options["deadline"] = time.monotonic() + min(timeout, threading.TIMEOUT_MAX)
        if self.limits.state_interval is not None:
            options["ends"] = self._saved_ends(messages, prompt, tokens, tools)
        arguments = tokens, params, seed, remaining_tokens, stops
        with self._requests.lock:
            if self.is_closed:
                raise EngineClosed("The engine is closed.") from self._link.error
            if len(self._requests) + params.n > self.limits.num_slots + self.limits.max_queued:
                raise EngineFull(
                    f"The queue is full: `max_queued` is {self.limits.max_queued}. Try again later."
                )
            first, send = self._num_requests + 1, self._link.send
            requests = {
                number: EngineRequest(len(tokens), text, functools.partial(send, "stop", number))
                for number, text in enumerate(texts, first)
            }
            self._requests.update(requests)
            self._num_requests += params.n
            send("submit", first, *arguments, **options)
        return list(requests.values()) if params.n > 1 else requests[first]

    def _saved_ends(self, messages, prompt, tokens, tools):
        """Returns the numbers of tokens of a prompt after which its state is saved."""
        ends: tuple[int, ...] = ()
        if messages:
            ends = message_ends(self.preprocessor, messages, prompt, tokens.tolist(), tools)
        interval = self.limits.state_interval or len(tokens)
        return {*ends, *range(interval, len(tokens), interval)}

    def _resolve_sampling(self, sampling):
        """Returns `SamplingParams`, and the seed of a request."""
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"`sampling` must be one `SamplingParams` or None; got {sampling!r}.")
        sampling.check_vocabulary(self.limits.vocabulary_size)
        return sampling, seed_sequence(sampling)

    def deliver_in(self, loop):
        """Makes an event loop deliver the results of requests that are submitted from now on."""
        if self._loop is loop:
            return
        self._loop, deliver = loop, self._requests.deliver

        def emit(results):
            try:
                loop.call_soon_threadsafe(deliver, results)
            except RuntimeError:  # the event loop has ended
                deliver(results)

        self._link.emit = emit

    @property
    def is_closed(self):
        """True after `close`, and after a failure."""
        return self._link.is_closed

    def stats(self):
        """Returns a dictionary of the current load, and of counts since the engine was created.

        - `queued`, `active`: current numbers of requests; `max_queued`, `num_slots`: their limits.
        - `requests`: number of submitted requests.
        - `tokens`, `prompt_tokens`: numbers of generated and of processed prompt tokens.
        - `prefix_hits`, `prefix_tokens`: numbers of requests that started from a prefix state, and
          of the tokens that this saved.
        """
        num_slots, max_queued, *_ = self.limits
        num_active = min(len(self._requests), num_slots)
        return {
            "queued": len(self._requests) - num_active,
            "active": num_active,
            "num_slots": num_slots,
            "max_queued": max_queued,
            "requests": self._num_requests,
            **self._link.stats(),
        }

    def close(self, wait=True):
        """Ends the engine; `submit` raises `EngineClosed` from now on.

        A second call with a shorter `wait` replaces the first. In a callback of a request, this
        method does not wait.

        Args:
            wait: True finishes all requests, False cancels them. A number is the time in seconds
                after which the remaining ones are cancelled.

        Returns:
            A list of the `EngineRequest`s that had not ended, each with its `finish_reason`.
        """
        self._link.send("close")
        requests, have_ended = list(self._requests.values()), self._requests.have_ended
        may_wait = threading.get_ident() != self._requests.thread
        if wait is not True:
            if may_wait:
                have_ended.wait(min(wait, threading.TIMEOUT_MAX))
            for request in requests:
                request.cancel()
        if may_wait:
            have_ended.wait()
        return requests


class OpenRequests(dict[int, EngineRequest]):
    """Requests of an engine that have not ended, by number.

    Args:
        link: as in `EngineClient`.

    Attributes:
        lock: held while requests are added. None are added once the link's `is_closed` is True.
        have_ended: a `threading.Event` that is set when the engine and all requests have ended.
        thread: integer, the id of the thread that calls `deliver`, or None.
    """

    def __init__(self, link):
        super().__init__()
        self.lock, self._link = threading.Lock(), link
        self.have_ended, self.thread = threading.Event(), None

    def deliver(self, results):
        """Passes results of an engine, a list of tuples, to their requests.

        None: the engine has ended, and all requests end.
        """
        self.thread = threading.get_ident()
        for number, *result in results or ():
            request = self.get(number)
            if request is not None and (end := request._receive(*result)):
                del self[number]
                request._end(*end)
        if results is None:
            with self.lock:
                requests = list(self.values())
            failure = self._link.error
            for request in requests:
                reason = "ended before the request" if failure is None else f"failed: {failure!r}"
                error = EngineClosed(f"The engine {reason}")
                error.__cause__ = failure
                request._end(None, None, error)
            self.clear()
            self.have_ended.set()


def message_ends(preprocessor, messages, prompt, tokens, tools=None):
    """Returns the ends of the messages that other prompts are likely to begin with, in tokens.

    There are two: the end of the messages that precede the first user message, such as the system
    message, and the end of the message before the last. An end within `MIN_TOKENS` of the previous
    end is omitted, as are ends at which the template rejects the messages.

    prompt, tokens: the `ChatPrompt` of the messages and tools, and a list of its token ids.
    """
    roles = [message["role"] for message in messages]
    num_leading = roles.index("user") if "user" in roles else 0
    ends = [0]
    for count in sorted({num_leading, len(messages) - 1} - {0}):
        with contextlib.suppress(ValueError, RuntimeError):  # the request must not fail
            text = preprocessor.apply_chat_template(messages[:count], False, tools)
            end = _find_end(preprocessor, text, prompt, tokens)
            if end - ends[-1] >= MIN_TOKENS:
                ends.append(end)
    return tuple(ends[1:])


def _find_end(preprocessor, text, prompt, tokens):
    """Returns the number of tokens of `text`, 0 if the prompt or its tokens begin differently.

    The text may be a long conversation. If the text after it is shorter, that text is tokenized
    instead. Its tokens differ from those in the prompt if the tokenizer begins each text with a
    space; then `text` is tokenized.
    """
    if not prompt.startswith(text):
        return 0
    tokenizer, rest = preprocessor.tokenizer, prompt[len(text) :]
    if 0 < len(rest) < len(text):
        ids = tokenize_prompt(tokenizer, rest)
        if tokens[-len(ids) :] == ids:
            return len(tokens) - len(ids)
    (ids,) = tokenize_prompts(tokenizer, [text], preprocessor.add_start_token)
    return len(ids) if tokens[: len(ids)] == ids else 0
