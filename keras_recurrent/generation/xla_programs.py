"""Reading and writing as programs of JAX or TensorFlow, one for a batch size and a bucket."""

import functools
import platform

import keras
import numpy as np
from keras import ops

from keras_recurrent.devices.jax_layouts import drop_uneven_axes
from keras_recurrent.devices.jax_processes import gather_to_numpy
from keras_recurrent.dispatch import chosen_name
from keras_recurrent.generation import loop
from keras_recurrent.generation.lengths import bucket, initial_cache
from keras_recurrent.generation.samplers import is_greedy
from keras_recurrent.generation.ways import record_mode
from keras_recurrent.layers.decoding import decoding_scope, unfused_blocks


class Programs:
    """The programs of a language model.

    Args:
        model: the language model, whose sampler chooses tokens from probabilities.
        compiled: whether XLA compiles them on TensorFlow, as it always does on JAX; None: where it
            can.
    """

    def __init__(self, model, compiled):
        self._model = model
        if keras.config.backend() == "jax":
            self._read, self._write, self._begin = _of_jax(model)
        else:
            compiled = _xla_can(model) if compiled is None else compiled
            self._read, self._write, self._begin = _of_tensorflow(model, compiled)

    def read(self, token_ids, lengths, cache):
        """The cache after the first `lengths` (NumPy, [B]) tokens of each row (NumPy, [B, T])."""
        token_ids, lengths, _ = _padded(token_ids, lengths)
        return self._read(token_ids, lengths, cache)

    def write(self, token_ids, lengths, stop_token_ids, cache=None, keep=False):
        """Rows with new tokens, as `torch.loop.Loop.write`."""
        record_mode(self._model, "program")
        given = _padded(token_ids, lengths)
        if keep and cache is None:
            cache = initial_cache(self._model, len(lengths), token_ids.shape[1], keep)
        token_ids, lengths, *after = self._write(*given, stop_token_ids, cache, keep)
        token_ids, lengths = map(gather_to_numpy, (token_ids, lengths))
        return token_ids[:, : int(given[2])], lengths, after[0] if keep else None

    def steps(self, token_ids, lengths, stop_token_ids, cache=None):
        """What writes token by token, as `torch.loop.Loop.steps`."""
        record_mode(self._model, "steps")
        if cache is None:
            cache = initial_cache(self._model, len(lengths), token_ids.shape[1], keep=True)
        cache = self.read(token_ids, lengths - 1, cache)
        last = token_ids[np.arange(len(lengths)), lengths - 1][:, None]
        room = np.asarray(token_ids.shape[1] - lengths, "int32")
        walk, advance = self._begin(cache, _distributed(last), _distributed(room), stop_token_ids)
        return Steps(self._model.sampler, advance, walk, int(room.max()))


class Steps:
    """Tokens of all rows, one at each call; the next one is under way before it is asked for.

    Args:
        sampler: the sampler of the model, which chooses tokens.
        advance: a function from a `loop.Walk` to the one with a token more.
        walk: the `loop.Walk` where the rows begin.
        longest: how many tokens the row with most room has room for.
    """

    def __init__(self, sampler, advance, walk, longest):
        self._sampler, self._advance = sampler, advance
        self._walk = self._ahead = walk
        self._left = longest
        self._launch()

    def _launch(self):
        if self._left:
            self._left -= 1
            self._seeds = self._seeds_now()
            self._ahead = self._advance(self._walk)
            self._drawn = self._seeds_now()

    def _seeds_now(self):
        return [ops.copy(v.value) for v in self._sampler.variables]

    def __call__(self):
        """Tokens [B], a NumPy array; of a row that is done, its last one again."""
        self._walk = self._ahead
        # Before the host waits for the device. Where all rows have just met stop tokens, this step
        # changes nothing.
        self._launch()
        return gather_to_numpy(self._walk.token)[:, 0]

    def cache(self):
        """What each row has seen: all its tokens but the last."""
        return self._walk.cache

    def close(self):
        """Gives back the random numbers of the token that nobody has asked for."""
        if self._ahead is self._walk:
            return
        pairs = zip(self._seeds_now(), self._drawn, strict=True)
        if all(np.array_equal(*map(ops.convert_to_numpy, pair)) for pair in pairs):
            for variable, value in zip(self._sampler.variables, self._seeds, strict=True):
                variable.assign(value)
        self._ahead = self._walk


def _padded(token_ids, lengths):
    """Tokens padded to their bucket, lengths and the number of tokens that a row may have."""
    batch, limit = token_ids.shape
    room = np.zeros((batch, bucket(limit) - limit), "int32")
    token_ids = np.concatenate((token_ids, room), axis=1)
    return _distributed(token_ids), _distributed(lengths), np.int32(limit)


