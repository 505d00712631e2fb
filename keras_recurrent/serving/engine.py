"""Engine that generates for many requests at once, on one thread."""

import math
import os
import threading
import weakref

import keras

from keras_recurrent.checks.arguments import (
    check_number,
    check_positive_integer,
    check_positive_integers,
    check_unicode,
    is_integer,
)
from keras_recurrent.generation.batch import is_on_cpu
from keras_recurrent.generation.beam_search import BeamSampler
from keras_recurrent.generation.chat import is_messages, start_turn
from keras_recurrent.generation.decoding_loop import BackendBatch
from keras_recurrent.generation.modes import RUN_EAGERLY
from keras_recurrent.generation.prompt_chunks import PromptChunks, num_prompts_of
from keras_recurrent.generation.prompts import check_token_count, parse_prompt
from keras_recurrent.generation.sampling_params import (
    SamplingParams,
    explains_options,
    resolve_sampling,
)
from keras_recurrent.generation.scheduler import Scheduler
from keras_recurrent.generation.stop_strings import StreamedText, check_stop_strings
from keras_recurrent.generation.text import hidden_stop_tokens
from keras_recurrent.serving.message_ends import MessageEnds
from keras_recurrent.serving.prefix_cache import PrefixCache
from keras_recurrent.serving.request import (
    EngineClosed,
    EngineFull,
    EngineRequest,
    PromptTooLong,
    check_process,
)
from keras_recurrent.serving.sequence import RequestSequence

MAX_LOGPROBS = 20  # of a token, as in OpenAI's API


