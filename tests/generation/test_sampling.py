"""Tokens chosen by `SamplingParams`, compared with a loop in NumPy float64."""

import dataclasses
from types import SimpleNamespace

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.generation.device_state import DeviceState
from keras_recurrent.generation.samplers import resolve_sampling
from keras_recurrent.generation.sampling import (
    AFTER_TEMPERATURE,
    covers,
    features_of,
    next_tokens,
    option,
    option_arrays,
)
from keras_recurrent.generation.sampling_params import number
from keras_recurrent.generation.sequence import Sequence
from keras_recurrent.models import SamplingParams
from tests.generation import numpy_sampling
from tests.models.tiny import tiny_causal_lm

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
    "min_p": SamplingParams(seed=6, min_p=0.2, temperature=1.5),
    # The bias makes tokens of the prompts the most probable ones, so that the penalties decide.
    "penalties": SamplingParams(
        temperature=0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.6,
        logit_bias=LIKELY,
    ),
    "repetition penalty": SamplingParams(temperature=0, repetition_penalty=1.3, logit_bias=LIKELY),
    "presence penalty": SamplingParams(temperature=0, presence_penalty=2, logit_bias=LIKELY),
    "frequency penalty": SamplingParams(temperature=0, frequency_penalty=0.7, logit_bias=LIKELY),
    "negative penalties": SamplingParams(seed=7, repetition_penalty=0.8, frequency_penalty=-0.5),
    "bias": SamplingParams(seed=8, logit_bias={0: 3.0, 99: -100}),
    "no stop token": SamplingParams(temperature=0, min_new_tokens=9, logit_bias={3: 50, 7: 49}),
}


def resolved(params, batch_size, vocabulary_size):
    """`SamplingParams` and seeds of sequences; `params` may be a sampler of KerasHub."""
    backbone = SimpleNamespace(vocabulary_size=vocabulary_size)
    is_sampler = isinstance(params, keras_hub.samplers.Sampler)
    model = SimpleNamespace(sampler=params if is_sampler else None, backbone=backbone)
    return resolve_sampling(model, None if is_sampler else params, batch_size)


def uniform_numbers(seed, count):
    return Sequence([1], SamplingParams(), seed, count).uniform(count)


def chosen(params, logits, prompts=PROMPTS, uniform=None):
    """Tokens [B, T] after logits [T, B, vocabulary]."""
    size, tensor = logits.shape[-1], keras.ops.convert_to_tensor
    params, seeds = resolved(params, len(prompts), size)
    features = features_of(params, size)
    arguments = option_arrays(params, [np.array(p) for p in prompts], size)
    arguments = {name: tensor(array) for name, array in arguments.items()}
    if uniform is None:
        uniform = [uniform_numbers(seed, len(logits)) for seed in seeds]
        uniform = np.transpose(uniform) if features.is_random else [None] * len(logits)
    stops = tensor(np.tile(np.array([*STOPS, -1], "int32"), (len(prompts), 1)))
    counts = keras.ops.zeros((len(prompts), size), "int32") if features.has_penalties else None
    tokens = []
    for t, each in enumerate(logits):
        count = keras.ops.full((len(prompts),), t, "int32")
        state = DeviceState(None, None, None, count, stops)
        numbers = None if uniform[t] is None else tensor(uniform[t])
        token, counts, _ = next_tokens(features, tensor(each), state, numbers, counts, arguments)
        tokens.append(keras.ops.convert_to_numpy(token))
    return np.stack(tokens, axis=1)


def logits_of(seed, steps=STEPS, batch_size=3):
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
def test_tokens_are_those_of_numpy(name):
    """Each option alone, which takes a smaller program than all of them."""
    params, logits = CASES[name], logits_of(0)
    for row, found in enumerate(chosen(params, logits)):
        assert found.tolist() == expected_tokens(params, logits, row)


def test_rows_of_different_options_are_those_of_each_alone():
    """An option of one sequence must not change the tokens of its neighbors."""
    logits = logits_of(1, batch_size=len(CASES))
    logits[:] = logits[:, :1]
    prompts = [PROMPTS[0]] * len(CASES)
    tokens = chosen(list(CASES.values()), logits, prompts)
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
def test_samplers_of_keras_hub(sampler, params):
    assert resolved(sampler, 1, 50)[0] == [SamplingParams(**params)]


