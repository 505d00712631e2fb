"""Tokens chosen by `SamplingParams`, compared with a loop in NumPy float64."""

import dataclasses
from types import SimpleNamespace

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.generation.sampling import (
    AFTER_TEMPERATURE,
    covers,
    features_of,
    next_tokens,
    option,
    option_arrays,
    resolve_sampling,
)
from keras_recurrent.generation.sampling_params import number
from keras_recurrent.generation.sequence import DeviceState, Sequence
from keras_recurrent.models import SamplingParams
from tests.generation import numpy_sampling
from tests.generation.tokens import pad

VOCABULARY, STEPS, STOPS = 100, 20, (3, 7)
PROMPTS = [[1, 5, 5], [2, 9, 30, 31], [4]]
LIKELY = dict.fromkeys([1, 2, 4, 5, 9, 30, 31, 50, 51], 4.0)
CASES = {
    "greedy": SamplingParams(temperature=0),
    "all tokens": SamplingParams(seed=1),
    "temperature": SamplingParams(seed=2, temperature=0.3),
    "top_k": SamplingParams(seed=3, top_k=5),
    "a large top_k": SamplingParams(seed=9, top_k=80, temperature=5.0),
    "top_p": SamplingParams(seed=4, top_p=0.6, temperature=1.3),
    "top_p of top_k": SamplingParams(seed=5, top_k=12, top_p=0.7, temperature=1.5),
    "min_p": SamplingParams(seed=6, min_p=0.2, temperature=2.0),
    "min_p of top_k": SamplingParams(seed=6, min_p=0.2, temperature=2.0, top_k=9),
    # The bias makes tokens of the prompts the most probable ones, so that the penalties decide.
    "penalties": SamplingParams(
        temperature=0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.6,
        logit_bias=LIKELY,
    ),
    "repetition_penalty": SamplingParams(temperature=0, repetition_penalty=1.3, logit_bias=LIKELY),
    "presence_penalty": SamplingParams(temperature=0, presence_penalty=2, logit_bias=LIKELY),
    "frequency_penalty": SamplingParams(temperature=0, frequency_penalty=0.7, logit_bias=LIKELY),
    "negative penalties": SamplingParams(seed=7, repetition_penalty=0.8, frequency_penalty=-0.5),
    "bias": SamplingParams(seed=8, logit_bias={0: 3.0, 99: -100}),
    "no stop token": SamplingParams(temperature=0, min_new_tokens=9, logit_bias={3: 50, 7: 49}),
}


def resolve(params, batch_size, vocabulary_size):
    """Returns `SamplingParams` and seeds of sequences; `params` may be a sampler of KerasHub."""
    backbone = SimpleNamespace(vocabulary_size=vocabulary_size)
    is_sampler = isinstance(params, keras_hub.samplers.Sampler)
    model = SimpleNamespace(sampler=params if is_sampler else None, backbone=backbone)
    return resolve_sampling(model, None if is_sampler else params, batch_size)


def draw_uniform(seed, count):
    return Sequence([1], SamplingParams(), seed, count).uniform(count)


def choose_tokens(params, logits, prompts=PROMPTS, uniform=None):
    """Returns the tokens [B, T] chosen from logits [T, B, vocabulary]."""
    size, tensor = logits.shape[-1], keras.ops.convert_to_tensor
    params, seeds = resolve(params, len(prompts), size)
    features = features_of(params, size)
    arguments = option_arrays(params, [np.array(p) for p in prompts], size)
    arguments = {name: tensor(array) for name, array in arguments.items()}
    if uniform is None:
        uniform = [draw_uniform(seed, len(logits)) for seed in seeds]
        uniform = np.transpose(uniform) if features.is_random else [None] * len(logits)
    stops = tensor(np.tile(np.array([*STOPS, -1], "int32"), (len(prompts), 1)))
    counts = keras.ops.zeros((len(prompts), size), "int32") if features.has_penalties else None
    tokens = []
    for t, each in enumerate(logits):
        count = keras.ops.full((len(prompts),), t, "int32")
        state = DeviceState(None, None, None, count, stops, None)
        numbers = None if uniform[t] is None else tensor(uniform[t])
        token, counts, _ = next_tokens(features, tensor(each), state, numbers, counts, arguments)
        tokens.append(keras.ops.convert_to_numpy(token))
    return np.stack(tokens, axis=1)


