"""`SamplingParams` and random numbers of a call, from `sampling` or a sampler of KerasHub."""

import threading

import keras_hub
import numpy as np
from keras import ops

from keras_recurrent.checks.arguments import is_finite_number, is_integer
from keras_recurrent.generation.beam_search import BeamSampler
from keras_recurrent.generation.sampling_params import SamplingParams, seed_sequence

SAMPLERS = "'greedy', 'top_k', 'top_p', 'random' or 'beam'"
CUSTOM_LOOP = (
    "For another choice of tokens, write a loop over `call_with_cache`, which continues from "
    "`backbone.get_initial_state`."
)

GREEDY = (BeamSampler, keras_hub.samplers.GreedySampler)  # beam search does not sample
RANDOM = (
    keras_hub.samplers.RandomSampler,
    keras_hub.samplers.TopKSampler,
    keras_hub.samplers.TopPSampler,
)

# Held from reading the state of a sampler's generator to assigning the next one.
_state_lock = threading.Lock()


def check_sampler(sampler, vocabulary_size):
    """Raises an error unless a sampler is supported, and `k`, `p` and `temperature` are valid."""
    kind = type(sampler).__name__
    if isinstance(sampler, type) or not hasattr(sampler, "get_next_token"):
        raise ValueError(
            "`sampler` must be a `keras_hub.samplers.Sampler`, such as `TopKSampler(k=5)`, or the "
            f"name of one, such as 'top_k'; got {sampler!r}."
        )
    replaced = any(callable(getattr(type(sampler), name, None)) for name in vars(sampler))
    if type(sampler) not in GREEDY + RANDOM or replaced:
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
    if isinstance(sampler, GREEDY):
        return SamplingParams(temperature=0)
    top_k, top_p = getattr(sampler, "k", None) or 0, getattr(sampler, "p", 1.0)
    return SamplingParams(temperature=sampler.temperature, top_k=top_k, top_p=top_p)


def resolve_sampling(model, sampling, batch_size):
    """Returns a `SamplingParams` and a `numpy.random.SeedSequence` for each sequence, two lists.

    Raises:
        ValueError: `sampling`, as in `generate`, is of another type or length, an id or number
            exceeds the vocabulary, or the sampler of the model is beam search.
    """
    if sampling is None:
        return [as_sampling_params(model.sampler)] * batch_size, _seeds(model.sampler, batch_size)
    params = _as_list(sampling, batch_size)
    for p in params:
        p.check_vocabulary(model.backbone.vocabulary_size)
    if isinstance(model.sampler, BeamSampler):
        raise ValueError(
            "`sampling` cannot be combined with the sampler BeamSampler. Compile with 'greedy', "
            "'top_k', 'top_p' or 'random', which `sampling` replaces."
        )
    return params, list(map(seed_sequence, params))


def _as_list(params, batch_size):
    if isinstance(params, SamplingParams):
        return [params] * batch_size
    params = list(params) if isinstance(params, (list, tuple)) else params
    if not isinstance(params, list) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(
            "`sampling` must be a `SamplingParams`, or a list of one for each prompt; got "
            f"{params!r}."
        )
    if len(params) != batch_size:
        raise ValueError(
            f"`sampling` must have one `SamplingParams` for each of the {batch_size} prompts; got "
            f"{len(params)}."
        )
    return params


def _seeds(sampler, batch_size):
    """Returns a seed for each sequence, and advances the generator of a sampler of KerasHub."""
    seed, count = 0, 0  # of samplers that are not random
    if (generator := getattr(sampler, "seed_generator", None)) is not None:
        with _state_lock:
            seed, count = (int(number) for number in ops.convert_to_numpy(generator.state.value))
            generator.state.assign([seed, count + 1])
    return [np.random.SeedSequence([seed, count, row]) for row in range(batch_size)]
