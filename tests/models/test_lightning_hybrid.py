"""HypeNet and MiniCPM-SALA: their options, and the limit of dense attention."""

import numpy as np
import pytest

from keras_recurrent.models import LightningHybridBackbone
from tests.layers.table import assert_rejects
from tests.models import reference
from tests.models.tiny import FAMILIES, VOCABULARY, forward, tiny_causal_lm

pytestmark = pytest.mark.once


def test_options_of_hypenet_match_the_reference():
    """The row of `FAMILIES` has the options of MiniCPM-SALA alone."""
    token_ids = np.random.default_rng(0).integers(3, VOCABULARY, (3, 11)).astype("int32")
    options = {
        "use_qk_norm": True,
        "attention_logit_scaling": 2.5,
        "embedding_scale": None,
        "residual_scale": None,
        "output_scale": None,
        "tie_word_embeddings": True,
    }
    model = tiny_causal_lm(family="lightning_hybrid", **options)
    logits = forward(model, token_ids, np.ones_like(token_ids))
    np.testing.assert_allclose(logits, reference.logits(model, token_ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        (
            "block_types",
            (),
            r"`block_types` must be a pattern of 'lightning_attention' and 'global_attention'; "
            r"got \(\)",
        ),
        ("block_types", ("attention",), r"`block_types` must be .*got \('attention',\)"),
        *(
            (name, 0, "must be an integer, at least 1; got 0")
            for name in ("num_query_heads", "num_lightning_heads", "head_dim", "dense_length")
        ),
        *(
            (name, -1.0, f"`{name}` must be a finite number above 0")
            for name in ("embedding_scale", "residual_scale", "output_scale")
        ),
    ],
)
def test_backbone_rejects_invalid_arguments(name, value, match):
    sizes = FAMILIES["lightning_hybrid"].sizes
    assert_rejects(match, LightningHybridBackbone, **{**sizes, name: value})


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
