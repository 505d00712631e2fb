"""`loop.write` as a program of JAX or TensorFlow, one for a batch size and a bucket of lengths."""

import functools
import platform

import keras

from keras_recurrent.dispatch import chosen_name
from keras_recurrent.generation.loop import write
from keras_recurrent.layers.one_token import writing


def make_program(model, compiled):
    """A function `(token_ids, lengths, limit, stop_token_ids) -> (token_ids, lengths)`.

    compiled: whether XLA compiles it on TensorFlow, as it always does on JAX; None: where it can.
    """
    if keras.config.backend() == "jax":
        return _of_jax(model)
    return _of_tensorflow(model, _xla_can(model) if compiled is None else compiled)


def _network(model, token_ids, mask, cache):
    if mask is not None:
        return None, model.backbone.hidden_states(token_ids, mask, cache=cache)[1]
    with writing():
        logits, _, cache = model.call_with_cache(token_ids, cache)
    return logits[:, 0], cache


def _choice(sampler, logits):
    return sampler.get_next_token(sampler.compute_probabilities(logits))


def _of_jax(model):
    import jax

    sampler = model.sampler

    @functools.partial(jax.jit, static_argnames=("stop_token_ids", "implementation"))
    def program(token_ids, lengths, limit, weights, seeds, stop_token_ids, implementation):
        weights = list(zip(model.variables, weights, strict=True))

        def network(*arguments):
            with keras.StatelessScope(weights):
                return _network(model, *arguments)

        def choose(logits, seeds):
            generators = list(zip(sampler.variables, seeds, strict=True))
            with keras.StatelessScope(generators) as scope:
                tokens = _choice(sampler, logits)
            found = ((scope.get_current_value(v), value) for v, value in generators)
            return tokens, [value if new is None else new for new, value in found]

        cache = model.backbone.get_initial_state(*token_ids.shape)
        return write(network, choose, cache, token_ids, lengths, limit, stop_token_ids, list(seeds))

    def run(token_ids, lengths, limit, stop_token_ids):
        weights = [v.value for v in model.variables]
        seeds = [v.value for v in sampler.variables]
        token_ids, lengths, seeds = program(
            *(token_ids, lengths, limit, weights, seeds),
            stop_token_ids=stop_token_ids,
            implementation=chosen_name(),
        )
        for variable, value in zip(sampler.variables, seeds, strict=True):
            variable.assign(value)
        return token_ids, lengths

    return run


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

    @functools.partial(tf.function, jit_compile=compiled)
    def program(token_ids, lengths, limit, stop_token_ids, variables):
        del variables  # a program is traced anew where they are others, such as after `enable_lora`
        network = functools.partial(_network, model)
        cache = model.backbone.get_initial_state(*token_ids.shape)
        token_ids, lengths, _ = write(
            *(network, lambda logits, seeds: (_choice(sampler, logits), seeds)),
            *(cache, token_ids, lengths, limit, stop_token_ids, ()),
        )
        return token_ids, lengths

    def run(*arguments):
        variables = tuple((v.path, tuple(v.shape), v.dtype) for v in model.variables)
        return program(*arguments, variables)

    return run
