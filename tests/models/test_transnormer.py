"""TransNormerLLM: its options, and sequences longer than those of training."""

import keras
import numpy as np
import pytest

from keras_recurrent.models import TransNormerBackbone
from tests.layers.table import assert_rejects
from tests.models import reference
from tests.models.tiny import FAMILIES, VOCABULARY, forward, tiny_causal_lm

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    "options", [{"decay_schedule": "paper"}, {"tie_word_embeddings": True}, {"num_layers": 1}]
)
def test_options_match_the_reference(options):
    token_ids = np.random.default_rng(0).integers(3, VOCABULARY, (3, 11)).astype("int32")
    model = tiny_causal_lm(family="transnormer", **options)
    logits = forward(model, token_ids, np.ones_like(token_ids))
    np.testing.assert_allclose(logits, reference.logits(model, token_ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("decay_schedule", "slopes", 'must be "checkpoints", "alibi" or'),
        *((name, 0, "must be an integer, at least 1; got 0") for name in ("num_heads", "head_dim")),
    ],
)
def test_backbone_rejects_invalid_arguments(name, value, match):
    sizes = FAMILIES["transnormer"].sizes
    assert_rejects(f"`{name}` {match}", TransNormerBackbone, **{**sizes, name: value})


def test_model_trained_on_256_tokens_predicts_4096():
    """Counting modulo 8, learned on short sequences, gets worse at later positions."""
    model = tiny_causal_lm(family="transnormer", vocabulary_size=8)
    model.compile(keras.optimizers.Adam(0.01), model.loss, weighted_metrics=[])
    counting = (np.arange(4097) + np.arange(4)[:, None]) % 8

    def inputs(length):
        return {
            "token_ids": counting[:, :length].astype("int32"),
            "padding_mask": np.ones((4, length), "int32"),
        }

    losses = [model.train_on_batch(inputs(256), counting[:, 1:257]) for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0]
    logits = keras.ops.convert_to_numpy(model.predict_on_batch(inputs(4096)))
    assert np.isfinite(logits).all()
    right = logits.argmax(-1) == counting[:, 1:4097]
    assert right[:, 256:].mean() > 0.99
