"""Sequences longer than those of training: extrapolation, and the limit of dense attention."""

import numpy as np
import pytest

from tests.layers.table import assert_rejects
from tests.models.tiny import tiny_causal_lm

pytestmark = pytest.mark.once


def test_sequences_beyond_dense_attention_are_rejected():
    """Dense attention silently replaces the published sparse attention.

    A call of the functional model runs its graph, not `hidden_states`, and the capacity of a cache
    is rounded up, here to 64 tokens.
    """
    model = tiny_causal_lm(family="lightning_hybrid", dense_length=16, num_layers=2)
    model.compile(loss=model.loss, sampler="greedy")

    def prompt(length, real=4):
        mask = np.broadcast_to(np.arange(length) < real, (1, length))
        return {"token_ids": np.where(mask, 5, 0), "padding_mask": mask.astype("int32")}

    match = r"at most 15 tokens.*got {}\. .*block-sparse from 16 .*`dense_length=None`"
    for call in (
        lambda n: model.predict_on_batch(prompt(n)),
        lambda n: model.train_on_batch(prompt(n), np.ones((1, n), "int32")),
        lambda n: model.generate(prompt(n), stop_token_ids=None),
        lambda n: next(iter(model.stream(prompt(4), max_length=n, stop_token_ids=None))),
        lambda n: model.prefill(prompt(4), max_length=n),
        lambda n: model.backbone.get_initial_state(1, n),
    ):
        call(15)
        assert_rejects(match.format(16), call, 16)
    cache = model.prefill(prompt(4), max_length=15)
    arguments = {"max_length": 13, "cache": cache, "stop_token_ids": None}
    assert_rejects("`max_length` of 15", model.generate, prompt(4), **arguments)
