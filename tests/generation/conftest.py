"""Model of tests about code around the layers."""

import pytest

from tests.models.tiny import tiny_causal_lm


@pytest.fixture
def hgrn2():
    """A language model of one layer without a preprocessor, compiled for greedy sampling."""
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    model.compile(sampler="greedy")
    return model