class Engine:
    """Generates for many requests at once, which join and leave at any token.

    One thread launches all work on the device. All active requests decode in one step of
    `num_slots` sequences. Prompts are processed in chunks between two steps, in the order of
    `submit`; docs/serving.md has the number and the delay of chunks. Prompts are cut at fixed
    positions and at ends of messages, so that the tokens of a request do not depend on other
    requests, except through the prefix cache, which changes rounding.

    On GPUs and TPUs, the programs of chunks and of a greedy step are compiled before the
    constructor returns. A step with other sampling options is compiled when a request first uses
    them. On torch, all requests wait for the compilation; on JAX, only queued requests wait.

    Args:
        model: a language model of this package, on torch or JAX. Its weights, layers and sampler
            must not change until `close`.
        num_slots: integer, number of requests that decode together.
        max_length: integer, maximum number of tokens of a request, with prompt and answer; the
            capacity of KV caches. None: the `sequence_length` of the preprocessor.
        prefill_chunk: integer, maximum number of tokens of a chunk.
        max_queued: integer, maximum number of requests that wait for a slot.
        prefix_cache_bytes: integer, device memory for states after prompts, answers and messages. A
            request resumes from the saved state of the longest prefix of its prompt; the least
            recently used states are dropped. 0: none.
        prefix_cache_dir: string, a directory of at most `prefix_cache_bytes` in which the states
            are also stored, so that a later engine continues conversations. None: none.
        prefix_cache_interval: integer, number of prompt tokens after which a state is also saved,
            so that later prompts with the same beginning resume there. It is rounded up to a
            multiple of `prefill_chunk`. 0: none.

    Raises:
        ValueError: an argument is out of range, `max_length` is missing without a preprocessor,
            `prefix_cache_dir` cannot be created or read, or the sampler of the model is beam search
            or a custom one.
        ImportError: safetensors, which `prefix_cache_dir` needs, is not installed.
        NotImplementedError: the backend is TensorFlow, or a `keras.distribution` is set.

    Example:

    >>> import keras_recurrent
    >>> from keras_recurrent.serving import Engine
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> with Engine(model, num_slots=2) as engine:
    ...     requests = [engine.submit(prompt, max_new_tokens=4) for prompt in ("a", "b", "c")]
    ...     answers = [request.result() for request in requests]
    >>> [len(answer.token_ids) for answer in answers]
    [4, 4, 4]
    """

    def __init__(
        self,
        model,
        num_slots=64,
        max_length=None,
        prefill_chunk=256,
        max_queued=1024,
        prefix_cache_bytes=2**30,
        prefix_cache_dir=None,
        prefix_cache_interval=2048,
    ):
        programs = _check_model(model)
        limits = {"num_slots": num_slots, "prefill_chunk": prefill_chunk, "max_queued": max_queued}
        check_positive_integers(**limits)
        sizes = {"bytes": prefix_cache_bytes, "interval": prefix_cache_interval}
        for name, value in sizes.items():
            if not is_integer(value) or value < 0:
                raise ValueError(
                    f"`prefix_cache_{name}` must be an integer, at least 0; got {value!r}."
                )
        if prefix_cache_dir is not None and not prefix_cache_bytes:
            raise ValueError(
                "`prefix_cache_bytes` must be above 0 if `prefix_cache_dir` is set; got 0."
            )
        self.model, self.num_slots, self.max_queued = model, num_slots, max_queued
        self.max_length = _max_length(model, max_length)
        prefixes = PrefixCache(model, prefix_cache_bytes, self.max_length, prefix_cache_dir)
        self._prefixes, self._num_requests = prefixes, 0
        self._message_ends = MessageEnds(model.preprocessor)
        # Chunks end at these positions anyway.
        self._interval = prefill_chunk * math.ceil(prefix_cache_interval / prefill_chunk)
        try:
            batch = BackendBatch(model, programs, num_slots, keep=True)
            batch.prepare_slots(self.max_length, num_prompts_of(model, num_slots))
            self._chunks = PromptChunks(batch, prefill_chunk, is_timed=not is_on_cpu(model))
        except BaseException:
            prefixes.close()
            raise
        self._scheduler = Scheduler(batch, self._chunks, prefixes)
        self._changed, self._pid = self._scheduler.changed, os.getpid()
        # The thread does not reference the engine: after garbage collection of the engine, it
        # finishes all requests and ends.
        weakref.finalize(self, self._scheduler.close).atexit = False
        self._thread = threading.Thread(target=self._scheduler.run, name="engine", daemon=True)
        self._thread.start()

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
    ):
        """Adds a request to the queue.

        Args:
            prompt: a string, such as the output of `preprocessor.apply_chat_template`; a list of
                messages, as in `chat`; or token ids, a list or an array, which get no start token.
            sampling: a `SamplingParams`. None: the sampler of the model.
            max_new_tokens: integer. None: up to `max_length` of the engine.
            stop, stop_token_ids: as in `generate`.
            timeout: number, seconds from now, after which the request ends. None: no limit.
            cache_salt: string that other users do not know. Only requests with the same salt share
                prefix states: counts of cached tokens and response times would otherwise reveal the
                prompts of others. None: states are shared among requests without a salt.

        Returns:
            An `EngineRequest`.

        Raises:
            EngineFull: `max_queued` requests are waiting.
            EngineClosed: the engine is closed, failed, or was created before a fork.
            ValueError: the prompt is empty, prompt and new tokens together exceed `max_length`,
                `logprobs` is above 20, or an option is invalid as in `generate`.
        """
        check_process(self._pid)
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise ValueError(
                f"`cache_salt` must be a string with text, or None; got {cache_salt!r}."
            )
        check_unicode("cache_salt", cache_salt or "")
        turn = start_turn(self.model, prompt, None) if is_messages(prompt) else None
        tokens = parse_prompt(self.model, turn.inputs if turn else prompt)
        if max_new_tokens is not None:
            check_positive_integer("max_new_tokens", max_new_tokens)
        remaining_tokens = self.max_length - len(tokens)
        if remaining_tokens < (max_new_tokens or 1):
            raise PromptTooLong(len(tokens), max_new_tokens, self.max_length)
        if timeout is not None:
            check_number("timeout", timeout)
        preprocessor, text = self.model.preprocessor, None
        stops = self.model._stop_token_ids(stop_token_ids)
        strings = check_stop_strings(stop, preprocessor)
        if isinstance(sampling, (list, tuple)):
            raise ValueError(f"`sampling` must be one `SamplingParams` or None; got {sampling!r}.")
        (params,), (seed,) = resolve_sampling(self.model, sampling, 1)
        if (params.logprobs or 0) > MAX_LOGPROBS:
            raise ValueError(
                f"`logprobs` must be at most {MAX_LOGPROBS} in an engine; got "
                f"{params.logprobs}. Pass fewer, or use `generate`."
            )
        if preprocessor is not None:
            hidden = [id for id in hidden_stop_tokens(preprocessor) if id in stops]
            text = StreamedText(preprocessor, tokens[-1], strings, hidden)
        ends = self._saved_ends(turn, tokens) if self._prefixes.is_enabled else ()
        request = EngineRequest(len(tokens))
        arguments = tokens, params, seed, max_new_tokens or remaining_tokens, stops
        options = {"text": text, "timeout": timeout, "ends": ends, "salt": cache_salt}
        sequence = RequestSequence(request, *arguments, **options)
        with self._changed:
            if self.is_closed:
                raise EngineClosed("The engine is closed.") from self._scheduler.error
            if not self._scheduler.add(sequence, self.max_queued):
                raise EngineFull(
                    f"{self.max_queued} requests are waiting, the maximum (`max_queued`). Try "
                    "again later."
                )
            self._num_requests += 1
        return request

    def _saved_ends(self, turn, tokens):
        """Returns the numbers of tokens of a prompt after which its state is saved."""
        ends = self._message_ends.find(turn) if turn else ()
        interval = self._interval or len(tokens)
        return {*ends, *range(interval, len(tokens), interval)}

    @property
    def is_closed(self):
        """True after `close`, and after a failure."""
        return self._scheduler.is_closed

    def stats(self):
        """Returns a dictionary of the current load, and of counts since the engine was created.

        - `queued`, `active`: current numbers of requests; `max_queued`, `num_slots`: their limits.
        - `requests`: number of submitted requests.
        - `tokens`, `prompt_tokens`: numbers of generated and of processed prompt tokens.
        - `prefix_hits`, `prefix_tokens`: numbers of requests that started from a prefix state, and
          of the tokens that this saved.
        """
        scheduler, prefixes = self._scheduler, self._prefixes
        return {
            "queued": scheduler.num_queued,
            "active": scheduler.num_active,
            "num_slots": self.num_slots,
            "max_queued": self.max_queued,
            "requests": self._num_requests,
            "tokens": scheduler.num_tokens,
            "prompt_tokens": scheduler.num_prompt_tokens,
            "prefix_hits": prefixes.num_hits,
            "prefix_tokens": prefixes.num_tokens,
        }

    def warm_up(self):
        """Compiles the programs of prompts and of common sampling options.

        Later requests with such options do not wait for compilation. It must be called before the
        first `submit`, because it processes prompts in the calling thread.
        """
        self._chunks.warm_up()
        for options in ({"temperature": 0}, {}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 40}):
            self.submit([1, 1], SamplingParams(**options), max_new_tokens=1).result()

    def close(self, wait=True):
        """Ends the engine; `submit` raises `EngineClosed` from now on.

        A later call can still shorten the time. In a callback, which the engine's thread calls,
        this method does not wait.

        Args:
            wait: True finishes all requests, False cancels them. A number is the time in seconds
                after which the remaining ones are cancelled.

        Returns:
            A list of the `EngineRequest`s that had not ended, each with its `finish_reason`.
        """
        with self._changed:
            self._scheduler.close()
            requests = [sequence.request for sequence in self._scheduler.sequences]
        may_wait = threading.current_thread() is not self._thread
        if wait is not True:
            if may_wait:
                self._thread.join(min(wait, threading.TIMEOUT_MAX))
            for request in requests:
                request.cancel()
        if may_wait:
            self._thread.join()
        return requests

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close(wait=error[0] is None)


