"""Causal LMs: training on strings and tokens, scores, losses, and errors about their inputs."""

import keras
import numpy as np
import pytest

from keras_recurrent.generation.text import parse_stop_token_ids
from keras_recurrent.models import (
    GriffinBackbone,
    GriffinCausalLM,
    GriffinCausalLMPreprocessor,
    TokenCrossentropy,
)
from keras_recurrent.tokenizers import ByteTokenizer
from tests.layers.table import JIT, assert_rejects, numpy
from tests.models.tiny import (
    FAMILIES,
    SHARED,
    SIZES,
    forward,
    tiny_causal_lm,
    tiny_text_model,
    two_families,
)

pytestmark = pytest.mark.once

TEXTS = ["tick tock ", "tick tock tick", "tock"] * 4


def language_model(packed=False, sequence_length=16, family="griffin"):
    preprocessor = {"sequence_length": sequence_length, "packed": packed}
    model = tiny_text_model(family, preprocessor, num_layers=1)
    model.compile(keras.optimizers.Adam(0.01), sampler="greedy")
    return model


@pytest.fixture(scope="module")
def tokens_model():
    """A model without a preprocessor, for tests of errors."""
    return tiny_causal_lm(num_layers=1)


@pytest.fixture(scope="module")
def text_model():
    """A model with a preprocessor, for tests of errors."""
    return language_model()


@pytest.mark.parametrize(
    ("family", "packed"),
    [
        pytest.param(SHARED[0], False, marks=pytest.mark.every_backend),
        ("griffin", True),
    ],
)
def test_fit_on_strings_lowers_the_loss_and_generate_continues_prompts(family, packed):
    model = language_model(packed, family=family)
    arguments = {"batch_size": 3, "epochs": 8, "verbose": 0, "shuffle": packed}
    history = model.fit(TEXTS, validation_data=(TEXTS[:3],), **arguments)
    losses = history.history["loss"], history.history["val_loss"]
    assert all(loss[-1] < 0.6 * loss[0] for loss in losses)
    assert len(model.preprocessor(TEXTS)[1]) == (10 if packed else 12)
    assert int(model.optimizer.iterations) == 8 * 4
    loss = model.evaluate(TEXTS[:3], batch_size=3, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(loss, losses[1][-1], rtol=1e-3)

    first, second = model.generate(["tick", "t"], max_length=12)
    assert first.startswith("tick")
    assert second.startswith("t")
    new = model.generate(["tick", "t"], max_length=12, strip_prompt=True)
    assert new == [first[4:], second[1:]]


def test_generate_stops_at_the_second_end_token_of_a_tokenizer():
    model = language_model()
    model.preprocessor.tokenizer.end_token2_id = 70
    stops = parse_stop_token_ids(model.preprocessor, model.backbone.vocabulary_size, "auto")
    assert stops == (model.preprocessor.tokenizer.end_token_id, 70)


def test_preprocessed_tokens_give_the_loss_and_logits_of_their_strings():
    model = language_model()
    x, y, weight = numpy(model.preprocessor(TEXTS))
    arguments = {"sample_weight": weight, "batch_size": 6, "verbose": 0}
    expected = model.evaluate(TEXTS, batch_size=6, verbose=0)
    logits = [model.predict(data, batch_size=6, verbose=0) for data in (x, TEXTS)]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5)
    for preprocessor in (model.preprocessor, None):
        model.preprocessor = preprocessor
        np.testing.assert_allclose(model.evaluate(x, y, **arguments), expected, rtol=1e-4)
    history = model.fit(x, y, epochs=3, validation_split=0.5, **arguments).history
    assert history["loss"][-1] < history["loss"][0]


