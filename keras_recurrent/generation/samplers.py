"""Properties of KerasHub's samplers: a custom loop, and the choice of the largest logit."""

import keras_hub

Sampler = keras_hub.samplers.Sampler


def has_base_loop(sampler):
    """Returns True if it only chooses tokens from probabilities, in the loop of the base class."""
    names = "__call__", "run_loop"
    return all(getattr(type(sampler), name) is getattr(Sampler, name) for name in names)


def is_greedy(sampler):
    """Returns True for KerasHub's greedy sampler: the largest logit is the most probable token."""
    return type(sampler) is keras_hub.samplers.GreedySampler and sampler.temperature > 0
