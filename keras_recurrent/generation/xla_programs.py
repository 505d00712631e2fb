"""Programs of JAX or TensorFlow for prompts and decoding, one per batch size and bucket."""

import contextlib
import functools
import inspect
import math
import platform
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_recurrent.backends.constants import MIN_DELAYED_ROWS
from keras_recurrent.devices.jax_layouts import drop_uneven_axes
from keras_recurrent.devices.jax_processes import gather_to_numpy
from keras_recurrent.dispatch import chosen_name
from keras_recurrent.generation import beam_search, loop
from keras_recurrent.generation.lengths import bucket, initial_cache
from keras_recurrent.generation.modes import RUN_EAGERLY, record_mode
from keras_recurrent.generation.recent_tokens import apply_recent_tokens
from keras_recurrent.generation.request import Ended, Result
from keras_recurrent.generation.sampling import STOPS_PER_STEP, next_tokens
from keras_recurrent.generation.xla_steps import TOKENS_PER_GROUP, Steps
from keras_recurrent.layers.decoding import decoding_scope, unfused_blocks
from keras_recurrent.progress import announce

# Arguments that a program depends on.
STATIC = {"features", "keep", "num_tokens", "num_beams", "variant"}
TOKENS_PER_STEP = 2  # of a stream: a token is returned at most one token late


class Programs:
    """Programs of a language model.

    Args:
        model: the language model. With `run_eagerly=True`, the functions of its programs run
            without being compiled.
    """

    def __init__(self, model):
        self._model = model
        self._prefill, self._generate, self._decoder, self._search = _programs(model)

    def _record_mode(self, name):
        if self._model.run_eagerly:
            record_mode(self._model, "eager", {name: RUN_EAGERLY})
        else:
            record_mode(self._model, name)

    def prefill(self, token_ids, lengths, cache=None, max_length=None):
        """Returns the cache after the first `lengths` tokens of each sequence.

        Args:
            token_ids: integers `[B, T]`, a NumPy array.
            lengths: integers `[B]`, a NumPy array.
            cache: the cache before these tokens. None: the initial one, for `max_length` tokens.
        """
        if cache is None:
            cache = self._model.backbone.get_initial_state(len(lengths), max_length=max_length)
        return self._prefill(*_pad_to_bucket(token_ids, lengths), cache)

    def generate(self, request, cache=None, keep=False):
        """Generates tokens after prompts, as `torch.loop.Loop.generate`."""
        free_length = request.free_length
        if not free_length.any() and not keep:
            return Result(request.token_ids, request.lengths, None, None)
        if keep and cache is None:
            cache = initial_cache(self._model, len(free_length), request.token_ids.shape[1], keep)
        if not free_length.any():
            cache = self.prefill(request.token_ids, request.lengths - 1, cache)
            return Result(request.token_ids, request.lengths, cache, None)
        if request.stop_strings is not None:
            return self._generate_in_blocks(request, cache, keep)
        self._record_mode("program")
        token_ids, lengths = _pad_to_bucket(request.token_ids, request.lengths)
        call, max_tokens = Call(self._model, request), int(free_length.max())
        cache, generated, counts, logprobs = self._generate(
            token_ids, lengths, max_tokens, cache, call, keep
        )
        new, counts = map(gather_to_numpy, (generated, counts))
        logprobs = keras.tree.map_structure(gather_to_numpy, logprobs) or None
        return request.result(new, counts, cache if keep else None, logprobs)

    def search(self, request, sampler, cache=None):
        """Returns the `Hypotheses` of beam search, as `torch.loop.Loop.search`."""
        self._record_mode("program")
        prompts = _pad_to_bucket(request.token_ids, request.lengths)
        found = self._search(*prompts, cache, Call(self._model, request), sampler)
        return keras.tree.map_structure(gather_to_numpy, found)

    def _generate_in_blocks(self, request, cache, keep):
        """Generates blocks of tokens, between which the host searches for stop strings."""
        steps, ended = self._begin(request, cache, TOKENS_PER_GROUP, keep), Ended(request)
        blocks, logprobs, has_ended = [], [], False
        while not has_ended:
            blocks.append(steps.block())
            logprobs.append(steps.logprobs)
            has_ended = ended.after(blocks[-1])
            if keep:
                steps.limit(request.stop_strings.counts)
        new = np.concatenate(blocks, axis=1)
        logprobs = keras.tree.map_structure(lambda *x: np.concatenate(x, axis=1), *logprobs)
        cache = steps.cache() if keep else None
        return request.result(new, ended.counts(new), cache, logprobs or None)

    def steps(self, request, cache=None):
        """Returns the `Steps` that generate token by token, as `torch.loop.Loop.steps`."""
        return self._begin(request, cache, TOKENS_PER_STEP, keep=True)

    def _begin(self, request, cache, num_tokens, keep):
        """Returns the `Steps` after the prompts.

        keep: boolean, True if their cache is read.
        """
        self._record_mode("steps")
        token_ids, lengths = request.token_ids, request.lengths
        if cache is None:
            cache = initial_cache(self._model, len(lengths), token_ids.shape[1], keep=keep)
        cache = delay_writes(self._model, self.prefill(token_ids, lengths - 1, cache))
        call, last = Call(self._model, request), _distribute(request.last_token)
        state = loop.initial_state(cache, last, call.free_length, call.memory())
        decode, copy, finish = self._decoder(call, keep)
        return Steps(call, decode, copy, finish, state, num_tokens, keep)