def _check_model(model):
    """Returns the `Programs` of a language model, or raises an error."""
    if not hasattr(model, "prefill"):
        raise ValueError(
            "`model` must be a language model of keras_recurrent, such as `GriffinCausalLM`; got a "
            f"{type(model).__name__}."
        )
    if keras.config.backend() == "tensorflow":
        raise NotImplementedError(
            "`Engine` runs on torch and JAX, not on TensorFlow. Set KERAS_BACKEND to one of them; "
            "presets and `.keras` files can be loaded on all backends."
        )
    if keras.distribution.distribution() is not None:
        raise NotImplementedError(
            "`Engine` runs on one device; a `keras.distribution` is set. Start one engine for each "
            "device instead."
        )
    programs = model._programs()
    if model.run_eagerly:
        raise ValueError(f"`Engine` needs compiled steps, and {RUN_EAGERLY}. Compile without it.")
    if isinstance(model.sampler, BeamSampler):
        raise ValueError(
            "`Engine` cannot use the sampler BeamSampler. Compile the model with 'greedy', "
            "'top_k', 'top_p' or 'random'."
        )
    return programs


def _max_length(model, max_length):
    if max_length is None:
        if model.preprocessor is None:
            raise ValueError(
                "`max_length` must be the maximum number of tokens of a request: the model has no "
                "preprocessor, whose `sequence_length` is the default. Got None."
            )
        max_length = model.preprocessor.sequence_length
    check_token_count("max_length", max_length)
    model.backbone.check_num_tokens(max_length)
    return max_length
