"""Programs of JAX or TensorFlow for prompts and decoding, one per batch size and bucket."""

import contextlib
import functools
import inspect
import platform
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_recurrent.devices.jax_layouts import drop_uneven_axes
from keras_recurrent.devices.jax_processes import gather_to_numpy
from keras_recurrent.dispatch import chosen_name
from keras_recurrent.generation import loop
from keras_recurrent.generation.lengths import bucket, initial_cache
from keras_recurrent.generation.modes import record_mode
from keras_recurrent.generation.samplers import is_greedy, sampler_settings
from keras_recurrent.layers.decoding import decoding_scope, unfused_blocks
from keras_recurrent.progress import announce


class Programs:
    """Programs of a language model.

    Args:
        model: the language model, whose sampler only samples from probabilities.
        compiled: boolean, True compiles with XLA on TensorFlow, as always on JAX. None: where XLA
            supports the model.
        snapshot: the `Snapshot` of the model.
    """

    def __init__(self, model, compiled, snapshot):
        self._model, self.compiled, self.snapshot = model, compiled, snapshot
        self._prefill, self._generate, self._begin = _programs(model, snapshot, compiled)

    def prefill(self, token_ids, lengths, cache):
        """Returns the cache after the first `lengths` tokens of each sequence.

        Args:
            token_ids: integers `[B, T]`, a NumPy array.
            lengths: integers `[B]`, a NumPy array.
            cache: the cache before these tokens.
        """
        token_ids, lengths, _ = _pad_to_bucket(token_ids, lengths)
        return self._prefill(token_ids, lengths, cache)

    def generate(self, token_ids, lengths, stop_token_ids, cache=None, keep=False):
        """Generates tokens after prompts, as `torch.loop.Loop.generate`."""
        max_length = token_ids.shape[1]
        is_full = (lengths == max_length).all()
        if is_full and not keep:
            return token_ids, lengths, None
        if keep and cache is None:
            cache = initial_cache(self._model, len(lengths), max_length, keep)
        if is_full:
            return token_ids, lengths, self.prefill(token_ids, lengths - 1, cache)
        record_mode(self._model, "program")
        padded = _pad_to_bucket(token_ids, lengths)
        token_ids, lengths, *after = self._generate(*padded, stop_token_ids, cache, keep)
        token_ids, lengths = map(gather_to_numpy, (token_ids, lengths))
        return token_ids[:, :max_length], lengths, after[0] if keep else None

    def steps(self, token_ids, lengths, stop_token_ids, cache=None):
        """Returns the `Steps` that generate token by token, as `torch.loop.Loop.steps`."""
        record_mode(self._model, "steps")
        if cache is None:
            cache = initial_cache(self._model, len(lengths), token_ids.shape[1], keep=True)
        cache = self.prefill(token_ids, lengths - 1, cache)
        last = _distribute(token_ids[np.arange(len(lengths)), lengths - 1][:, None])
        free_length = np.asarray(token_ids.shape[1] - lengths, "int32")
        state, advance = self._begin(cache, last, _distribute(free_length), stop_token_ids)
        return Steps(self._model.sampler, advance, state, int(free_length.max()))


class Steps:
    """Function that returns the next token of each sequence, and computes one token ahead.

    Args:
        sampler: the sampler of the model.
        advance: a function from a `loop.DecodingState` to the one after the next token.
        state: the `loop.DecodingState` after the prompts.
        max_tokens: integer, maximum number of new tokens of any sequence.
    """

    def __init__(self, sampler, advance, state, max_tokens):
        self._sampler, self._advance = sampler, advance
        self._state = self._next_state = state
        self._tokens_left = max_tokens
        self._launch()

    def _launch(self):
        if self._tokens_left:
            self._tokens_left -= 1
            self._seeds_before = self._copy_seeds()
            self._next_state = self._advance(self._state)
            self._seeds_after = self._copy_seeds()

    def _copy_seeds(self):
        return [ops.copy(v.value) for v in self._sampler.variables]

    def __call__(self):
        """Returns tokens [B], a NumPy array; for a sequence that has ended, its last one again."""
        self._state = self._next_state
        # Launched before the host waits for the device. If all sequences have just ended at stop
        # tokens, this step changes nothing.
        self._launch()
        return gather_to_numpy(self._state.token)[:, 0]

    def cache(self):
        """Returns the cache after all tokens of each sequence but the last."""
        return self._state.cache

    def close(self):
        """Restores the seeds from before the token that was computed ahead."""
        if self._next_state is self._state:
            return
        pairs = zip(self._copy_seeds(), self._seeds_after, strict=True)
        # Unchanged, unless the sampler was used elsewhere.
        if all(np.array_equal(*map(ops.convert_to_numpy, pair)) for pair in pairs):
            for variable, value in zip(self._sampler.variables, self._seeds_before, strict=True):
                variable.assign(value)
        self._next_state = self._state


