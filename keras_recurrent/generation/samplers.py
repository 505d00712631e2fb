"""Properties of samplers: whether they have a custom loop, and KerasHub's as `SamplingParams`."""

import keras_hub

from keras_recurrent.generation.sampling_params import SamplingParams

Sampler = keras_hub.samplers.Sampler


def has_base_loop(sampler):
    """Returns True if a sampler only samples from probabilities, in the loop of the base class."""
    names = "__call__", "run_loop"
    return all(getattr(type(sampler), name) is getattr(Sampler, name) for name in names)


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
    keras_hub.samplers.GreedySampler: _greedy,
    keras_hub.samplers.RandomSampler: _random,
    keras_hub.samplers.TopKSampler: _top_k,
    keras_hub.samplers.TopPSampler: _top_p,
}


def as_sampling_params(sampler):
    """Returns the `SamplingParams` of a sampler of KerasHub, without its seed.

    None: a sampler of another class, or one with a replaced method.
    """
    convert = _CONVERSIONS.get(type(sampler))
    replaced = any(callable(getattr(type(sampler), name, None)) for name in vars(sampler))
    return None if convert is None or replaced else convert(sampler)
