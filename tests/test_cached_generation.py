"""Checks of `benchmarks.cached_generation`: correct models pass, and planted faults are found."""

import keras
import keras_hub
import numpy as np
import pytest

from benchmarks import cached_generation
from benchmarks.cached_generation import CHECKS, Checker
from keras_recurrent.models import GenerationCache
from tests.models.tiny import VOCABULARY, draw, tiny_causal_lm

pytestmark = pytest.mark.once
ROWS = [[5, 6, 7, 8], [3, 4]]


@pytest.fixture(scope="module")
def griffin():
    return tiny_causal_lm(family="griffin", num_layers=2)  # the second block is local attention


def test_checks_of_a_correct_model_pass_and_restore_its_sampler(griffin):
    for check in CHECKS.values():
        check(griffin, ROWS, new_tokens=3)
    assert type(griffin.sampler).__name__ == "TopKSampler"


def test_checks_of_a_keras_hub_model_with_positions_pass():
    sizes = {"num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    sizes |= {"vocabulary_size": VOCABULARY, "hidden_dim": 16, "intermediate_dim": 24}
    backbone = keras_hub.models.Gemma4Backbone(**sizes, image_size=16)
    rng = np.random.default_rng(0)
    for weight in backbone.trainable_weights:
        if len(weight.shape) > 1:
            weight.assign(draw(rng, weight.path, weight.shape))
    model = keras_hub.models.Gemma4CausalLM(preprocessor=None, backbone=backbone)
    for check in CHECKS.values():
        check(model, ROWS, new_tokens=3)


def test_check_of_a_quantized_model_accepts_its_rounding():
    model = tiny_causal_lm(family="hgrn2")
    model.quantize("int8")
    cached_generation.assert_cached_equals_plain(model, ROWS, new_tokens=3)


def test_check_of_equal_logits_raises():
    """A check passes although no token could have failed it."""
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    embeddings = model.backbone.token_embedding.embeddings
    embeddings.assign(np.zeros(embeddings.shape, "float32"))
    with pytest.raises(ValueError, match="could not fail"):
        cached_generation.assert_cached_equals_plain(model, ROWS, new_tokens=2)


def test_compare_names_the_wrong_one_of_two_results(griffin):
    checker = Checker(griffin, ROWS, 3)
    with checker.greedy() as generate:
        right = generate(ROWS)
    other = [list(row) for row in right]
    other[1][3] = (other[1][3] + 1) % VOCABULARY
    with pytest.raises(AssertionError, match=rf"3 of row 1 here is {other[1][3]}, and must be"):
        checker.compare(ROWS, other, right, " here")
    words = (
        rf"3 of row 1 here is {right[1][3]}, as in a plain .* but otherwise {other[1][3]}, whose"
    )
    with pytest.raises(AssertionError, match=words):
        checker.compare(ROWS, right, other, " here")


def forget(hidden_states, token_ids, *args, cache=None, **kwargs):
    """Halves the state at each single token."""
    hidden, cache = hidden_states(token_ids, *args, cache=cache, **kwargs)
    if token_ids.shape[1] == 1 and cache is not None:
        halved = keras.tree.map_structure(
            lambda a: a * keras.ops.cast(0.5, a.dtype), cache["blocks"]
        )
        cache = {**cache, "blocks": halved}
    return hidden, cache


def ignore_mask(hidden_states, token_ids, padding_mask=None, *args, **kwargs):
    return hidden_states(token_ids, None, *args, **kwargs)


def lose_prompt(prefill, inputs, max_length):
    cache = prefill(inputs, max_length)
    state = prefill.__self__.backbone.get_initial_state(cache.batch_size, max_length)
    return GenerationCache(state, cache.token_ids, cache.max_length, cache.key)


def shift_logits(forward, checker, inputs):
    """Changes logits by the padded length."""
    return forward(checker, inputs) + np.arange(VOCABULARY) * inputs["token_ids"].shape[1] / 10


def mask_softmax(forward, checker, inputs):
    """Returns NaN for padded rows, as a softmax whose row is masked."""
    padded = ~inputs["padding_mask"].astype(bool).all(axis=1)
    return np.where(padded[:, None, None], np.nan, forward(checker, inputs))


@pytest.mark.parametrize(
    ("fault", "name", "check", "words"),
    [
        (forget, "hidden_states", "cached_equals_plain", r"Token \d of row \d is \d+, and must be"),
        (ignore_mask, "hidden_states", "padding_changes_nothing", "in a batch, padded with 0,"),
        (lose_prompt, "prefill", "cuts_change_nothing", "from a cache of the first 2 tokens"),
        (
            *(shift_logits, "_forward", "padding_changes_nothing"),
            "Padding changes a plain forward pass",
        ),
        (mask_softmax, "_forward", "padding_changes_nothing", "not finite, after token 0 of row 1"),
    ],
)
def test_checks_find_faults_of_models(fault, name, check, words, monkeypatch):
    # An HGRN2 of this size hardly remembers the few tokens of padding: its best tokens stay.
    model = tiny_causal_lm(family="griffin", num_layers=3 if fault is forget else 2)
    owner = {"hidden_states": model.backbone, "prefill": model, "_forward": Checker}[name]
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: fault(right, *args, **kwargs))
    with pytest.raises(AssertionError, match=words):
        getattr(cached_generation, f"assert_{check}")(model, ROWS, new_tokens=4)
