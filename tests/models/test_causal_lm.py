"""Training on strings and tokens, scores, and what generation asks of its prompts."""

import keras
import numpy as np
import pytest

from keras_recurrent.models import (
    GriffinBackbone,
    GriffinCausalLM,
    GriffinCausalLMPreprocessor,
    TokenCrossentropy,
)
from keras_recurrent.tokenizers import ByteTokenizer
from tests.models.tiny import FAMILIES, SIZES, forward, shared_by_families, tiny_causal_lm

TEXTS = ["tick tock ", "tick tock tick", "tock"] * 4


def language_model(packed=False, sequence_length=16, family="griffin", **kwargs):
    cls = FAMILIES[family]
    preprocessor = cls.preprocessor(ByteTokenizer(), sequence_length=sequence_length, packed=packed)
    sizes = {**cls.sizes, "vocabulary_size": 259, "num_layers": 1, **kwargs}
    model = cls.causal_lm(cls.backbone(**sizes), preprocessor)
    model.compile(keras.optimizers.Adam(0.01), sampler="greedy")
    return model


@shared_by_families
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.once)])
def test_it_learns_strings_and_writes_them(family, packed):
    model = language_model(packed, family=family)
    arguments = {"batch_size": 3, "epochs": 8, "verbose": 0, "shuffle": packed}
    history = model.fit(TEXTS, validation_data=(TEXTS[:4],), **arguments)
    losses = history.history["loss"], history.history["val_loss"]
    assert all(loss[-1] < 0.6 * loss[0] for loss in losses)
    rows = len(model.preprocessor(TEXTS)[1])
    assert rows == (10 if packed else 12)
    assert int(model.optimizer.iterations) == 8 * 4
    loss = model.evaluate(TEXTS[:4], batch_size=3, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(loss, losses[1][-1], rtol=1e-3)

    written = model.generate(["tick", "t"], max_length=12)
    assert written[0].startswith("tick")
    assert model.generate("tick", max_length=12) == written[0]
    assert model.generate("tick", max_length=12, strip_prompt=True) == written[0][4:]


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.once)])
def test_tensorflow_datasets_of_strings(packed):
    tf = pytest.importorskip("tensorflow")
    model = language_model(packed)
    texts = tf.data.Dataset.from_tensor_slices(TEXTS).batch(len(TEXTS))
    loss = model.evaluate(texts, verbose=0, return_dict=True)["loss"]
    wanted = model.evaluate(TEXTS, batch_size=len(TEXTS), verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    model.fit(texts, shuffle=False, verbose=0)
    if packed:
        rows = texts.map(model.preprocessor).unbatch().batch(2)
        model.fit(rows, steps_per_epoch=2, shuffle=False, verbose=0)


@pytest.mark.once
def test_a_second_end_token_ends_a_row_as_well():
    model = language_model()
    model.preprocessor.tokenizer.end_token2_id = 70
    assert model._stop_token_ids("auto") == (model.preprocessor.tokenizer.end_token_id, 70)


@pytest.mark.once
def test_strings_that_come_one_by_one():
    tf = pytest.importorskip("tensorflow")
    model = language_model()
    for one in (tf.data.Dataset.from_tensor_slices(TEXTS), np.array("tick"), tf.constant("tick")):
        for method in (model.fit, model.evaluate, model.predict):
            with pytest.raises(ValueError, match=r"`x` must be several strings; .*`\.batch"):
                method(one, verbose=0)


def test_token_arrays_with_and_without_a_preprocessor():
    model = language_model()
    x, y, weight = keras.tree.map_structure(keras.ops.convert_to_numpy, model.preprocessor(TEXTS))
    rows = {"sample_weight": weight, "batch_size": 6, "verbose": 0}
    wanted = model.evaluate(TEXTS, batch_size=6, verbose=0)
    np.testing.assert_allclose(model.evaluate(x, y, **rows), wanted, rtol=1e-4)
    logits = model.predict(x, batch_size=6, verbose=0)
    np.testing.assert_allclose(
        logits, model.predict(TEXTS, batch_size=6, verbose=0), rtol=1e-4, atol=1e-5
    )
    model.preprocessor = None
    np.testing.assert_allclose(model.evaluate(x, y, **rows), wanted, rtol=1e-4)
    history = model.fit(x, y, epochs=3, validation_split=0.5, **rows).history
    assert history["loss"][-1] < history["loss"][0]


def test_a_packed_step_is_a_padded_step():
    """The same documents give the same loss, however they are laid out."""
    padded, packed = language_model(sequence_length=32), language_model(True, 32)
    for model in (padded, packed):
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        )
    packed.set_weights(padded.get_weights())
    losses = [m.test_on_batch(TEXTS) for m in (padded, packed)]
    losses = [loss[0] if isinstance(loss, (list, tuple)) else loss for loss in losses]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@shared_by_families
