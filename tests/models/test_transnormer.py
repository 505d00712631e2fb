"""TransNormerLLM: its sizes, its options, and sequences longer than those trained on."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.models import (
    TransNormerBackbone,
    TransNormerCausalLM,
    TransNormerCausalLMPreprocessor,
    TransNormerTokenizer,
)
from tests.models import numpy_transnormer
from tests.models.tiny import FAMILIES, VOCABULARY, forward, tiny_causal_lm

pytestmark = pytest.mark.once

# D, depth, SGLU, vocabulary, matrices of the vocabulary.
SIZES = {
    "tnl_tiny": (128, 4, 352, 259, 2),
    "tnl_44m": (512, 6, 1152, 50_265, 1),
    "tnl_385m": (1024, 24, 2816, 64_000, 2),
    "tnl_1b": (2048, 16, 5632, 64_000, 2),
    "tnl_7b": (4096, 30, 11_264, 64_000, 2),
    "tnl_15b": (5120, 42, 13_824, 100_000, 2),
}


def parameters(name):
    """Counted off the paper: section 3.1. The norms have none, heads together are as wide as D."""
    d, depth, sglu, vocabulary, matrices = SIZES[name]
    attention, positions = 5 * d * d, d
    return matrices * vocabulary * d + depth * (attention + 3 * d * sglu) + positions


@pytest.mark.once
@pytest.mark.parametrize("name", SIZES)
def test_parameters_follow_from_the_sizes_in_the_paper(name):
    listed = TransNormerCausalLM.presets[name]["metadata"]["params"]
    assert listed == parameters(name)
    with keras.StatelessScope(initialize_variables=False):
        backbone = TransNormerBackbone.from_preset(name, load_weights=False)
        count = sum(int(np.prod(weight.shape)) for weight in backbone.weights)
        assert backbone.num_heads * backbone.head_dim == backbone.hidden_dim
    # Keras would still give them values at the end of the next scope.
    keras.utils.clear_session(free_memory=False)
    assert count == listed


@pytest.mark.once
def test_names_are_listed_everywhere():
    for cls in (
        *(TransNormerCausalLM, TransNormerBackbone),
        *(TransNormerTokenizer, TransNormerCausalLMPreprocessor),
    ):
        assert list(cls.presets) == list(SIZES)
    assert set(SIZES) < set(keras_hub.models.CausalLM.presets)
    rows = {n: p["metadata"]["description"] for n, p in TransNormerCausalLM.presets.items()}
    assert "hf://OpenNLPLab/TransNormerLLM-7B" in rows["tnl_7b"]
    assert "no weights" in rows["tnl_15b"]


def test_a_name_gives_the_same_model_through_kerashub():
    ours = TransNormerCausalLM.from_preset("tnl_tiny", num_layers=1)
    theirs = keras_hub.models.CausalLM.from_preset("tnl_tiny", num_layers=1)
    assert type(theirs) is TransNormerCausalLM
    assert theirs.backbone.get_config() | {"name": ""} == ours.backbone.get_config() | {"name": ""}
    assert type(theirs.preprocessor.tokenizer) is TransNormerTokenizer
    assert theirs.preprocessor.sequence_length == ours.preprocessor.sequence_length == 256


def test_the_decays_of_the_paper_and_tied_embeddings():
    token_ids = np.random.default_rng(0).integers(3, VOCABULARY, (3, 11)).astype("int32")
    for kwargs in ({"decay_schedule": "paper"}, {"tie_word_embeddings": True}, {"num_layers": 1}):
        model = tiny_causal_lm(family="transnormer", **kwargs)
        logits = forward(model, token_ids, np.ones_like(token_ids))
        wanted = numpy_transnormer.logits(model, token_ids)
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.once
def test_bad_arguments():
    sizes = FAMILIES["transnormer"].sizes
    with pytest.raises(ValueError, match='`decay_schedule` must be "checkpoints", "alibi" or'):
        TransNormerBackbone(**sizes, decay_schedule="slopes")
    for name in ("num_heads", "head_dim", "intermediate_dim"):
        with pytest.raises(ValueError, match=f"`{name}` must be an integer, at least 1; got 0"):
            TransNormerBackbone(**{**sizes, name: 0})


@pytest.mark.once
def test_sixteen_times_the_length_of_training():
    """Learned on rows of 256 tokens, the counting goes on, and gets no worse, up to 4,096."""
    model = tiny_causal_lm(family="transnormer", vocabulary_size=8)
    model.compile(keras.optimizers.Adam(0.01), model.loss, weighted_metrics=[])
    counting = np.arange(4097)[None] % 8 + np.zeros((4, 1), "int64")
    counting = (counting + np.arange(4)[:, None]) % 8

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
