"""Cached generation writes what plain repeated forward passes write."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.samplers import BeamSampler
from tests.models import plain_generation
from tests.models.tiny import (
    FAMILIES,
    FEWER_LAYERS,
    HYBRID,
    NIGHTLY_IF_COMPILED,
    SHARED,
    VOCABULARY,
    forward,
    shared_by_families,
    tiny_causal_lm,
)

LENGTH = 14
# Rounding moves these models' logits by about 1e-5.
MARGIN = 5e-4


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


def tiny_model(family):
    """The family that meets all samplers has fewer layers where XLA compiles each of them.

    TransNormer of one layer decides within `MARGIN` with other seeds.
    """
    if family == "hgrn2 hybrid":
        return tiny_causal_lm(family="hgrn2", **HYBRID)
    if family not in SHARED or not FEWER_LAYERS:
        return tiny_causal_lm(family=family)
    return tiny_causal_lm(5 if family == "transnormer" else 0, family=family, **FEWER_LAYERS)


@pytest.fixture(scope="module")
def model(family):
    return tiny_model(family)


@pytest.fixture(scope="module")
def plain(family):
    """The same model, never compiled anew, so that its forward pass is compiled once."""
    return tiny_model(family)


def ragged(*lengths, seed=4):
    """Prompts of these lengths at the left of their rows, and where they are."""
    rng = np.random.default_rng(seed)
    given = np.arange(LENGTH) < np.array(lengths)[:, None]
    return np.where(given, rng.integers(3, VOCABULARY, given.shape), 0).astype("int32"), given


PROMPTS = {"one token, and a full row": (1, 4, LENGTH), "longer": (5, 9, 6)}


def prompt_lengths(family, name=None):
    """All of them for one family; each makes XLA compile every sampler anew.

    How a prompt is read does not depend on how a token is drawn from probabilities.
    """
    every = family == SHARED[0] and name not in ("top_k", "top_p", "random")
    return list(PROMPTS.values()) if every else [PROMPTS["longer"]]


def every_sampler(names):
    """Every sampler with one family, on torch with all; greedy sampling with all everywhere.

    A hybrid of HGRN2, whose cache has states and keys, samples greedily.
    """
    return pytest.mark.parametrize(
        ("family", "name"),
        [(f, n) for f in FAMILIES for n in names if f in SHARED or n == "greedy"]
        + [pytest.param("hgrn2 hybrid", "greedy", marks=NIGHTLY_IF_COMPILED)],
        indirect=["family"],
        scope="module",
    )


beyond_sampling = pytest.mark.parametrize("family", SHARED, indirect=True, scope="module")

SAMPLERS = {
    "greedy": lambda: keras_hub.samplers.GreedySampler(),
    "top_k": lambda: keras_hub.samplers.TopKSampler(k=5, seed=1, temperature=3.0),
    "top_p": lambda: keras_hub.samplers.TopPSampler(p=0.9, k=20, seed=1, temperature=3.0),
    "random": lambda: keras_hub.samplers.RandomSampler(seed=1, temperature=3.0),
}


def generate(model, sampler, prompt, given, stop_ids=None):
    model.compile(sampler=sampler)
    x = {"token_ids": prompt, "padding_mask": given}
    return model.generate(x, stop_token_ids=stop_ids)


@every_sampler(SAMPLERS)
def test_samplers_with_cache_write_what_they_write_without(family, model, plain, name):
    for lengths in prompt_lengths(family, name):
        prompt, given = ragged(*lengths)
        written = generate(model, SAMPLERS[name](), prompt, given)["token_ids"]
        wanted, margin = plain_generation.sample(plain, SAMPLERS[name](), prompt, given)
        assert margin > (MARGIN if name == "greedy" else 1e-6)  # the others draw by probabilities
        np.testing.assert_array_equal(written, wanted)
        np.testing.assert_array_equal(written[given], prompt[given])


@beyond_sampling
def test_beam_search_with_cache_writes_what_it_writes_without(family, model, plain):
    """Fails if a row depends on its neighbors, or a beam continues from the cache of another."""
    stop_ids = 7, 11
    model.compile(sampler=BeamSampler(3, return_all_beams=True))
    for lengths in prompt_lengths(family):
        prompt, given = ragged(*lengths, seed=5)
        x = {"token_ids": prompt, "padding_mask": given}
        output = model.generate(x, stop_token_ids=stop_ids)
        wanted, margin = plain_generation.beam(plain, 3, prompt, given, stop_ids)
        assert margin > MARGIN
        assert output.token_ids == [[tokens for _, tokens in row] for row in wanted]
        for scores, row in zip(output.scores, wanted, strict=True):
            np.testing.assert_allclose(scores, [score for score, _ in row], atol=1e-4)


@beyond_sampling
def test_generation_ends_where_every_row_has_stopped(family, model, plain):
    prompt, given = ragged(*PROMPTS["longer"])
    free, _ = plain_generation.sample(plain, SAMPLERS["greedy"](), prompt, given)
    stop_ids = (int(free[0, 6]), int(free[1, 10]), int(free[2, 8]))
    written = generate(model, "greedy", prompt, given, stop_ids)
    wanted, _ = plain_generation.sample(plain, SAMPLERS["greedy"](), prompt, given, stop_ids)
    np.testing.assert_array_equal(written["token_ids"], wanted)
    for row in range(3):
        new = np.isin(wanted[row], stop_ids) & ~given[row]
        upto = np.argmax(new) + 1 if new.any() else LENGTH
        np.testing.assert_array_equal(written["padding_mask"][row], np.arange(LENGTH) < upto)
    assert (wanted[:, -1] == 0).any()  # it did end early


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
@pytest.mark.filterwarnings("ignore:.*The use of `x.T` on tensors:UserWarning")
@shared_by_families
def test_a_quantized_model_writes_what_its_own_plain_passes_write(family):
    model = tiny_causal_lm(family=family, num_layers=1)
    model.quantize("int8")
    prompt, given = ragged(*PROMPTS["longer"])
    wanted, margin = plain_generation.sample(model, SAMPLERS["greedy"](), prompt, given)
    assert margin > 10 * MARGIN  # activations round to 8 bits, either way where they are between
    np.testing.assert_array_equal(generate(model, "greedy", prompt, given)["token_ids"], wanted)


@beyond_sampling
def test_the_cache_has_one_size_and_takes_tokens_in_any_portions(model, plain):
    prompt, _ = ragged(LENGTH, LENGTH)
    wanted = forward(plain, prompt, np.ones_like(prompt))
    cache = model.backbone.get_initial_state(2, max_length=LENGTH)
    shapes = keras.tree.map_structure(lambda array: tuple(array.shape), cache)
    logits = []
    for begin, end in [(0, 1), (1, 2), (2, 9), (9, LENGTH)]:
        some, hidden_states, cache = model.call_with_cache(prompt[:, begin:end], cache)
        assert tuple(hidden_states.shape) == (2, end - begin, 16)
        assert keras.tree.map_structure(lambda array: tuple(array.shape), cache) == shapes
        logits.append(keras.ops.convert_to_numpy(some))
    np.testing.assert_allclose(np.concatenate(logits, axis=1), wanted, rtol=1e-4, atol=1e-4)