class Call:
    """Arrays of one request on the devices, and what sampling keeps between tokens.

    Args:
        model: the language model.
        request: the `Request`.

    Attributes:
        limits: int32 [B], a NumPy array, maximum number of new tokens.
        free_length: `limits` on the devices.
    """

    def __init__(self, model, request):
        sampling, stops = request.sampling, request.stop_token_ids
        self.features, self._sampling = sampling.features, sampling
        self.limits, self.free_length = request.free_length, _distribute(request.free_length)
        padded = STOPS_PER_STEP * max(1, math.ceil(len(stops) / STOPS_PER_STEP))
        self.stops = ops.convert_to_tensor((*stops, *(-1,) * (padded - len(stops))), "int32")
        self.arguments = keras.tree.map_structure(_distribute, sampling.arguments)
        self._counts_shape = len(request.lengths), model.backbone.vocabulary_size

    def limit(self, counts):
        """Reduces the maximum numbers of new tokens to `counts`, int32 [B]."""
        self.free_length = self.limited(counts)
        self.limits = np.minimum(self.limits, counts)

    def limited(self, counts):
        """Returns `free_length` with an upper bound, an integer or int32 [B]."""
        return _distribute(np.minimum(self.limits, counts).astype("int32"))

    def uniform(self, num_tokens, num_columns):
        """Returns random numbers of the next tokens, padded to `num_columns`; None if not used."""
        if not self.features.is_random:
            return None
        numbers = self._sampling.uniform(num_tokens)
        return _distribute(np.pad(numbers, ((0, 0), (0, num_columns - num_tokens))))

    def memory(self):
        """Returns what sampling keeps, before the first token."""
        if not self.features.has_penalties:
            return ()
        return _distribute(np.zeros(self._counts_shape, "int32"))


def _pad_to_bucket(token_ids, lengths):
    """Returns tokens padded to their bucket, and lengths."""
    batch_size, max_length = token_ids.shape
    padding = np.zeros((batch_size, bucket(max_length) - max_length), "int32")
    return _distribute(np.concatenate((token_ids, padding), axis=1)), _distribute(lengths)


def _distribute(array):
    """Moves an array to the device, or to the devices of `keras.distribution` if one is set."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return ops.convert_to_tensor(array)
    layout = drop_uneven_axes(distribution.get_data_layout(array.shape), array.shape)
    return keras.distribution.distribute_tensor(array, layout)


def _prefill(model, token_ids, mask, cache):
    return model.backbone.hidden_states(token_ids, mask, cache=cache)[1]


def _step(model, token_ids, mask, cache):
    with contextlib.nullcontext() if model.run_eagerly else decoding_scope():
        logits, _, cache = model.call_with_cache(token_ids, cache, padding_mask=mask)
    return logits[:, 0], cache


def make_network(model, weights, call=None):
    """Returns the `loop.Network` of a program that is being traced.

    Args:
        model: the language model.
        weights: values for the variables of the model. None: TensorFlow's programs read the
            variables.
        call: a tuple `(features, stops, arguments)` of a `Call`. None: no tokens are sampled.
    """
    if not model.run_eagerly:
        announce("Compiling generation, once for a batch size and a range of lengths")
    values = list(zip(model.variables, weights, strict=True)) if weights else []
    features: Any
    stops: Any
    features, stops, arguments = call or (None, None, None)

    def stateless(function):
        def call(*arguments):
            with keras.StatelessScope(values) if values else contextlib.nullcontext():
                return function(model, *arguments)

        return call

    def sample(logits, count, uniform, memory):
        rows = ops.reshape(stops, (-1, stops.shape[-1]))
        return next_tokens(features, logits, rows, count, uniform, memory, arguments)

    number = features and features.num_logprobs
    return loop.Network(stateless(_prefill), stateless(_step), sample, number)


def delay_writes(model, cache):
    """Returns the cache, with recent tokens if JAX's steps write large states every few tokens."""
    backbone, batch_size = model.backbone, cache["segment"].shape[0]
    is_large = keras.config.backend() == "jax" and batch_size >= MIN_DELAYED_ROWS
    if model.run_eagerly or not is_large or not backbone.takes_fused_steps(batch_size):
        return cache
    return backbone.add_recent_tokens(cache)


def program_variant(model):
    """Returns what a program depends on beyond the shapes of its arguments.

    These are the choice of `implementation` and, on JAX, the blocks that are not fused. Programs of
    TensorFlow depend on the variables that they read, which change, such as in `enable_lora`.
    """
    layers: Any = unfused_blocks(model)
    if keras.config.backend() != "jax":
        layers = ((v.path, tuple(v.shape), v.dtype) for v in model.variables)
    return chosen_name(), tuple(layers)


