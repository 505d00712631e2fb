"""Properties of KerasHub's samplers: a custom loop, and the choice of the largest logit."""

import keras_hub

Sampler = keras_hub.samplers.Sampler


def only_chooses(sampler):
    """Whether it has no loop of its own, but chooses tokens from probabilities."""
    names = "__call__", "run_loop"
    return all(getattr(type(sampler), name) is getattr(Sampler, name) for name in names)


def takes_the_largest(sampler):
    """Whether it is KerasHub's greedy one: the largest logit has the largest probability."""
    return type(sampler) is keras_hub.samplers.GreedySampler and sampler.temperature > 0
