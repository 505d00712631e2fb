"""Cached generation writes what plain repeated forward passes write."""

import keras_hub
import numpy as np
import pytest

from tests.models import plain_generation
from tests.models.tiny import VOCABULARY, tiny_causal_lm

LENGTH = 14
# Rounding moves these models' logits by less than 1e-4.
MARGIN = 1e-3


@pytest.fixture(scope="module")
def model():
    return tiny_causal_lm()


@pytest.fixture(scope="module")
def plain():
    """The same model, never compiled anew, so that its forward pass is compiled once."""
    return tiny_causal_lm()


def ragged(*lengths, seed=4):
    """Prompts of these lengths at the left of their rows, and where they are."""
    rng = np.random.default_rng(seed)
    given = np.arange(LENGTH) < np.array(lengths)[:, None]
    return np.where(given, rng.integers(3, VOCABULARY, given.shape), 0).astype("int32"), given


PROMPTS = {"one token, and a full row": (1, 4, LENGTH), "longer": (5, 9, 6)}

SAMPLERS = {
    "greedy": lambda: keras_hub.samplers.GreedySampler(),
    "top_k of 1": lambda: keras_hub.samplers.TopKSampler(k=1, seed=1),
    "top_k": lambda: keras_hub.samplers.TopKSampler(k=5, seed=1, temperature=3.0),
    "top_p of little": lambda: keras_hub.samplers.TopPSampler(p=1e-6, seed=1),
    "top_p": lambda: keras_hub.samplers.TopPSampler(p=0.9, k=20, seed=1, temperature=3.0),
    "random": lambda: keras_hub.samplers.RandomSampler(seed=1, temperature=3.0),
}


def generate(model, sampler, prompt, given, stop_ids=None):
    model.compile(sampler=sampler)
    x = {"token_ids": prompt, "padding_mask": given}
    return model.generate(x, stop_token_ids=stop_ids)


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_with_cache_write_what_they_write_without(model, plain, name):
    for lengths in PROMPTS.values():
        prompt, given = ragged(*lengths)
        written = generate(model, SAMPLERS[name](), prompt, given)["token_ids"]
        wanted, margin = plain_generation.sample(plain, SAMPLERS[name](), prompt, given)
        assert margin > MARGIN
        np.testing.assert_array_equal(written, wanted)
        np.testing.assert_array_equal(written[given], prompt[given])


def test_beam_search_with_cache_writes_what_it_writes_without(model, plain):
    for lengths in PROMPTS.values():
        prompt, given = ragged(*lengths)
        sampler = keras_hub.samplers.BeamSampler(num_beams=3)
        written = generate(model, sampler, prompt, given)["token_ids"]
        wanted, margin = plain_generation.beam(plain, 3, prompt, given)
        assert margin > MARGIN
        np.testing.assert_array_equal(written, wanted)


def test_contrastive_search_with_cache_writes_what_it_writes_without(model, plain):
    for lengths in PROMPTS.values():
        prompt, given = ragged(*lengths)
        sampler = keras_hub.samplers.ContrastiveSampler(k=4, alpha=0.6)
        written = generate(model, sampler, prompt, given)["token_ids"]
        wanted, margin = plain_generation.contrastive(plain, 4, 0.6, prompt, given)
        assert margin > MARGIN
        np.testing.assert_array_equal(written, wanted)