def _pad_to_bucket(token_ids, lengths):
    """Returns tokens padded to their bucket, lengths, and the maximum length of a sequence."""
    batch_size, max_length = token_ids.shape
    padding = np.zeros((batch_size, bucket(max_length) - max_length), "int32")
    token_ids = np.concatenate((token_ids, padding), axis=1)
    return _distribute(token_ids), _distribute(lengths), np.int32(max_length)


def _distribute(array):
    """Moves an array to the devices of `keras.distribution`, if one is set."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return array
    layout = drop_uneven_axes(distribution.get_data_layout(array.shape), array.shape)
    return keras.distribution.distribute_tensor(array, layout)


def _prefill(model, token_ids, mask, cache):
    return model.backbone.hidden_states(token_ids, mask, cache=cache)[1]


def _step(model, token_ids, mask, cache):
    with decoding_scope():
        logits, _, cache = model.call_with_cache(token_ids, cache, padding_mask=mask)
    return logits[:, 0], cache


def _sample(sampler, logits):
    if is_greedy(sampler):
        return ops.argmax(logits, axis=-1)
    return sampler.get_next_token(sampler.compute_probabilities(logits))


def _network(model, snapshot, weights):
    """Returns the `loop.Network` of a program that is being traced.

    weights: values for the variables of the model. None: TensorFlow's programs read the variables.
    """
    snapshot.verify()
    announce("Compiling generation, once for a batch size and a range of lengths")
    sampler = model.sampler
    values = list(zip(model.variables, weights, strict=True)) if weights else []

    def stateless(function):
        def call(*arguments):
            with keras.StatelessScope(values) if values else contextlib.nullcontext():
                return function(model, *arguments)

        return call

    def sample(logits, seeds):
        if not seeds:
            return _sample(sampler, logits), seeds
        generators = list(zip(sampler.variables, seeds, strict=True))
        with keras.StatelessScope(generators) as scope:
            tokens = _sample(sampler, logits)
        pairs = ((scope.get_current_value(v), value) for v, value in generators)
        return tokens, [value if new is None else new for new, value in pairs]

    return loop.Network(stateless(_prefill), stateless(_step), sample)


def _programs(model, snapshot, compiled):
    """Returns the functions `prefill`, `generate` and `begin` of `Programs`."""
    on_jax = keras.config.backend() == "jax"
    function = _jit if on_jax else _tensorflow_function(model, compiled)
    network = functools.partial(_network, model, snapshot)

    @function
    def prefill_program(token_ids, lengths, cache, weights, variant):
        return loop.prefill(network(weights), cache, token_ids, lengths)

    @function
    def generate_program(
        token_ids, lengths, max_length, cache, weights, seeds, stop_token_ids, keep, variant
    ):
        if cache is None:
            cache = model.backbone.get_initial_state(*token_ids.shape)
        prompts = token_ids, lengths, max_length, stop_token_ids
        return loop.generate(network(weights), cache, *prompts, list(seeds), keep)

    @function
    def step_program(state, free_length, weights, stop_token_ids, variant):
        return loop.advance(network(weights), state, free_length, stop_token_ids, keep=True)

    # A program also depends on the sampler's arguments, the choice of `implementation` and, on JAX,
    # the blocks that are not fused. TensorFlow's programs depend on the variables that they read,
    # which change, such as in `enable_lora`.
    def variant():
        layers: Any = unfused_blocks(model)
        if not on_jax:
            layers = ((v.path, tuple(v.shape), v.dtype) for v in model.variables)
        return sampler_settings(model.sampler), chosen_name(), tuple(layers)

    def weights():
        return [v.value for v in model.variables] if on_jax else None

    # The state of a custom sampler on TensorFlow may be more than its random number generators.
    def generators():
        is_known = on_jax or sampler_settings(model.sampler) is not None
        return model.sampler.variables if is_known else []

    def seeds():
        return [v.value for v in generators()]

    def assign(values):
        for variable, value in zip(generators(), values, strict=True):
            variable.assign(value)

    def prefill(token_ids, lengths, cache):
        return prefill_program(token_ids, lengths, cache, weights(), variant=variant())

    def generate(token_ids, lengths, max_length, stop_token_ids, cache, keep):
        token_ids, lengths, new_seeds, *after = generate_program(
            *(token_ids, lengths, max_length, cache, weights(), seeds()),
            stop_token_ids=stop_token_ids,
            keep=keep,
            variant=variant(),
        )
        assign(new_seeds)
        return token_ids, lengths, *after

    def begin(cache, token, free_length, stop_token_ids):
        token, free_length = map(ops.convert_to_tensor, (token, free_length))
        values, options = weights(), {"stop_token_ids": stop_token_ids, "variant": variant()}

        def advance(state):
            state = step_program(state._replace(seeds=seeds()), free_length, values, **options)
            assign(state.seeds)
            return state

        return loop.initial_state(cache, token, free_length, seeds()), advance

    return prefill, generate, begin


def _jit(function):
    import jax

    names = inspect.signature(function).parameters.keys()
    return jax.jit(function, static_argnames=names & {"stop_token_ids", "keep", "variant"})


def _tensorflow_function(model, compiled):
    import tensorflow as tf

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
