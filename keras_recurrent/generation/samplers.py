"""Properties of KerasHub's samplers: a custom loop, and greedy sampling."""

import keras_hub

Sampler = keras_hub.samplers.Sampler


def has_base_loop(sampler):
    """Returns True if a sampler only samples from probabilities, in the loop of the base class."""
    names = "__call__", "run_loop"
    return all(getattr(type(sampler), name) is getattr(Sampler, name) for name in names)


def is_greedy(sampler):
    """Returns True for KerasHub's greedy sampler, whose token is the argmax of the logits."""
    return type(sampler) is keras_hub.samplers.GreedySampler and sampler.temperature > 0
