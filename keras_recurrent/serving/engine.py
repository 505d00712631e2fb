"""Engine that generates for many requests at once."""

import math
import threading
import weakref

import keras

from keras_recurrent.checks.arguments import check_positive_integers, is_integer
from keras_recurrent.generation.batch import is_on_cpu
from keras_recurrent.generation.beam_search import BeamSampler
from keras_recurrent.generation.modes import RUN_EAGERLY
from keras_recurrent.generation.prompts import check_max_length, check_token_count
from keras_recurrent.generation.sampling import resolve_sampling
from keras_recurrent.generation.sampling_params import SamplingParams
from keras_recurrent.serving.client import EngineClient, Limits
from keras_recurrent.serving.prefix_cache import PrefixCache
from keras_recurrent.serving.scheduler import PromptChunks, Scheduler, num_prompts_of


class Engine(EngineClient):
    """Generates for many requests at once, which join and leave at any token.

    The generation thread launches all work on the device, and makes the text of new tokens while
    the device computes the next step. All active requests decode in one step of `num_slots`
    sequences. Prompts are processed in chunks between two steps, in the order of
    `submit`; docs/serving.md has the number and the delay of chunks. Prompts are cut at fixed
    positions and at ends of messages, so that the tokens of a request do not depend on other
    requests, except through the prefix cache, which changes rounding.

    On GPUs and TPUs, the programs of chunks and of a greedy step are compiled before the
    constructor returns. A step with other sampling options is compiled when a request first uses
    them. On torch, all requests wait for the compilation; on JAX, only queued requests wait.

    Args:
        model: a language model of this package, on torch or JAX. Its weights, layers and sampler
            must not change until `close`. On JAX, Keras's `fit`, `evaluate` and `predict` replace
            the arrays of weights even if their values stay the same, so they end the engine.
        num_slots: integer, number of requests that decode together.
        max_length: integer, maximum number of tokens of a request, with prompt and answer; the
            capacity of KV caches. None: the `sequence_length` of the preprocessor.
        prefill_chunk: integer, maximum number of tokens of a chunk.
        max_queued: integer, maximum number of requests that wait for a slot.
        prefix_cache_bytes: integer, device memory for states after prompts, answers and messages,
            and inside long prompts. A request resumes from the saved state of the longest prefix of
            its prompt; the least recently used states are dropped. 0: none.
        prefix_cache_dir: string, a directory of at most `prefix_cache_bytes` in which the states
            are also stored, so that a later engine continues conversations. None: none.
        prefix_cache_interval: integer, interval, in prompt tokens, at which states are also saved,
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
        check_positive_integers(
            num_slots=num_slots, prefill_chunk=prefill_chunk, max_queued=max_queued
        )
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
        self.model, max_length = model, _max_length(model, max_length)
        prefixes = PrefixCache(model, prefix_cache_bytes, max_length, prefix_cache_dir)
        try:
            batch = programs.batch(num_slots, keep=True)
            batch.prepare_slots(max_length, num_prompts_of(model, num_slots))
            prefixes.unpack = batch.unpack
            self._chunks = PromptChunks(batch, prefill_chunk, is_timed=not is_on_cpu(model))
        except BaseException:
            prefixes.close()
            raise
        self._scheduler = Scheduler(batch, self._chunks, prefixes)
        size = model.backbone.vocabulary_size
        # Chunks end at these positions anyway.
        interval = prefill_chunk * math.ceil(prefix_cache_interval / prefill_chunk)
        interval = interval if prefixes.is_enabled else None
        limits = Limits(num_slots, max_queued, max_length, size, interval)
        super().__init__(self._scheduler, model.preprocessor, limits)
        # The thread holds no reference to the engine. When the engine is garbage-collected, the
        # thread finishes all requests and ends.
        weakref.finalize(self, self._scheduler.close).atexit = False
        self._thread = threading.Thread(target=self._scheduler.run, name="engine", daemon=True)
        self._thread.start()

    def _resolve_sampling(self, sampling):
        if sampling is None:
            (params,), (seed,) = resolve_sampling(self.model, None, 1)
            return params, seed
        return super()._resolve_sampling(sampling)

    def warm_up(self):
        """Compiles the programs of prompts and of common sampling options.

        Later requests with such options do not wait for compilation. It must be called before the
        first `submit`, because it processes prompts in the calling thread.
        """
        self._chunks.warm_up()
        for options in ({"temperature": 0}, {}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 40}):
            # With a salt, no later request starts from the state of this prompt.
            sampling = SamplingParams(**options)
            self.submit([1, 1], sampling, max_new_tokens=1, cache_salt="warm-up").result()

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
    check_max_length(model, max_length)
    return max_length