def random_logits(seed, steps=STEPS, batch_size=3):
    rng = np.random.default_rng(seed)
    return (2 * rng.normal(size=(steps, batch_size, VOCABULARY))).astype("float32")


def expected_tokens(params, logits, row):
    uniform = numpy_sampling.uniform(params.seed or 0, len(logits))
    generated, margin = [], np.inf
    for t, each in enumerate(logits):
        arguments = params, each[row], uniform[t], PROMPTS[row], list(generated), STOPS
        token, this_margin = numpy_sampling.choose(*arguments)
        generated.append(token)
        margin = min(margin, this_margin)
    assert margin > 1e-6  # well above rounding, else choose another seed
    return generated


@pytest.mark.parametrize("name", CASES)
def test_next_tokens_with_one_option_match_numpy(name):
    """A sampling option has another effect than `SamplingParams` documents."""
    params, logits = CASES[name], random_logits(0)
    for row, found in enumerate(choose_tokens(params, logits)):
        assert found.tolist() == expected_tokens(params, logits, row)


def test_next_tokens_of_a_batch_with_different_options_match_single_sequences():
    """An option of one sequence changes the tokens of its neighbors."""
    logits = random_logits(2, batch_size=len(CASES))
    logits[:] = logits[:, :1]
    prompts = [PROMPTS[0]] * len(CASES)
    tokens = choose_tokens(list(CASES.values()), logits, prompts)
    for found, params in zip(tokens, CASES.values(), strict=True):
        assert found.tolist() == expected_tokens(params, logits, 0)


@pytest.mark.once
@pytest.mark.parametrize(
    ("sampler", "params"),
    [
        (keras_hub.samplers.GreedySampler(), {"temperature": 0}),
        (keras_hub.samplers.RandomSampler(temperature=0.5), {"temperature": 0.5}),
        (keras_hub.samplers.TopKSampler(k=7, temperature=2.0), {"temperature": 2.0, "top_k": 7}),
        (keras_hub.samplers.TopPSampler(p=0.8), {"top_p": 0.8}),
        (keras_hub.samplers.TopPSampler(p=0.8, k=9), {"top_p": 0.8, "top_k": 9}),
    ],
)
def test_sampler_of_keras_hub_is_converted_to_sampling_params(sampler, params):
    assert resolve(sampler, 1, 50)[0] == [SamplingParams(**params)]


@pytest.mark.once
@pytest.mark.parametrize("is_sampler", [True, False])
def test_seed_makes_random_numbers_reproducible(is_sampler):
    """A seed of 0 counts as no seed, or a sampler draws the same numbers in each call."""

    def make():
        return keras_hub.samplers.RandomSampler(seed=0) if is_sampler else SamplingParams(seed=0)

    def draw(params):
        return [draw_uniform(seed, 3).tolist() for seed in resolve(params, 2, 50)[1]]

    params = make()
    first = draw(params)
    assert draw(make()) == first
    assert (draw(params) != first) == is_sampler
    assert (first[0] != first[1]) == is_sampler


def draw_tokens(params, row):
    """Draws a token of each sequence from the same logits, with evenly spaced random numbers."""
    count = len(params)
    uniform = ((np.arange(count) + 0.5) / count).astype("float32")
    return choose_tokens(params, np.tile(row, (1, count, 1)), [[0]] * count, uniform[None])[:, 0]


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("top_k", [0, 40, 64, 70, 2**70])
def test_top_k_and_top_p_of_equal_logits_keep_the_lowest_ids(top_k, top_p):
    """`top_k` or `top_p` keeps too many of equally probable tokens, or those of higher ids."""
    size, count = 250, 1024
    params = SamplingParams(top_k=top_k, top_p=top_p)
    for levels in (1, 5):
        order = np.random.default_rng(levels).permutation(size)
        row = (0.3 * (np.arange(size) % levels))[order].astype("float32")
        tokens = draw_tokens([params] * count, row)
        best = np.argsort(-row, kind="stable")[: top_k or size]
        weights = np.exp(row[best].astype("float64"))
        before = np.cumsum(weights) - weights
        best = best[before < top_p * weights.sum() * (1 - 1e-6)]
        assert {*tokens.tolist()} == {*best.tolist()}


