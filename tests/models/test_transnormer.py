"""TransNormerLLM with sequences longer than those of training."""

import keras
import numpy as np
import pytest

from tests.models.tiny import tiny_causal_lm

pytestmark = pytest.mark.once


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