def _distributed(array):
    """On the devices of `keras.distribution`, if there is one."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return array
    layout = drop_uneven_axes(distribution.get_data_layout(array.shape), array.shape)
    return keras.distribution.distribute_tensor(array, layout)


def _read(model, token_ids, mask, cache):
    return model.backbone.hidden_states(token_ids, mask, cache=cache)[1]


def _step(model, token_ids, mask, cache):
    with decoding_scope():
        logits, _, cache = model.call_with_cache(token_ids, cache, padding_mask=mask)
    return logits[:, 0], cache


def _choice(sampler, logits):
    if is_greedy(sampler):
        return ops.argmax(logits, axis=-1)
    return sampler.get_next_token(sampler.compute_probabilities(logits))


def _of_jax(model):
    import jax

    sampler = model.sampler

    def network(weights):
        weights = list(zip(model.variables, weights, strict=True))

        def stateless(function):
            def call(*arguments):
                with keras.StatelessScope(weights):
                    return function(model, *arguments)

            return call

        def choose(logits, seeds):
            generators = list(zip(sampler.variables, seeds, strict=True))
            with keras.StatelessScope(generators) as scope:
                tokens = _choice(sampler, logits)
            found = ((scope.get_current_value(v), value) for v, value in generators)
            return tokens, [value if new is None else new for new, value in found]

        return loop.Network(stateless(_read), stateless(_step), choose)

    # What `implementation` has chosen, and which blocks take no fused steps, are part of a program,
    # too.
    def variant():
        return chosen_name(), tuple(unfused_blocks(model))

    @functools.partial(jax.jit, static_argnames="variant")
    def read_program(token_ids, lengths, cache, weights, variant):
        return loop.read(network(weights), cache, token_ids, lengths)

    @functools.partial(jax.jit, static_argnames=("stop_token_ids", "keep", "variant"))
    def write_program(
        token_ids, lengths, limit, cache, weights, seeds, stop_token_ids, keep, variant
    ):
        if cache is None:
            cache = model.backbone.get_initial_state(*token_ids.shape)
        rows = token_ids, lengths, limit, stop_token_ids
        return loop.write(network(weights), cache, *rows, list(seeds), keep)

    @functools.partial(jax.jit, static_argnames=("stop_token_ids", "variant"))
    def step_program(walk, room, weights, stop_token_ids, variant):
        return loop.advance(network(weights), walk, room, stop_token_ids, keep=True)

    def weights():
        return [v.value for v in model.variables]

    def seeds():
        return [v.value for v in sampler.variables]

    def assign(values):
        for variable, value in zip(sampler.variables, values, strict=True):
            variable.assign(value)

    def read(token_ids, lengths, cache):
        return read_program(token_ids, lengths, cache, weights(), variant=variant())

    def write(token_ids, lengths, limit, stop_token_ids, cache, keep):
        token_ids, lengths, drawn, *after = write_program(
            *(token_ids, lengths, limit, cache, weights(), seeds()),
            stop_token_ids=stop_token_ids,
            keep=keep,
            variant=variant(),
        )
        assign(drawn)
        return token_ids, lengths, *after

    def begin(cache, token, room, stop_token_ids):
        token, room, now = ops.convert_to_tensor(token), ops.convert_to_tensor(room), weights()
        chosen = {"stop_token_ids": stop_token_ids, "variant": variant()}

        def advance(walk):
            walk = step_program(walk._replace(seeds=seeds()), room, now, **chosen)
            assign(walk.seeds)
            return walk

        return loop.begin(cache, token, room, seeds()), advance

    return read, write, begin


def _xla_can(model):
    """Whether XLA compiles for TensorFlow: on CPUs as well, unlike `fit` in Keras."""
    import tensorflow as tf

    layers = model.backbone._flatten_layers()
    return (
        all(layer.supports_jit for layer in layers)
        and platform.system() != "Darwin"
        and not tf.distribute.has_strategy()
    )


def _of_tensorflow(model, compiled):
    import tensorflow as tf

    sampler = model.sampler
    network = loop.Network(
        functools.partial(_read, model),
        functools.partial(_step, model),
        lambda logits, seeds: (_choice(sampler, logits), seeds),
    )
    function = functools.partial(tf.function, jit_compile=compiled)

    # A program is traced anew where the variables are others, such as after `enable_lora`, and
    # where `implementation` has chosen another one.
    @function
    def read_program(token_ids, lengths, cache, traced_for):
        return loop.read(network, cache, token_ids, lengths)

    @function
    def write_program(token_ids, lengths, limit, stop_token_ids, cache, keep, traced_for):
        if cache is None:
            cache = model.backbone.get_initial_state(*token_ids.shape)
        rows = token_ids, lengths, limit, stop_token_ids
        token_ids, lengths, _, *after = loop.write(network, cache, *rows, (), keep)
        return token_ids, lengths, *after

    @function
    def step_program(walk, room, stop_token_ids, traced_for):
        return loop.advance(network, walk, room, stop_token_ids, keep=True)

    def traced_for():
        variables = ((v.path, tuple(v.shape), v.dtype) for v in model.variables)
        return chosen_name(), tuple(variables)

    def read(*arguments):
        return read_program(*arguments, traced_for())

    def write(*arguments):
        return write_program(*arguments, traced_for())

    def begin(cache, token, room, stop_token_ids):
        token, room, now = ops.convert_to_tensor(token), ops.convert_to_tensor(room), traced_for()

        def advance(walk):
            return step_program(walk, room, stop_token_ids, now)

        return loop.begin(cache, token, room, ()), advance

    return read, write, begin