def program_weights(model):
    """Returns the weights, arguments of a program on JAX; None on TensorFlow."""
    return [v.value for v in model.variables] if keras.config.backend() == "jax" else None


def _programs(model):
    """Returns the functions `prefill`, `generate`, `decoder` and `search` of `Programs`."""
    on_jax = keras.config.backend() == "jax"
    function = _jit if on_jax else _tensorflow_function(model)
    if model.run_eagerly:
        function = _unchanged
    network = functools.partial(make_network, model)

    @function
    def prefill_program(token_ids, lengths, cache, weights, variant):
        return loop.prefill(network(weights), cache, token_ids, lengths)

    def process_prompts(functions, token_ids, lengths, cache):
        """Returns the cache before the last token of each prompt, and this token [B, 1]."""
        if cache is None:
            cache = model.backbone.get_initial_state(*token_ids.shape)
        last = ops.take_along_axis(token_ids, lengths[:, None] - 1, axis=1)
        return loop.prefill(functions, cache, token_ids, lengths - 1), last

    @function
    def generate_program(token_ids, lengths, cache, weights, inputs, features, keep, variant):
        free_length, stops, uniform, memory, arguments = inputs
        functions = network(weights, (features, stops, arguments))
        cache, last = process_prompts(functions, token_ids, lengths, cache)
        cache = delay_writes(model, cache)
        state = loop.initial_state(cache, last, free_length, memory)
        options = free_length, stops, uniform, keep, token_ids.shape[1], True
        state, tokens, logprobs = loop.decode(functions, state, *options)
        cache = apply_recent_tokens(state.cache) if keep else ()
        return cache, tokens, state.count, logprobs

    @function
    def decode_program(state, weights, inputs, features, keep, num_tokens, variant):
        free_length, stops, uniform, arguments = inputs
        functions = network(weights, (features, stops, arguments))
        options = free_length, stops, uniform, keep, num_tokens, False
        return loop.decode(functions, state, *options)

    @function
    def copy_program(original):
        return keras.tree.map_structure(ops.copy, original)

    finish_program = function(apply_recent_tokens)

    @function
    def search_program(token_ids, lengths, cache, weights, inputs, num_beams, variant):
        functions = network(weights)
        cache, last = process_prompts(functions, token_ids, lengths, cache)
        options = *inputs, num_beams, token_ids.shape[1]
        return beam_search.search(functions.step, cache, last, *options)

    variant = functools.partial(program_variant, model)
    weights = functools.partial(program_weights, model)

    def prefill(token_ids, lengths, cache):
        return prefill_program(token_ids, lengths, cache, weights(), variant=variant())

    def generate(token_ids, lengths, max_tokens, cache, call, keep):
        memory, uniform = call.memory(), call.uniform(max_tokens, token_ids.shape[1])
        inputs = call.free_length, call.stops, uniform, memory, call.arguments
        return generate_program(
            *(token_ids, lengths, cache, weights(), inputs),
            features=call.features,
            keep=keep,
            variant=variant(),
        )

    def decoder(call, keep):
        """Returns the functions `decode`, `copy` and `finish` of `Steps`."""
        # Collected once: for each block, they would take longer than the device.
        values = weights()
        options = {"features": call.features, "keep": keep, "variant": variant()}

        def decode(state, uniform, free_length, num_tokens):
            inputs = free_length, call.stops, uniform, call.arguments
            return decode_program(state, values, inputs, num_tokens=num_tokens, **options)

        if on_jax:
            return decode, copy_program, finish_program
        # On TensorFlow, programs overwrite nothing, and caches have no recent tokens.
        return decode, lambda state: state, lambda cache: cache

    def search(token_ids, lengths, cache, call, sampler):
        inputs = call.free_length, call.stops, *beam_search.options_of(sampler)
        options = {"num_beams": sampler.num_beams, "variant": variant()}
        return search_program(token_ids, lengths, cache, weights(), inputs, **options)

    return prefill, generate, decoder, search


def _jit(function):
    import jax

    names = inspect.signature(function).parameters.keys()
    overwritten = names & {"state"}
    return jax.jit(function, static_argnames=names & STATIC, donate_argnames=overwritten)


def _unchanged(function):
    return function


def _tensorflow_function(model):
    import tensorflow as tf

    compiled = model._compiles_generation
    compiled = _supports_xla(model) if compiled is None else compiled
    return functools.partial(tf.function, jit_compile=compiled)


def _supports_xla(model):
    """Returns True if XLA compiles the model on TensorFlow, on CPUs as well, unlike Keras's fit."""
    import tensorflow as tf

    layers = model.backbone._flatten_layers()
    return (
        all(layer.supports_jit for layer in layers)
        and platform.system() != "Darwin"
        and not tf.distribute.has_strategy()
    )