@pytest.mark.once
def test_top_k_above_the_vocabulary_size_keeps_all_tokens():
    """The smaller `top_k` of another sequence applies if a `top_k` is above `MAX_CANDIDATES`."""
    params = [SamplingParams(top_k=70)] * 256 + [SamplingParams(top_k=5)]
    assert {*draw_tokens(params, np.zeros(50, "float32"))[:256].tolist()} == {*range(50)}


def test_new_sampling_option_needs_one_field_and_one_function():
    """An option that is added as in docs/adding.md has no effect, or needs edits elsewhere."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Params(SamplingParams):
        max_distance: float = number(1e30, "a number from 0 to 1e30", lambda v: 0 <= v <= 1e30)

    @option(AFTER_TEMPERATURE, "max_distance")
    def exclude_distant(logits, max_distance):
        distance = keras.ops.max(logits, axis=-1, keepdims=True) - logits
        return keras.ops.where(distance > max_distance[:, None], -np.inf, logits)

    logits = np.linspace(1, 0, 101, dtype="float32")
    for top_k in (0, 40):  # each takes another program
        params = [Params(max_distance=0.205, top_k=top_k), Params(top_k=top_k)]
        tokens = draw_tokens(params * 512, logits)
        assert {*tokens[0::2].tolist()} == {*range(21)}
        assert {*tokens[1::2].tolist()} == {*range(top_k or 101)}
        features = [features_of(p, 101) for p in ([params[0]], [params[1]])]
        assert covers(*features, 101)
        assert not covers(*reversed(features), 101)
    with pytest.raises(ValueError, match="`max_distance` must be a number from 0 to 1e30; got -1"):
        Params(max_distance=-1)


@pytest.mark.once
def test_covers_requires_all_tokens_for_sequences_without_a_limit():
    """`SamplingParams()` runs in a step for `top_k=100`, and loses its less probable tokens."""
    few, every = SamplingParams(top_k=100), SamplingParams()
    known, both = (features_of(params, 1000) for params in ([few], [few, every]))
    needed = features_of([every], 1000)
    assert not covers(known, needed, 1000)
    assert covers(both, needed, 1000)
    assert covers(both, known, 1000)
    assert not covers(needed, known, 1000)


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"temperature": -1}, "`temperature` must be 0, or a number from 1e-6 to 1e6; got -1"),
        ({"temperature": float("nan")}, "`temperature`.*got nan"),
        ({"top_k": 2.5}, "`top_k` must be an integer.*got 2.5"),
        ({"top_p": 0}, "`top_p` must be a number from 1e-6 to 1; got 0"),
        ({"min_p": 2}, "`min_p` must be a number from 0 to 1; got 2"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be .* 1e-6 to 1e6; got 0"),
        ({"presence_penalty": 3}, "`presence_penalty`.*got 3"),
        ({"frequency_penalty": None}, "`frequency_penalty`.*got None"),
        ({"seed": -1}, "`seed` must be an integer from 0"),
        ({"logprobs": True}, "`logprobs` must be an integer.*got True"),
        ({"temperature": 1e-40}, "`temperature`.*got 1e-40"),  # 0 in float32, unlike greedy
        ({"min_new_tokens": -1}, "`min_new_tokens`"),
        ({"min_new_tokens": 2**31}, "`min_new_tokens` must be an integer from 0 to"),
        ({"logit_bias": [1, 2]}, "`logit_bias` must be a dictionary.*got a list"),
        ({"logit_bias": {"a": 1}}, "`logit_bias` must have token ids.*got 'a'"),
        ({"logit_bias": {1: 101}}, "`logit_bias` must have numbers.*got 101 for token 1"),
    ],
)
def test_sampling_params_out_of_range_raise(arguments, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**arguments)


@pytest.mark.once
def test_generate_with_sampling_of_another_length_or_vocabulary_raises(hgrn2):
    size, prompts = hgrn2.backbone.vocabulary_size, pad([[1] * 4] * 2)
    for sampling, words in (
        ({"temperature": 1.0}, "`sampling` must be a `SamplingParams`, or a list"),
        ([SamplingParams()], "one `SamplingParams` for each of the 2 prompts; got 1"),
        (SamplingParams(logit_bias={size: 1.0}), f"`logit_bias` must have .* {size - 1}.*{size}"),
        (SamplingParams(logprobs=size + 1), f"`logprobs` must be at most {size}"),
    ):
        with pytest.raises(ValueError, match=words):
            hgrn2.generate(prompts, stop_token_ids=None, max_new_tokens=1, sampling=sampling)