@two_families
def test_score_returns_logits_and_losses_and_calls_the_intercept_for_each_block(family):
    model = tiny_causal_lm(family=family)
    token_ids = np.random.default_rng(0).integers(3, 61, (2, 9)).astype("int32")
    real = np.ones_like(token_ids)
    real[0, 6:] = 0
    expected = forward(model, token_ids, real)
    logits = numpy(model.score(token_ids, real))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)

    targets = np.roll(token_ids, -1, axis=1)
    losses = numpy(model.score(token_ids, real, scoring_mode="loss", target_ids=targets))
    probabilities = np.exp(expected) / np.exp(expected).sum(-1, keepdims=True)
    chosen = np.take_along_axis(probabilities, targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(losses, -np.log(chosen), rtol=1e-4, atol=1e-4)

    blocks, last = [], len(model.backbone.transformer_layers) - 1

    def intercept(x, i):
        blocks.append(i)
        return x * 0 if i == last else x

    silenced = model.score(token_ids, layer_intercept_fn=intercept)
    assert blocks == [-1, *range(last + 1)]
    np.testing.assert_array_equal(numpy(silenced), 0)


@pytest.mark.every_backend
def test_token_and_segment_ids_at_padding_change_no_logits():
    model, results = tiny_causal_lm(num_layers=1), []
    for token, segment in ((8, 0), (-1, 1), (-100, -1), (61, -100)):
        x = {"token_ids": np.array([[7, token, 9, 9, 7]])}
        x["padding_mask"] = np.array([[1, 0, 1, 1, 1]])
        x["segment_ids"] = np.array([[0, segment, 0, 1, 1]])
        results.append(model.predict_on_batch(x)[:, [0, 2, 3, 4]])
    for logits in results[1:]:
        np.testing.assert_array_equal(logits, results[0])


def test_generate_accepts_an_empty_string_only_with_a_start_token():
    model = language_model()
    assert isinstance(model.generate("", max_length=4), str)
    model.preprocessor.add_start_token = False
    match = r"at least one token; .* with `add_start_token=True`"
    assert_rejects(match, model.generate, "", max_length=4)


@pytest.mark.every_backend
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", None])
@pytest.mark.parametrize("is_masked", [False, True], ids=["no mask", "Keras mask"])
def test_token_crossentropy_equals_the_loss_of_keras(reduction, is_masked):
    """`TokenCrossentropy` ignores weights, a reduction, or the mask that Keras attaches."""
    rng = np.random.default_rng(0)
    tokens, weights = rng.integers(0, 7, (3, 5)), rng.integers(0, 2, (3, 5)) * rng.random((3, 5))
    logits = rng.normal(size=(3, 5, 7)).astype("float32")
    if is_masked:
        logits[0, 3:] = 0
        logits = keras.layers.Masking()(logits)
    loss = TokenCrossentropy(reduction=reduction)
    reference = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    for sample_weight in (None, weights):
        found, expected = (numpy(f(tokens, logits, sample_weight)) for f in (loss, reference))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert keras.losses.deserialize(keras.losses.serialize(loss)).reduction == loss.reduction


@pytest.mark.every_backend
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_token_crossentropy_of_bfloat16_logits_is_computed_in_float32(dtype):
    """Token ids are cast to bfloat16, which has no 257, or the loss is rounded too early."""
    tokens = np.array([[257, 299, 3]])
    logits = np.random.default_rng(0).normal(size=(1, 3, 300)).astype("float32")
    logits = keras.ops.cast(logits, "bfloat16")
    expected = keras.losses.sparse_categorical_crossentropy(
        tokens, keras.ops.cast(logits, "float32"), from_logits=True
    )
    loss = TokenCrossentropy(dtype=dtype)
    losses, mean = loss.call(keras.ops.convert_to_tensor(tokens), logits), loss(tokens, logits)
    tolerance = 2**-7 if dtype == "bfloat16" else 1e-6
    for found, reference in ((losses, expected), (mean, keras.ops.mean(expected))):
        assert keras.backend.standardize_dtype(found.dtype) == (dtype or "float32")
        found = numpy(keras.ops.cast(found, "float32"))
        np.testing.assert_allclose(found, numpy(reference), rtol=tolerance)


@pytest.mark.every_backend
def test_token_crossentropy_ignores_labels_of_weight_0():
    """Labels of -100 or -1, with which other libraries pad, change the loss or its gradients."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4)).astype("float32")
    y, weight = rng.integers(0, 7, (2, 3)), np.array([[1, 0, 0.5], [1, 1, 0]], "float32")
    kernel, results = rng.normal(size=(4, 7)), []
    for label in (0, -1, -100, 7):
        model = keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(7, use_bias=False)])
        model.set_weights([kernel])
        model.compile(keras.optimizers.SGD(1.0), TokenCrossentropy(), jit_compile=JIT)
        loss = model.train_on_batch(x, np.where(weight > 0, y, label), sample_weight=weight)
        results.append([loss, *model.get_weights()])
    for result in results[1:]:
        keras.tree.map_structure(np.testing.assert_array_equal, result, results[0])
    counted = TokenCrossentropy()(np.array([[-100]]), x[:1, :1], np.array([[0.5]]))
    assert np.isnan(numpy(counted))


# Errors

IDS, REAL = np.full((2, 5), 7, "int32"), np.ones((2, 5), "int32")
PROMPT = {"token_ids": IDS, "padding_mask": REAL}
TEXT_WITHOUT_PREPROCESSOR = (
    r"`inputs` is text.* no preprocessor.*such as a `GriffinCausalLMPreprocessor`"
)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ({**PROMPT, "padding_mask": np.array([[1] * 5, [0] * 5])}, "prompt 1 has none"),
        ({**PROMPT, "padding_mask": np.array([[1] * 5, [0, 1, 1, 0, 0]])}, "False only after"),
        ({**PROMPT, "padding_mask": np.array([[1, 1, 0, 1, 0], [1] * 5])}, "False only after"),
        (IDS, "dictionary of `token_ids` and `padding_mask`.*got int32 of shape"),
        ({"token_ids": IDS}, r"got a dictionary of \['token_ids'\]"),
        ({**PROMPT, "segment_ids": REAL}, "one prompt per"),
        ({**PROMPT, "padding_mask": REAL[:, :3]}, r"got \(2, 5\) and \(2, 3\)"),
        ({"token_ids": IDS[:0], "padding_mask": REAL[:0]}, "at least one prompt"),
        ({**PROMPT, "token_ids": IDS + 0.5}, "must be integers; got float64"),
        ({"token_ids": IDS[0], "padding_mask": REAL[0]}, r"got \(5,\) and \(5,\)"),
        ({"token_ids": [[7, 7]], "padding_mask": [[1, 0]]}, "a tensor or an array; got a list"),
        ({**PROMPT, "padding_mask": REAL * 1.0}, "boolean, .* or integers, 0 at.*; got float64"),
        *((text, TEXT_WITHOUT_PREPROCESSOR) for text in ("tick", ["tick"], b"tick")),
        (np.array(["tick"]), TEXT_WITHOUT_PREPROCESSOR),
    ],
    ids=repr,
)
def test_generate_without_preprocessor_rejects_malformed_prompts(tokens_model, prompt, match):
    assert_rejects(match, tokens_model.generate, prompt, stop_token_ids=None)
    if match is TEXT_WITHOUT_PREPROCESSOR:
        assert_rejects(match, tokens_model.generate, prompt)


def test_generate_with_preprocessor_rejects_prompts_that_are_not_strings(text_model):
    for prompts, got in [
        (b"tick", "bytes"),
        (PROMPT, r"a dictionary of \['padding_mask', 'token_ids'\]"),
        (np.full((1, 3), 7), "int64"),
        ([1, 2], "a list with int"),
        (["tick", 1], "a list with int and str"),
        (None, "NoneType"),
    ]:
        match = rf"`inputs` must be one or several strings .*got {got}.*`preprocessor=None`"
        assert_rejects(match, text_model.generate, prompts)
    match = "`inputs` must hold at least one prompt; got none"
    for prompts in ([], np.array([], "str")):
        assert_rejects(match, text_model.generate, prompts)


def test_generate_rejects_invalid_max_lengths_and_longer_prompts(text_model):
    model, match = text_model, "`max_length` must be an integer, at least 1"
    for length in (0, -1, "12", 12.0):
        assert_rejects(match, model.generate, "tick", max_length=length)
        assert_rejects(match, model.backbone.get_initial_state, 1, max_length=length)
    assert model.generate("tick", max_length=5) == "tick"
    for prompts, row in [("tick", 0), (["t", "tick"], 1), (np.array(["t", "tick"]), 1)]:
        match = f"`max_length` is 4 .*prompt {row} alone has 5"
        assert_rejects(match, model.generate, prompts, max_length=4)
    match = r"`max_length` is 16 .*prompt 0 alone has 18"
    assert_rejects(match, model.generate, "tick tock, tick t")


@pytest.mark.parametrize("bad", [-1, -100, 61])
def test_token_ids_outside_the_vocabulary_are_rejected(tokens_model, bad):
    model, match = tokens_model, rf"`token_ids` must be ids from 0 to 60, .*got {bad} at \[1, 2\]"
    good, real = np.full((2, 3), 7), np.array([[1, 1, 0], [1, 1, 1]])
    token_ids = good.copy()
    token_ids[1, 2] = bad
    x = {"token_ids": token_ids, "padding_mask": real}
    assert_rejects(match, model.generate, x, stop_token_ids=None)
    assert_rejects(match, model.score, token_ids, real)
    assert_rejects(match, model.score, token_ids.tolist(), real)
    assert_rejects(match, model.fit, x, good, verbose=0)
    assert_rejects(match, model.evaluate, x, good, verbose=0)
    valid = {"token_ids": good}
    assert_rejects(match, model.fit, valid, good, validation_data=(x, good), verbose=0)
    match = rf"`y` must be .*got {bad} at .*`sample_weight` of 0"
    assert_rejects(match, model.fit, valid, token_ids, sample_weight=real, verbose=0)


@pytest.mark.parametrize("bad", [-1, -100])
def test_negative_segment_ids_of_real_tokens_are_rejected(tokens_model, bad):
    model, good = tokens_model, np.full((2, 3), 7)
    x = {"token_ids": good, "padding_mask": np.array([[1, 1, 0], [1, 1, 1]])}
    x["segment_ids"] = np.array([[0, 0, bad], [0, 1, bad]])
    match = rf"`segment_ids` must be .*at least 0; got {bad} at \[1, 2\].*`padding_mask`"
    assert_rejects(match, model.fit, x, good, verbose=0)
    assert_rejects(match, model.evaluate, x, good, verbose=0)
    valid = {**x, "segment_ids": good}
    assert_rejects(match, model.fit, valid, good, validation_data=(x, good), verbose=0)
    x["padding_mask"] = np.array([[1, 1, 0], [1, 1, 0]])
    assert np.isfinite(model.evaluate(x, good, verbose=0)).all()


def test_score_rejects_inputs_that_are_not_token_ids_and_unknown_modes(text_model):
    score, ids = text_model.score, [[1, 2, 3]]
    for text in ("tick", ["tick"], np.array(["tick"]), [["tick"]]):
        assert_rejects(r"`token_ids` must be .*got .*`preprocessor", score, text)
    for wrong, got in [
        ([[1, 2], [3]], "sequences of different lengths"),
        (np.ones((1, 2)), "float64"),
        ([1, 2], r"\(2,\)"),
        ([], r"float64 of shape \(0,\)"),
        (np.ones((0, 2), "int32"), r"int32 of shape \(0, 2\)"),
        (np.ones((2, 0), "int32"), r"int32 of shape \(2, 0\)"),
        (None, "NoneType"),
        (PROMPT, r"a dictionary of .*Pass .*x\['token_ids'\]"),
    ]:
        assert_rejects(f"`token_ids` must be integers .*got .*{got}", score, wrong)
    for wrong, got in [([["a", "b"]], "text"), ([[0.5, 1.0]], "float64"), ({}, "a dictionary")]:
        match = f"`target_ids` must be integers .*got .*{got}"
        assert_rejects(match, score, [[1, 2]], scoring_mode="loss", target_ids=wrong)
    assert_rejects("'logits' or 'loss'", score, ids, scoring_mode="perplexity")
    assert_rejects("`target_ids`", score, ids, scoring_mode="loss")
    match = r"`target_ids` must have .*\(1, 3\); got \(1, 2"
    assert_rejects(match, score, ids, scoring_mode="loss", target_ids=[[2, 3]])
    for mask in (np.zeros((1, 3), "float32"), [[0.0, 0.0, -np.inf]]):
        assert_rejects(r"`padding_mask` must be boolean.*; got float32", score, ids, mask)
    score(ids, [[1, 1, 0]])


def test_calls_reject_masks_and_caches_of_other_structures_and_shapes():
    model = tiny_causal_lm()
    x = {"token_ids": np.full((1, 4), 7), "padding_mask": np.ones((1, 3))}
    for part in (model, model.backbone):
        assert_rejects(r"`padding_mask` must .*\(1, 4\); got \(1, 3\)", part, x)
    cache, token = model.backbone.get_initial_state(1, max_length=4), np.ones((1, 1), "int32")
    match = r"`padding_mask` must have the shape .*\(1, 1\); got \(2"
    assert_rejects(match, model.call_with_cache, token, cache, padding_mask=np.ones((2, 1), "bool"))
    fewer = {**cache, "blocks": cache["blocks"][:2]}
    match = r"`cache\['blocks'\]` must be a tuple .*length 3.*got one of 2"
    assert_rejects(match, model.call_with_cache, token, fewer)
    match = r"`cache` must be a dict of \['blocks', .*got tuple"
    assert_rejects(match, model.call_with_cache, token, cache["blocks"])
    match = r"`cache.*must have the shape \(2, .*got \(1, "
    assert_rejects(match, model.call_with_cache, np.ones((2, 1), "int32"), cache)


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
        lambda n: model.backbone.get_initial_state(1, n),
        prefill := lambda n: model.prefill(prompt(4), max_length=n),
    ):
        call(15)
        assert_rejects(match.format(16), call, 16)
    assert_rejects(match.format(16), model.generate, prompt(16), stop_token_ids=None)
    assert_rejects(match.format(16), model.stream, prompt(4), max_length=16, stop_token_ids=None)
    cache = prefill(15)
    arguments = {"max_length": 13, "cache": cache, "stop_token_ids": None}
    assert_rejects("`max_length` of 15", model.generate, prompt(4), **arguments)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_single_strings_are_rejected(text_model, method):
    tf = pytest.importorskip("tensorflow")
    match = r"`x` must be several strings; .*`\.batch"
    for x in (tf.data.Dataset.from_tensor_slices(TEXTS), np.array("tick"), tf.constant("tick")):
        assert_rejects(match, getattr(text_model, method), x, verbose=0)


@pytest.mark.parametrize("name", ["text_model", "tokens_model"])
def test_fit_and_evaluate_reject_data_that_is_neither_strings_nor_tokens(name, request):
    model = request.getfixturevalue(name)
    tokens = np.full((2, 3), 7)
    for x, got in [
        (tokens, r"int64 of shape \(2, 3\)"),
        (keras.ops.convert_to_tensor(tokens), "int64 of shape"),
        (tokens.tolist(), "a list with list"),
        ("tick", "one string"),
        ({"tokens": tokens}, r"a dictionary of \['tokens'\]"),
        (None, "NoneType"),
    ]:
        for use in (model.fit, model.evaluate):
            assert_rejects(f"`x` must be several strings, .*got .*{got}", use, x, tokens, verbose=0)
    for x in ([], np.array([], "str")):
        for use in (model.fit, model.evaluate):
            assert_rejects("`x` must hold at least one string", use, x, verbose=0)
    assert_rejects("`x` must be several strings", model.train_on_batch, tokens)
    match = "`x` holds tokens, which need labels"
    assert_rejects(match, model.fit, PROMPT, verbose=0)
    for validation_data, match in [
        (tokens, r"`validation_data` must be several strings.*got int64"),
        ((PROMPT,), "`validation_data` holds tokens, which need labels"),
    ]:
        assert_rejects(match, model.fit, PROMPT, IDS, validation_data=validation_data, verbose=0)
    if name == "text_model":
        match = "`y` and `sample_weight` are made from the strings"
        for use in (model.fit, model.evaluate):
            assert_rejects(match, use, ["a", "b"], np.array([1, 2]), verbose=0)
    else:
        match = "`x` is text, and the model has no preprocessor"
        assert_rejects(match, model.fit, TEXTS, verbose=0)


def test_constructor_rejects_parts_that_do_not_belong_together():
    backbone, hgrn2 = GriffinBackbone(**SIZES), FAMILIES["hgrn2"]
    match = "`backbone` must be a `HGRN2Backbone`; got a `Griffin"
    assert_rejects(match, hgrn2.causal_lm, backbone)
    for part, match in [
        (ByteTokenizer(), r"must be a `Griffin.*got a `ByteTokenizer"),
        (hgrn2.preprocessor(hgrn2.tokenizer()), "a `GriffinCausalLMP.*got a `HGRN2CausalLMP"),
        (GriffinCausalLMPreprocessor(ByteTokenizer()), "259 tokens, the backbone knows 61"),
    ]:
        assert_rejects(match, GriffinCausalLM, backbone, part)
    with pytest.raises(TypeError, match="tokenizer"):
        GriffinCausalLM(backbone, tokenizer=None)


def test_compile_with_unknown_sampler_raises(tokens_model):
    """A misspelled name of a sampler is noticed only at `generate`."""
    match = r"`sampler` must be 'greedy'.*got 'gredy'"
    assert_rejects(match, tokens_model.compile, sampler="gredy")
