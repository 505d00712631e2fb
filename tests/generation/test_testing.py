"""The checks for any language model: they pass where it is right, and see what is wrong."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent import testing
from keras_recurrent.models import GenerationCache
from tests.models.tiny import (
    SHARED,
    VOCABULARY,
    draw,
    set_weights,
    shared_by_families,
    tiny_causal_lm,
)

ROWS = [[5, 6, 7, 8], [3, 4]]
CHECKS = [getattr(testing, name) for name in testing.__all__ if name.startswith("assert")]
FAMILY = SHARED[0]


@pytest.mark.once
@shared_by_families
def test_our_models_are_right(family):
    model = tiny_causal_lm(family=family)
    for check in CHECKS:
        found = check(model, ROWS, new_tokens=3)
        assert found.decisions == found.clear == 8
    assert type(model.sampler).__name__ == "TopKSampler"


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
@pytest.mark.filterwarnings("ignore:.*The use of `x.T` on tensors:UserWarning")
@pytest.mark.parametrize(
    "how", ["bfloat16", *(pytest.param(of, marks=pytest.mark.once) for of in ("int8", "int4"))]
)
def test_narrow_numbers(how):
    model = tiny_causal_lm(family="hgrn2", dtype="bfloat16" if how == "bfloat16" else "float32")
    if how != "bfloat16":
        model.quantize(how)
    # Where steps are compiled or maps quantized, each takes most of a minute: one shows it there.
    quick = how == "bfloat16" and keras.config.backend() == "torch"
    for check in CHECKS if quick else CHECKS[:1]:
        assert check(model, ROWS, new_tokens=3).clear


def hub_model():
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=24,
    )
    set_weights(backbone, 0)
    return keras_hub.models.LlamaCausalLM(backbone)


@pytest.mark.once
def test_models_of_keras_hub():
    for check in CHECKS:
        assert check(hub_model(), ROWS, new_tokens=3).clear > 4


@pytest.mark.once
def test_a_model_that_takes_positions():
    backbone = keras_hub.models.Gemma4Backbone(
        vocabulary_size=VOCABULARY,
        image_size=16,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=24,
        head_dim=8,
    )
    rng = np.random.default_rng(0)
    for weight in backbone.trainable_weights:
        if len(weight.shape) > 1:
            weight.assign(draw(rng, weight.path, weight.shape))
    model = keras_hub.models.Gemma4CausalLM(preprocessor=None, backbone=backbone)
    for check in CHECKS:
        assert check(model, ROWS, new_tokens=3).clear > 4


@pytest.mark.once
def test_a_model_that_generates_from_more(monkeypatch):
    model = hub_model()
    generate_step = model.generate_step

    def asks_for_more(inputs, stop_token_ids=None):
        inputs["predict_token_ids"]
        return generate_step(inputs, stop_token_ids)

    monkeypatch.setattr(model, "generate_step", asks_for_more)
    with pytest.raises(ValueError, match="its `generate_step` also needs 'predict_token_ids'"):
        testing.assert_cached_equals_plain(model, ROWS, new_tokens=3)


@pytest.mark.once
def test_the_wrong_one_of_two_is_named():
    model = tiny_causal_lm(family=FAMILY)
    checked = testing._Checker(model, ROWS, 3, None)
    with checked.greedy() as generate:
        right = generate(ROWS)
    other = [list(row) for row in right]
    other[1][3] = (other[1][3] + 1) % VOCABULARY
    with pytest.raises(AssertionError, match=rf"3 of row 1 here is {other[1][3]}, and must be"):
        checked.compare(ROWS, other, right, " here")
    words = (
        rf"3 of row 1 here is {right[1][3]}, as in a plain .* but otherwise {other[1][3]}, whose"
    )
    with pytest.raises(AssertionError, match=words):
        checked.compare(ROWS, right, other, " here")


@pytest.mark.once
def test_a_wrong_state_is_found(monkeypatch):
    model = tiny_causal_lm(family=FAMILY)
    hidden_states = model.backbone.hidden_states

    def forgets(token_ids, *args, cache=None, **kwargs):
        """A token by itself loses a part of the state."""
        hidden, cache = hidden_states(token_ids, *args, cache=cache, **kwargs)
        if token_ids.shape[1] == 1 and cache is not None:
            blocks = keras.tree.map_structure(
                lambda a: a * keras.ops.cast(0.5, a.dtype), cache["blocks"]
            )
            cache = {**cache, "blocks": blocks}
        return hidden, cache

    monkeypatch.setattr(model.backbone, "hidden_states", forgets)
    with pytest.raises(AssertionError, match=r"Token \d of row \d is \d+, and must be"):
        testing.assert_cached_equals_plain(model, ROWS, new_tokens=6)


@pytest.mark.once
def test_a_mask_that_is_not_heeded_is_found(monkeypatch):
    # HGRN2 of this size hardly remembers the few tokens of padding: its best tokens stay the same.
    model = tiny_causal_lm(family="griffin")
    hidden_states = model.backbone.hidden_states

    def ignores(token_ids, padding_mask=None, *args, **kwargs):
        return hidden_states(token_ids, None, *args, **kwargs)

    monkeypatch.setattr(model.backbone, "hidden_states", ignores)
    with pytest.raises(AssertionError, match="in a batch, padded with 0,"):
        testing.assert_padding_changes_nothing(model, ROWS, new_tokens=6)


@pytest.mark.once
def test_padding_that_moves_plain_logits_is_found(monkeypatch):
    model = tiny_causal_lm(family=FAMILY)
    forward = testing._Checker._forward

    def moved(self, inputs):
        return forward(self, inputs) + np.arange(VOCABULARY) * inputs["token_ids"].shape[1] / 10

    monkeypatch.setattr(testing._Checker, "_forward", moved)
    with pytest.raises(AssertionError, match="Padding changes a plain forward pass: after token"):
        testing.assert_padding_changes_nothing(model, ROWS, new_tokens=3)


@pytest.mark.once
def test_logits_that_are_not_finite_are_found(monkeypatch):
    """As padding makes them where a whole row of a softmax is masked."""
    model = tiny_causal_lm(family=FAMILY)
    forward = testing._Checker._forward

    def masked(self, inputs):
        padded = ~inputs["padding_mask"].astype(bool).all(axis=1)
        return np.where(padded[:, None, None], np.nan, forward(self, inputs))

    monkeypatch.setattr(testing._Checker, "_forward", masked)
    with pytest.raises(AssertionError, match="not finite, after token 0 of row 1"):
        testing.assert_padding_changes_nothing(model, ROWS, new_tokens=3)


@pytest.mark.once
def test_a_cut_that_loses_a_token_is_found(monkeypatch):
    model = tiny_causal_lm(family=FAMILY)
    prefill = model.prefill

    def loses_one(inputs, max_length):
        cache = prefill(inputs, max_length)
        state = model.backbone.get_initial_state(cache.batch_size, max_length)
        return GenerationCache(state, cache.token_ids, cache.max_length, cache.key)

    monkeypatch.setattr(model, "prefill", loses_one)
    with pytest.raises(AssertionError, match="from a cache of the first 2 tokens"):
        testing.assert_cuts_change_nothing(model, ROWS, new_tokens=6)


@pytest.mark.once
def test_what_cannot_be_checked():
    model = tiny_causal_lm(family=FAMILY)
    for check in CHECKS:
        for arguments, words in (
            ((model.backbone, ROWS), "must be a `keras_hub.models.CausalLM`"),
            ((model, []), "`rows` must be"),
            ((model, [[1], []]), "`rows` must be"),
            ((model, "text"), "`rows` must be"),
            ((model, ROWS, 0), "`new_tokens` must be"),
        ):
            with pytest.raises(ValueError, match=words):
                check(*arguments)
    embeddings = model.backbone.token_embedding.embeddings
    embeddings.assign(np.zeros(embeddings.shape, "float32"))
    if FAMILY != "transnormer" and model.backbone.token_embedding.tie_weights:
        with pytest.raises(ValueError, match="could not fail"):
            testing.assert_cached_equals_plain(model, ROWS, new_tokens=2)
