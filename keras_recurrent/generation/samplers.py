"""Samplers of KerasHub as `SamplingParams`."""

import keras_hub
import numpy as np

from keras_recurrent.checks.arguments import is_finite_number, is_integer
from keras_recurrent.generation.beam_sampler import BeamSampler
from keras_recurrent.generation.sampling_params import SamplingParams

SAMPLERS = "'greedy', 'top_k', 'top_p', 'random' or 'beam'"
CUSTOM_LOOP = (
    "For another choice of tokens, write a loop over `call_with_cache`, which continues from "
    "`backbone.get_initial_state`."
)


def _greedy(sampler):
    return SamplingParams(temperature=0)


def _random(sampler):
    return SamplingParams(temperature=sampler.temperature)


def _top_k(sampler):
    return SamplingParams(temperature=sampler.temperature, top_k=sampler.k)


def _top_p(sampler):
    top_k = 0 if sampler.k is None else sampler.k
    return SamplingParams(temperature=sampler.temperature, top_p=sampler.p, top_k=top_k)


_CONVERSIONS = {
    BeamSampler: _greedy,  # its search does not sample
    keras_hub.samplers.GreedySampler: _greedy,
    keras_hub.samplers.RandomSampler: _random,
    keras_hub.samplers.TopKSampler: _top_k,
    keras_hub.samplers.TopPSampler: _top_p,
}


def check_sampler(sampler, vocabulary_size):
    """Raises an error unless a sampler is supported, and `k`, `p` and `temperature` are valid."""
    kind = type(sampler).__name__
    if isinstance(sampler, type) or not hasattr(sampler, "get_next_token"):
        raise ValueError(
            "`sampler` must be a `keras_hub.samplers.Sampler`, such as `TopKSampler(k=5)`, or the "
            f"name of one, such as 'top_k'; got {sampler!r}."
        )
    replaced = any(callable(getattr(type(sampler), name, None)) for name in vars(sampler))
    if type(sampler) not in _CONVERSIONS or replaced:
        raise ValueError(
            f"`sampler` must be {SAMPLERS} or one of these classes, without a replaced method; got "
            f"a {kind}. `SamplingParams` has more options. {CUSTOM_LOOP}"
        )
    up_to_vocabulary = f"an integer from 1 to {vocabulary_size}, the size of the vocabulary"
    for name, is_valid, maximum, description in (
        ("k", is_integer, vocabulary_size, up_to_vocabulary),
        ("temperature", is_finite_number, np.inf, "a number above 0"),
        ("p", is_finite_number, 1, "a number above 0, at most 1"),
    ):
        number = getattr(sampler, name, None)
        if number is not None and not (is_valid(number) and 0 < number <= maximum):
            raise ValueError(
                f"`sampler`: `{name}` of {kind} must be {description}; got {number!r}. Use "
                "'greedy' for the most probable token."
            )


def as_sampling_params(sampler):
    """Returns the `SamplingParams` of a sampler, without its seed."""
    return _CONVERSIONS[type(sampler)](sampler)
