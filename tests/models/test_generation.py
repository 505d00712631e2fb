"""Generation with a cache equals generation by repeated forward passes."""

import keras_hub
import numpy as np
import pytest

from keras_recurrent.samplers import BeamSampler
from tests.models import plain_generation
from tests.models.tiny import (
    FAMILIES,
    FEWER_LAYERS,
    NIGHTLY_IF_COMPILED,
    SHARED,
    VOCABULARY,
    tiny_causal_lm,
)

LENGTH = 14
# Rounding moves these models' logits by about 1e-5.
MARGIN = 5e-4


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


def tiny_model(family):
    """The family that runs all samplers has fewer layers where XLA compiles each sampler.

    A TransNormer of one layer with another seed has decisions within `MARGIN`.
    """
    if family != SHARED[0] or not FEWER_LAYERS:
        return tiny_causal_lm(family=family)
    return tiny_causal_lm(5 if family == "transnormer" else 0, family=family, **FEWER_LAYERS)


@pytest.fixture(scope="module")
def model(family):
    return tiny_model(family)


@pytest.fixture(scope="module")
def plain(family):
    """A second, equal model. It is never recompiled, so its forward pass is compiled once."""
    return tiny_model(family)


def ragged(*lengths, seed=4):
    """Returns prompts of these lengths at the left of their sequences, and their mask."""
    rng = np.random.default_rng(seed)
    given = np.arange(LENGTH) < np.array(lengths)[:, None]
    return np.where(given, rng.integers(3, VOCABULARY, given.shape), 0).astype("int32"), given


# One token, and a full sequence, for one family: XLA compiles a program for each.
SHORT, LONG = (1, 4, LENGTH), (5, 9, 6)


SAMPLERS = {
    "greedy": lambda: keras_hub.samplers.GreedySampler(),
    "top_p": lambda: keras_hub.samplers.TopPSampler(p=0.9, k=20, seed=1, temperature=3.0),
}


def generate(model, sampler, prompt, given):
    model.compile(sampler=sampler)
    return model.generate({"token_ids": prompt, "padding_mask": given}, stop_token_ids=None)


# Greedy sampling with all families, top-p with one. A Griffin has states, keys and a window.
EVERY_BACKEND = (SHARED[0], "griffin")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (SHARED[0], "top_p"),
        *(
            pytest.param(name, "greedy", marks=() if name in EVERY_BACKEND else NIGHTLY_IF_COMPILED)
            for name in FAMILIES
        ),
    ],
    indirect=["family"],
    scope="module",
)
def test_sampling_with_cache_equals_sampling_by_forward_passes(family, model, plain, name):
    for lengths in (SHORT, LONG) if (family, name) == (SHARED[0], "greedy") else (LONG,):
        prompt, given = ragged(*lengths)
        generated = generate(model, SAMPLERS[name](), prompt, given)["token_ids"]
        expected, margin = plain_generation.sample(plain, SAMPLERS[name](), prompt, given)
        # Samplers other than greedy compare probabilities.
        assert margin > (MARGIN if name == "greedy" else 1e-6)
        np.testing.assert_array_equal(generated, expected)
        np.testing.assert_array_equal(generated[given], prompt[given])


@pytest.mark.once
@pytest.mark.parametrize("family", SHARED[:1], indirect=True, scope="module")
def test_beam_search_with_cache_equals_beam_search_by_forward_passes(model, plain):
    """A sequence depends on another one, or a beam continues from the cache of another beam."""
    stop_ids = 7, 11
    model.compile(sampler=BeamSampler(3, return_all_beams=True))
    prompt, given = ragged(*LONG, seed=5)
    output = model.generate({"token_ids": prompt, "padding_mask": given}, stop_token_ids=stop_ids)
    expected, margin = plain_generation.beam(plain, 3, prompt, given, stop_ids)
    assert margin > MARGIN
    assert output.token_ids == [[tokens for _, tokens in row] for row in expected]
    for scores, row in zip(output.scores, expected, strict=True):
        np.testing.assert_allclose(scores, [score for score, _ in row], atol=1e-4)


@pytest.mark.parametrize("family", SHARED[:1])
def test_int8_generation_with_cache_equals_forward_passes_of_the_int8_model(family):
    model = tiny_causal_lm(family=family, num_layers=1)
    model.quantize("int8")
    prompt, given = ragged(*LONG)
    expected, margin = plain_generation.sample(model, SAMPLERS["greedy"](), prompt, given)
    assert margin > 10 * MARGIN  # an activation between two 8-bit values may round either way
    np.testing.assert_array_equal(generate(model, "greedy", prompt, given)["token_ids"], expected)
