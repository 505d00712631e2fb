"""Properties of KerasHub's samplers: a custom loop, greedy sampling, and their arguments."""

import keras_hub

Sampler = keras_hub.samplers.Sampler


def has_base_loop(sampler):
    """Returns True if a sampler only samples from probabilities, in the loop of the base class."""
    names = "__call__", "run_loop"
    return all(getattr(type(sampler), name) is getattr(Sampler, name) for name in names)


def is_greedy(sampler):
    """Returns True for KerasHub's greedy sampler, whose token is the argmax of the logits."""
    return type(sampler) is keras_hub.samplers.GreedySampler and sampler.temperature > 0


def sampler_settings(sampler):
    """Returns a hashable value that is equal for samplers that differ only in their random numbers.

    None: a sampler of another package, or one with a replaced method.
    """
    kind = type(sampler)
    replaced = any(callable(getattr(kind, name, None)) for name in vars(sampler))
    if not kind.__module__.startswith("keras_hub.") or replaced:
        return None
    config = {name: value for name, value in sampler.get_config().items() if name != "seed"}
    return kind.__name__, str(config)