@pytest.mark.once
def test_sampling_params_with_seed_zero_are_reproducible():
    """A seed of 0 counts as no seed."""
    seeds = [resolved(SamplingParams(seed=seed), 1, 50)[1][0] for seed in (0, 0, None)]
    first, again, other = (uniform_numbers(seed, 3).tolist() for seed in seeds)
    assert first == again != other


@pytest.mark.once
def test_a_sampler_of_keras_hub_continues_its_random_numbers():
    """Two calls draw other numbers; a new sampler with the seed draws those of the first."""

    def numbers(sampler):
        _, seeds = resolved(sampler, 2, 50)
        return [uniform_numbers(seed, 3).tolist() for seed in seeds]

    sampler, again = (keras_hub.samplers.RandomSampler(seed=3) for _ in range(2))
    first, second = numbers(sampler), numbers(sampler)
    assert first != second
    assert first[0] != first[1]
    assert numbers(again) == first


def drawn(params, row):
    """One token of each sequence for the same logits, from evenly spaced random numbers."""
    count = len(params)
    uniform = ((np.arange(count) + 0.5) / count).astype("float32")
    return chosen(params, np.tile(row, (1, count, 1)), [[0]] * count, uniform[None])[:, 0]


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("top_k", [0, 10, 40, 64, 70, 199, 2**31, 2**70])
def test_equal_logits_are_kept_by_id(top_k, top_p):
    """`top_k` or `top_p` keeps too many of equally probable tokens, or those of higher ids."""
    size, count = 250, 1024
    params = SamplingParams(top_k=top_k, top_p=top_p)
    for levels in (1, 5):
        order = np.random.default_rng(levels).permutation(size)
        row = (0.3 * (np.arange(size) % levels))[order].astype("float32")
        tokens = drawn([params] * count, row)
        best = np.argsort(-row, kind="stable")[: top_k or size]
        weights = np.exp(row[best].astype("float64"))
        before = np.cumsum(weights) - weights
        best = best[before < top_p * weights.sum() * (1 - 1e-6)]
        assert {*tokens.tolist()} == {*best.tolist()}


@pytest.mark.once
def test_top_k_above_a_small_vocabulary_keeps_all_tokens():
    """A neighbor's `top_k` cuts the tokens of a sequence whose own is above 64."""
    params = [SamplingParams(top_k=70)] * 256 + [SamplingParams(top_k=5)]
    assert {*drawn(params, np.zeros(50, "float32"))[:256].tolist()} == {*range(50)}


def test_a_new_option_is_one_field_and_one_function():
    """An option that docs/adding.md describes has no effect, or needs edits elsewhere."""

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
        tokens = drawn(params * 512, logits)
        assert {*tokens[0::2].tolist()} == {*range(21)}
        assert {*tokens[1::2].tolist()} == {*range(top_k or 101)}
        features = [features_of(p, 101) for p in ([params[0]], [params[1]])]
        assert covers(*features, 101)
        assert not covers(*reversed(features), 101)
    with pytest.raises(ValueError, match="`max_distance` must be a number from 0 to 1e30; got -1"):
        Params(max_distance=-1)


@pytest.mark.once
def test_features_that_keep_all_tokens_are_not_covered_by_sorted_ones():
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
def test_options_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**arguments)


@pytest.mark.once
def test_options_that_do_not_fit_the_call():
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    size = model.backbone.vocabulary_size
    prompt = {"token_ids": np.ones((2, 4), "int32"), "padding_mask": np.ones((2, 4), bool)}

    def generate(sampling):
        arguments = {"stop_token_ids": None, "max_new_tokens": 1}
        model.generate(prompt, sampling=sampling, **arguments)

    with pytest.raises(ValueError, match="`sampling` must be a `SamplingParams`, or a list"):
        generate({"temperature": 1.0})
    with pytest.raises(ValueError, match=r"one `SamplingParams` for each of the 2 prompts; got 1"):
        generate([SamplingParams()])
    with pytest.raises(ValueError, match=rf"`logit_bias` must have .* {size - 1}.*got {size}"):
        generate(SamplingParams(logit_bias={size: 1.0}))
    with pytest.raises(ValueError, match=rf"`logprobs` must be at most {size}"):
        generate(SamplingParams(logprobs=size + 1))
