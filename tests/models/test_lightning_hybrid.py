"""HypeNet and MiniCPM-SALA: their sizes, their options, and the limit of dense attention."""

import re

import keras
import numpy as np
import pytest

from keras_recurrent.models import LightningHybridBackbone, LightningHybridCausalLM
from tests.models import numpy_lightning_hybrid
from tests.models.tiny import FAMILIES, VOCABULARY, forward, tiny_causal_lm

pytestmark = pytest.mark.once

# D, depth, blocks of attention, heads, their keys, channels, SwiGLU, vocabulary, its matrices.
SIZES = {
    "hypenet_tiny": (128, 4, 1, 4, 2, 32, 352, 259, 1),
    "hypenet_2b": (2048, 28, 7, 16, 8, 128, 6144, 151_936, 1),
    "hypenet_5b": (2560, 36, 9, 32, 8, 128, 9728, 151_936, 1),
    "hypenet_9b": (4096, 36, 9, 32, 8, 128, 12_288, 151_936, 1),
    "minicpm_sala": (4096, 32, 8, 32, 2, 128, 16_384, 73_448, 2),
}


@pytest.mark.parametrize("name", SIZES)
def test_parameters_follow_from_the_sizes(name):
    d, depth, attention, heads, keys, size, inner, vocabulary, matrices = SIZES[name]
    norms = 0 if name == "minicpm_sala" else 2 * size
    wanted = matrices * vocabulary * d + d + depth * (2 * d + 3 * d * inner)
    wanted += attention * (d * size * (3 * heads + 2 * keys) + norms)
    wanted += (depth - attention) * (5 * d * size * heads + size * (heads + 2))
    assert LightningHybridCausalLM.presets[name]["metadata"]["params"] == wanted
    with keras.StatelessScope(initialize_variables=False):
        backbone = LightningHybridBackbone.from_preset(name, load_weights=False)
        count = sum(int(np.prod(weight.shape)) for weight in backbone.weights)
    # Keras would still give them values at the end of the next scope.
    keras.utils.clear_session(free_memory=False)
    assert count == wanted


def test_scales_of_hypenet():
    """The other family's options: none is used by MiniCPM-SALA, whose sizes `tiny` has."""
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
    wanted = numpy_lightning_hybrid.logits(model, token_ids)
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)


def test_bad_arguments():
    sizes = FAMILIES["lightning_hybrid"].sizes
    for value, words in {
        (): "a pattern of 'lightning_attention' and 'global_attention'; got ()",
        ("attention",): "got ('attention',)",
    }.items():
        with pytest.raises(ValueError, match=f"`block_types` must be .*{re.escape(words[-20:])}"):
            LightningHybridBackbone(**{**sizes, "block_types": value})
    for name in ("num_query_heads", "num_lightning_heads", "head_dim", "dense_length"):
        with pytest.raises(ValueError, match="must be an integer, at least 1; got 0"):
            LightningHybridBackbone(**{**sizes, name: 0})
    for name in ("embedding_scale", "residual_scale", "output_scale"):
        with pytest.raises(ValueError, match=f"`{name}` must be a finite number above 0"):
            LightningHybridBackbone(**{**sizes, name: -1.0})


def test_sequences_beyond_dense_attention_are_refused():
    """Dense attention in place of sparse attention would be wrong without a word.

    A call of the functional model runs its graph, not `hidden_states`, and a cache's capacity is
    rounded up, here to 64 tokens.
    """
    model = tiny_causal_lm(family="lightning_hybrid", dense_length=16, num_layers=2)
    model.compile(loss=model.loss, sampler="greedy")

    def prompt(length, real=4):
        mask = np.broadcast_to(np.arange(length) < real, (1, length))
        return {"token_ids": np.where(mask, 5, 0), "padding_mask": mask.astype("int32")}

    words = r"at most 15 tokens.*got {}\. .*block-sparse from 16 .*`dense_length=None`"
    for call in (
        lambda n: model.predict_on_batch(prompt(n)),
        lambda n: model.train_on_batch(prompt(n), np.ones((1, n), "int32")),
        lambda n: model.generate(prompt(n), stop_token_ids=None),
        lambda n: next(iter(model.stream(prompt(4), max_length=n, stop_token_ids=None))),
        lambda n: model.prefill(prompt(4), max_length=n),
        lambda n: model.backbone.get_initial_state(1, n),
    ):
        call(15)
        with pytest.raises(ValueError, match=words.format(16)):
            call(16)
    cache = model.prefill(prompt(4), max_length=15)
    with pytest.raises(ValueError, match="`max_length` of 15"):
        model.generate(prompt(4), max_length=13, cache=cache, stop_token_ids=None)