def test_scores_are_the_models_logits_and_losses(family):
    model = tiny_causal_lm(family=family)
    token_ids = np.random.default_rng(0).integers(3, 61, (2, 9)).astype("int32")
    real = np.ones_like(token_ids)
    real[0, 6:] = 0
    wanted = forward(model, token_ids, real)
    logits = keras.ops.convert_to_numpy(model.score(token_ids, real))
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)

    targets = np.roll(token_ids, -1, axis=1)
    losses = model.score(token_ids, real, scoring_mode="loss", target_ids=targets)
    probabilities = np.exp(wanted) / np.exp(wanted).sum(-1, keepdims=True)
    chosen = np.take_along_axis(probabilities, targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(losses), -np.log(chosen), rtol=1e-4, atol=1e-4
    )

    seen, last = [], len(model.backbone.transformer_layers) - 1

    def intercept(x, i):
        seen.append(i)
        return x * 0 if i == last else x

    silenced = model.score(token_ids, layer_intercept_fn=intercept)
    assert seen == [-1, *range(last + 1)]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(silenced), 0)


@pytest.mark.once
def test_scores_ask_for_what_they_need():
    model = tiny_causal_lm(num_layers=1)
    with pytest.raises(ValueError, match="'logits' or 'loss'"):
        model.score(np.ones((1, 3), "int32"), scoring_mode="perplexity")
    with pytest.raises(ValueError, match="`target_ids`"):
        model.score(np.ones((1, 3), "int32"), scoring_mode="loss")
    with pytest.raises(ValueError, match=r"`target_ids` must have .*\(1, 3\); got \(1, 2"):
        model.score([[1, 2, 3]], scoring_mode="loss", target_ids=[[2, 3]])
    for mask in (np.zeros((1, 3), "float32"), [[0.0, 0.0, -np.inf]]):
        with pytest.raises(ValueError, match=r"`padding_mask` must be boolean.*; got float32"):
            model.score([[1, 2, 3]], mask)
    model.score([[1, 2, 3]], [[1, 1, 0]])


@pytest.mark.once
def test_a_cache_has_a_state_for_each_block():
    model = tiny_causal_lm()
    cache = model.backbone.get_initial_state(1, max_length=4)
    token = np.ones((1, 1), "int32")
    with pytest.raises(ValueError, match=r"`padding_mask` must have the shape .*\(1, 1\); got \(2"):
        model.call_with_cache(token, cache, padding_mask=np.ones((2, 1), "bool"))
    fewer = {**cache, "blocks": cache["blocks"][:2]}
    with pytest.raises(
        ValueError, match=r"`cache\['blocks'\]` must be a tuple .*length 3.*got one of 2"
    ):
        model.call_with_cache(token, fewer)
    with pytest.raises(ValueError, match=r"`cache` must be a dict of \['blocks', .*got tuple"):
        model.call_with_cache(token, cache["blocks"])
    with pytest.raises(ValueError, match=r"`cache.*must have the shape \(2, .*got \(1, "):
        model.call_with_cache(np.ones((2, 1), "int32"), cache)


@pytest.mark.once
def test_compile_with_unknown_sampler_raises():
    """Fails if a misspelled name is noticed only at `generate`."""
    model = tiny_causal_lm(num_layers=1)
    with pytest.raises(ValueError, match=r"`sampler` must be 'greedy'.*got 'gredy'"):
        model.compile(sampler="gredy")


@pytest.mark.once
def test_prompts_need_a_token_and_no_gaps():
    model = tiny_causal_lm(num_layers=1)
    token_ids = np.full((2, 5), 7, "int32")
    for real, match in [
        ([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], "prompt 1 has none"),
        ([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]], "False only after"),
        ([[1, 1, 0, 1, 0], [1, 1, 1, 0, 0]], "False only after"),
    ]:
        prompt = {"token_ids": token_ids, "padding_mask": np.array(real)}
        with pytest.raises(ValueError, match=match):
            model.generate(prompt, stop_token_ids=None)
    real = np.ones((2, 5), "int32")
    for prompt, match in [
        (token_ids, "dictionary of `token_ids` and `padding_mask`.*got int32 of shape"),
        ({"token_ids": token_ids}, r"got a dictionary of \['token_ids'\]"),
        ({"token_ids": token_ids, "padding_mask": real, "segment_ids": real}, "one prompt per"),
        ({"token_ids": token_ids, "padding_mask": real[:, :3]}, r"got \(2, 5\) and \(2, 3\)"),
        ({"token_ids": token_ids[:0], "padding_mask": real[:0]}, "at least one prompt"),
        ({"token_ids": token_ids + 0.5, "padding_mask": real}, "must be integers; got float64"),
        ({"token_ids": token_ids[0], "padding_mask": real[0]}, r"got \(5,\) and \(5,\)"),
        (
            {"token_ids": token_ids, "padding_mask": real * 1.0},
            "`padding_mask` must be boolean, .* or integers, 0 at padding; got float64",
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            model.generate(prompt, stop_token_ids=None)


@pytest.mark.once
def test_no_prompts_and_no_length_are_errors():
    model = language_model()
    with pytest.raises(ValueError, match="`inputs` must hold at least one prompt; got none"):
        model.generate([])
    for length in (0, -1, "12", 12.0):
        with pytest.raises(ValueError, match="`max_length` must be an integer, at least 1"):
            model.generate("tick", max_length=length)
        with pytest.raises(ValueError, match="`max_length` must be an integer, at least 1"):
            model.backbone.get_initial_state(1, max_length=length)
    prompt = {"token_ids": np.full((1, 3), 7), "padding_mask": np.array([[1, 1, 0]])}
    for ids in ([], 2, "end", (1, 1.5), (True,)):
        with pytest.raises(ValueError, match="`stop_token_ids` must be a tuple"):
            tiny_causal_lm(num_layers=1).generate(prompt, stop_token_ids=ids)
    for ids, bad in [([5, -1], "-1"), ((61,), "61")]:
        with pytest.raises(ValueError, match=f"`stop_token_ids` must be ids from .*got {bad} at"):
            tiny_causal_lm(num_layers=1).generate(prompt, stop_token_ids=ids)


@pytest.mark.once
def test_a_prompt_that_does_not_fit_is_an_error():
    model = language_model()
    assert model.generate("tick", max_length=5) == "tick"
    for prompts, row in [("tick", 0), (["t", "tick"], 1), (np.array(["t", "tick"]), 1)]:
        with pytest.raises(ValueError, match=f"`max_length` is 4 .*prompt {row} alone has 5"):
            model.generate(prompts, max_length=4)
    with pytest.raises(ValueError, match=r"`max_length` is 16 .*prompt 0 alone has 18"):
        model.generate("tick tock, tick t")


@pytest.mark.once
def test_token_ids_that_the_vocabulary_lacks_are_errors():
    model = tiny_causal_lm(num_layers=1)
    good, real = np.full((2, 3), 7), np.array([[1, 1, 0], [1, 1, 1]])
    for bad in (-1, -100, 61):
        match = rf"`token_ids` must be ids from 0 to 60, .*got {bad} at \[1, 2\]"
        token_ids = good.copy()
        token_ids[1, 2] = bad
        x = {"token_ids": token_ids, "padding_mask": real}
        with pytest.raises(ValueError, match=match):
            model.generate(x, stop_token_ids=None)
        for ids in (token_ids, token_ids.tolist()):
            with pytest.raises(ValueError, match=match):
                model.score(ids, real)
        for use in (model.fit, model.evaluate):
            with pytest.raises(ValueError, match=match):
                use(x, good, verbose=0)
        with pytest.raises(ValueError, match=match):
            model.fit({"token_ids": good}, good, validation_data=(x, good), verbose=0)
        with pytest.raises(ValueError, match=rf"`y` must be .*got {bad} at .*`sample_weight` of 0"):
            model.fit({"token_ids": good}, token_ids, sample_weight=real, verbose=0)


@pytest.mark.once
def test_segments_below_0_are_errors():
    model = tiny_causal_lm(num_layers=1)
    good, real = np.full((2, 3), 7), np.array([[1, 1, 0], [1, 1, 1]])
    for bad in (-1, -100):
        segment_ids = np.array([[0, 0, bad], [0, 1, bad]])
        x = {"token_ids": good, "padding_mask": real, "segment_ids": segment_ids}
        match = rf"`segment_ids` must be .*at least 0; got {bad} at \[1, 2\].*`padding_mask`"
        for use in (model.fit, model.evaluate):
            with pytest.raises(ValueError, match=match):
                use(x, good, verbose=0)
        with pytest.raises(ValueError, match=match):
            model.fit({**x, "segment_ids": good}, good, validation_data=(x, good), verbose=0)
    x["padding_mask"] = np.array([[1, 1, 0], [1, 1, 0]])
    assert np.isfinite(model.evaluate(x, good, verbose=0)).all()


def test_any_segment_may_stand_at_padding():
    model = tiny_causal_lm(num_layers=1)
    x = {"token_ids": np.array([[7, 8, 9, 9, 7]]), "padding_mask": np.array([[1, 0, 1, 1, 1]])}
    found = {}
    for segment in (0, 1, -1, -100):
        x["segment_ids"] = np.array([[0, segment, 0, 1, 1]])
        found[segment] = keras.ops.convert_to_numpy(model(x))[:, [0, 2, 3, 4]]
    for segment in (1, -1, -100):
        np.testing.assert_array_equal(found[segment], found[0])


def test_any_id_may_stand_at_padding():
    model = tiny_causal_lm(num_layers=1)
    real = np.array([[1, 0, 1]])
    wanted = forward(model, [[7, 8, 9]], real)
    for bad in (-1, -100, 61):
        found = forward(model, [[7, bad, 9]], real)
        np.testing.assert_array_equal(found[:, ::2], wanted[:, ::2])


@pytest.mark.once
def test_scores_of_what_is_no_tokens_are_an_error():
    model = language_model()
    for text in ("tick", ["tick"], np.array(["tick"]), [["tick"]]):
        with pytest.raises(ValueError, match=r"`token_ids` must be .*got .*`preprocessor"):
            model.score(text)
    for ids, got in [
        ([[1, 2], [3]], "sequences of different lengths"),
        (np.ones((1, 2)), "float64"),
        ([1, 2], r"\(2,\)"),
        ([], r"float64 of shape \(0,\)"),
        (np.ones((0, 2), "int32"), r"int32 of shape \(0, 2\)"),
        (np.ones((2, 0), "int32"), r"int32 of shape \(2, 0\)"),
        (None, "NoneType"),
        ({"token_ids": 0, "padding_mask": 1}, r"a dictionary of .*Pass .*x\['token_ids'\]"),
    ]:
        with pytest.raises(ValueError, match=f"`token_ids` must be integers .*got .*{got}"):
            model.score(ids)
    for ids, got in [([["a", "b"]], "text"), ([[0.5, 1.0]], "float64"), ({}, "a dictionary")]:
        with pytest.raises(ValueError, match=f"`target_ids` must be integers .*got .*{got}"):
            model.score([[1, 2]], scoring_mode="loss", target_ids=ids)


@pytest.mark.once
def test_prompts_are_strings_where_there_is_a_preprocessor():
    model = language_model()
    x = {"token_ids": np.full((1, 3), 7), "padding_mask": np.ones((1, 3), "int32")}
    for prompts, got in [
        (b"tick", "bytes"),
        (x, r"a dictionary of \['padding_mask', 'token_ids'\]"),
        (np.full((1, 3), 7), "int64"),
        ([1, 2], "a list with int"),
        (["tick", 1], "a list with int and str"),
        (None, "NoneType"),
    ]:
        match = rf"`inputs` must be one or several strings .*got {got}.*`preprocessor=None`"
        with pytest.raises(ValueError, match=match):
            model.generate(prompts)
    for prompts in ([], np.array([], "str")):
        with pytest.raises(ValueError, match="`inputs` must hold at least one prompt"):
            model.generate(prompts)
    with pytest.raises(ValueError, match="`token_ids` must be a tensor or an array; got a list"):
        tiny_causal_lm(num_layers=1).generate(
            {"token_ids": [[7, 7]], "padding_mask": [[1, 0]]}, stop_token_ids=None
        )


@pytest.mark.once
def test_prompts_of_text_need_a_preprocessor():
    model = tiny_causal_lm(num_layers=1)
    for prompts in ("tick", ["tick"], np.array(["tick"]), b"tick"):
        for stop_token_ids in ("auto", None):
            match = r"`inputs` is text.* no preprocessor.*such as a `GriffinCausalLMPreprocessor`"
            with pytest.raises(ValueError, match=match):
                model.generate(prompts, stop_token_ids=stop_token_ids)


@pytest.mark.once
@pytest.mark.parametrize("has_preprocessor", [True, False])
def test_samples_are_strings_or_tokens_with_labels(has_preprocessor):
    model = language_model() if has_preprocessor else tiny_causal_lm(num_layers=1)
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
            with pytest.raises(ValueError, match=rf"`x` must be several strings, .*got .*{got}"):
                use(x, tokens, verbose=0)
    good = {"token_ids": tokens, "padding_mask": np.ones((2, 3), "int32")}
    with pytest.raises(ValueError, match=r"`validation_data` must be several strings.*got int64"):
        model.fit(good, tokens, validation_data=tokens, verbose=0)
    with pytest.raises(ValueError, match="`x` holds tokens, which need labels"):
        model.fit(good, verbose=0)
    with pytest.raises(ValueError, match="`validation_data` holds tokens, which need labels"):
        model.fit(good, tokens, validation_data=(good,), verbose=0)
    if has_preprocessor:
        for use in (model.fit, model.evaluate):
            with pytest.raises(
                ValueError, match="`y` and `sample_weight` are made from the strings"
            ):
                use(["a", "b"], np.array([1, 2]), verbose=0)
    for x in ([], np.array([], "str")):
        for use in (model.fit, model.evaluate):
            with pytest.raises(ValueError, match="`x` must hold at least one string"):
                use(x, verbose=0)
    with pytest.raises(ValueError, match="`x` must be several strings"):
        model.train_on_batch(tokens)


@pytest.mark.once
def test_text_needs_a_preprocessor():
    with pytest.raises(ValueError, match="`x` is text, and the model has no preprocessor"):
        tiny_causal_lm(num_layers=1).fit(TEXTS, verbose=0)
    with pytest.raises(ValueError, match="`x` must hold at least one string"):
        language_model().fit([], verbose=0)


@pytest.mark.once
def test_parts_of_another_kind_are_errors():
    backbone = GriffinBackbone(**SIZES)
    with pytest.raises(ValueError, match="`backbone` must be a `HGRN2Backbone`; got a `Griffin"):
        FAMILIES["hgrn2"].causal_lm(backbone)
    with pytest.raises(ValueError, match=r"must be a `Griffin.*got a `ByteTokenizer"):
        GriffinCausalLM(backbone, ByteTokenizer())
    others = FAMILIES["hgrn2"]
    preprocessor = others.preprocessor(others.tokenizer(), sequence_length=8)
    with pytest.raises(ValueError, match=r"must be a `GriffinCausalLMP.*got a `HGRN2CausalLMP"):
        GriffinCausalLM(backbone, preprocessor)


@pytest.mark.once
def test_a_mask_of_another_shape_is_an_error():
    model = tiny_causal_lm(num_layers=1)
    x = {"token_ids": np.full((1, 4), 7), "padding_mask": np.ones((1, 3))}
    for part in (model, model.backbone):
        with pytest.raises(ValueError, match=r"`padding_mask` must .*\(1, 4\); got \(1, 3\)"):
            part(x)


def test_an_empty_string_is_a_prompt():
    model = language_model()
    assert isinstance(model.generate("", max_length=4), str)
    model.preprocessor.add_start_token = False
    with pytest.raises(ValueError, match=r"at least one token; .* with `add_start_token=True`"):
        model.generate("", max_length=4)


def test_the_tokenizer_must_fit_the_vocabulary():
    preprocessor = GriffinCausalLMPreprocessor(ByteTokenizer())
    with pytest.raises(ValueError, match="259 tokens, the backbone knows 61"):
        GriffinCausalLM(GriffinBackbone(**SIZES), preprocessor)


def test_unknown_arguments_are_errors():
    with pytest.raises(TypeError, match="tokenizer"):
        GriffinCausalLM(GriffinBackbone(**SIZES), tokenizer=None)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", None])
def test_the_loss_is_that_of_keras(reduction):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 7, (3, 5))
    logits = rng.normal(size=(3, 5, 7))
    weights = rng.integers(0, 2, (3, 5))
    loss = TokenCrossentropy(reduction=reduction)
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    for sample_weight in (None, weights):
        found, wanted = (
            keras.ops.convert_to_numpy(of(tokens, logits, sample_weight)) for of in (loss, expected)
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert again.reduction == loss.reduction


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", None])
def test_the_loss_minds_the_masks_of_keras(reduction):
    rng = np.random.default_rng(0)
    tokens, weights = rng.integers(0, 7, (3, 5)), rng.random((3, 5))
    logits = rng.normal(size=(3, 5, 7)).astype("float32")
    logits[0, 3:] = 0
    masked = keras.layers.Masking()(logits)
    loss = TokenCrossentropy(reduction=reduction)
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    for sample_weight in (None, weights):
        found, wanted = (
            keras.ops.convert_to_numpy(of(tokens, masked, sample_weight)) for of in (loss, expected)
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_the_loss_casts_neither_logits_nor_tokens(dtype):
    """bfloat16 knows no 257; where it is the loss's dtype, the losses alone are rounded to it."""
    tokens = np.array([[257, 299, 3]])
    logits = np.random.default_rng(0).normal(size=(1, 3, 300)).astype("float32")
    logits = keras.ops.cast(logits, "bfloat16")
    wanted = keras.losses.sparse_categorical_crossentropy(
        tokens, keras.ops.cast(logits, "float32"), from_logits=True
    )
    loss = TokenCrossentropy(dtype=dtype)
    losses = loss.call(keras.ops.convert_to_tensor(tokens), logits)
    assert keras.backend.standardize_dtype(losses.dtype) == (dtype or "float32")
    mean = loss(tokens, logits)
    assert keras.backend.standardize_dtype(mean.dtype) == (dtype or "float32")
    tolerance = 2**-7 if dtype == "bfloat16" else 1e-6
    for found, expected in ((losses, wanted), (mean, keras.ops.mean(wanted))):
        found, expected = map(
            keras.ops.convert_to_numpy, (keras.ops.cast(found, "float32"), expected)
        )
        np.testing.assert_allclose(found, expected, rtol=tolerance)


def test_a_label_without_weight_may_be_any_number():
    """Other libraries pad labels with -100 or -1. They neither count nor have a gradient."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 4)).astype("float32")
    y, weight = rng.integers(0, 7, (2, 3)), np.array([[1, 0, 0.5], [1, 1, 0]], "float32")
    kernel = rng.normal(size=(4, 7))
    results = {}
    for label in (0, -1, -100, 7):
        model = keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(7, use_bias=False)])
        model.set_weights([kernel])
        jit = "auto" if keras.config.backend() == "jax" else False
        model.compile(keras.optimizers.SGD(1.0), TokenCrossentropy(), jit_compile=jit)
        labels = np.where(weight > 0, y, label)
        loss = model.train_on_batch(x, labels, sample_weight=weight)
        results[label] = [loss, *model.get_weights()]
    for label in (-1, -100, 7):
        for found, wanted in zip(results[label], results[0], strict=True):
            np.testing.assert_array_equal(found, wanted)
    counted = TokenCrossentropy()(np.array([[-100]]), x[:1, :1], np.array([[0.5]]))
    assert np.isnan(keras.ops.convert_to_numpy(counted))


def test_the_loss_where_none_is_given():
    assert isinstance(language_model().loss, TokenCrossentropy)
