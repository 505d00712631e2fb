"""Text classifiers and text regression."""

import h5py
import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent import models
from keras_recurrent.tokenizers import ByteTokenizer
from tests.layers.table import JIT, assert_rejects, numpy
from tests.models import reference
from tests.models.data_sources import make_sources
from tests.models.tiny import (
    FEWER_LAYERS,
    NIGHTLY_IF_COMPILED,
    VOCABULARY,
    set_weights,
    tiny_backbone,
    weights_of,
)

pytestmark = pytest.mark.once

CLASSIFIERS = {
    "griffin": (models.GriffinTextClassifier, models.GriffinTextClassifierPreprocessor),
    "hgrn2": (models.HGRN2TextClassifier, models.HGRN2TextClassifierPreprocessor),
    "lfm2": (models.LFM2TextClassifier, models.LFM2TextClassifierPreprocessor),
}
TEXTS = ["tick", "tock tock", "boom", "tick tick", "no", "tock"] * 2
LABELS = [0, 1, 2, 0, 2, 1] * 2


def classifier(family="hgrn2", num_classes=3, sequence_length=8, dtype=None, **kwargs):
    """A compiled classifier on bytes with weights from NumPy."""
    cls, preprocessor = CLASSIFIERS[family]
    backbone = tiny_backbone(0, family, vocabulary_size=259, num_layers=1, dtype=dtype)
    preprocessor = preprocessor(ByteTokenizer(), sequence_length=sequence_length)
    model = cls(backbone, num_classes, preprocessor, **kwargs)
    set_weights(model, seed=0)
    return compiled(model)


def compiled(model):
    model.compile(keras.optimizers.Adam(0.01), jit_compile=JIT)
    return model


def last_hidden_state(family, backbone, tokens):
    """The reference's logits of the last token, multiplied by the inverse of the output matrix."""
    weights = {path: array.astype("float64") for path, array in weights_of(backbone).items()}
    name = "token_embedding/reverse_embeddings"
    logits = reference.document_logits(family, weights, backbone.get_config(), tokens)[-1]
    return logits @ np.linalg.pinv(weights.get(name, weights["token_embedding/embeddings"].T))


@pytest.mark.every_backend
@pytest.mark.parametrize(
    ("family", "bidirectional"),
    [
        ("griffin", True),
        *(pytest.param(name, False, marks=NIGHTLY_IF_COMPILED) for name in ("hgrn2", "lfm2")),
    ],
)
def test_classifier_reads_the_last_real_token_of_each_direction(family, bidirectional):
    backbone = tiny_backbone(0, family, **FEWER_LAYERS)
    cls, _ = CLASSIFIERS[family]
    model = cls(backbone, 3, bidirectional=bidirectional, activation="softmax")
    set_weights(model, seed=1)
    token_ids = np.random.default_rng(0).integers(0, VOCABULARY, (6, 9)).astype("int32")
    real = np.ones_like(token_ids)
    real[1, 6:] = 0  # padding at the end, at the beginning, in between,
    real[2, :3] = 0
    real[3, [0, 4, 8]] = 0
    real[4, 1:] = 0  # everywhere except at one token, and everywhere
    real[5] = 0
    token_ids[0, -1] = 0  # a token that other tokenizers pad with
    outputs = model.predict_on_batch({"token_ids": token_ids, "padding_mask": real})

    weights = weights_of(model)
    for row, mask, output in zip(token_ids, real > 0, outputs, strict=True):
        tokens = row[mask]
        directions = [tokens, tokens[::-1]] if bidirectional else [tokens]
        hidden = [
            last_hidden_state(family, backbone, t) if len(t) else np.zeros(16) for t in directions
        ]
        z = np.concatenate(hidden) @ weights["logits/kernel"] + weights["logits/bias"]
        np.testing.assert_allclose(output, np.exp(z) / np.exp(z).sum(), rtol=1e-3, atol=1e-5)


def test_regression_minimizes_the_squared_error():
    model, targets = classifier(num_classes=1), np.linspace(-1, 1, len(TEXTS))
    history = model.fit(TEXTS, targets, batch_size=12, epochs=5, verbose=0).history
    assert list(history) == ["loss", "mean_absolute_error"]
    assert history["loss"][-1] < history["loss"][0]
    expected = np.square(model.predict(TEXTS, verbose=0)[:, 0] - targets).mean()
    loss = model.evaluate(TEXTS, targets, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


SOURCES = make_sources(
    list(zip(TEXTS, LABELS, strict=True)), (np.array(TEXTS), np.array(LABELS)), batch_size=3
)


def test_labeled_texts_of_every_source_give_the_losses_of_lists():
    model = classifier()
    model.compile(keras.optimizers.SGD(0.1))
    start = model.get_weights()

    def losses(x, y=None, **kwargs):
        model.set_weights(start)
        history = model.fit(x, y, shuffle=False, verbose=0, **kwargs).history
        return [history["loss"][0], history["val_loss"][0]]

    held_out = {"validation_data": (TEXTS, LABELS), "validation_batch_size": 3}
    expected = losses(TEXTS, LABELS, batch_size=3, **held_out)
    assert expected[0] != expected[1]
    assert losses(np.array(TEXTS), np.array(LABELS), batch_size=3, **held_out) == expected
    tokens = numpy(model.preprocessor(TEXTS))
    found = losses(tokens, LABELS, batch_size=3, validation_data=(tokens, LABELS))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for name, make in SOURCES.items():
        steps = 4 if name == "generator" else None
        found = losses(make(), steps_per_epoch=steps, **held_out)
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)
        loss = model.evaluate(make(), steps=steps, verbose=0)[0]
        np.testing.assert_allclose(loss, expected[1], rtol=1e-5, err_msg=name)
    weighted = losses(TEXTS, LABELS, batch_size=3, sample_weight=[2.0] * 12, **held_out)
    np.testing.assert_allclose(weighted[0], 2 * expected[0], rtol=0.1)
    no_class = {"class_weight": {0: 0.0, 1: 0.0, 2: 0.0}, **held_out}
    assert losses(TEXTS, LABELS, batch_size=3, **no_class)[0] == 0


def test_preprocessor_truncates_and_pads_texts_and_pairs():
    make, a, b = models.HGRN2TextClassifierPreprocessor, 100, 101
    preprocessor = make(ByteTokenizer(), sequence_length=7)
    x, y, weight = numpy(preprocessor(["ab", "abababab", ""], np.array([3, 4, 5]), np.ones(3)))
    token_ids = [[1, a, b, 2, 0, 0, 0], [1, a, b, a, b, a, 2], [1, 2, 0, 0, 0, 0, 0]]
    assert sorted(x) == ["padding_mask", "token_ids"]
    np.testing.assert_array_equal(x["token_ids"], token_ids)
    np.testing.assert_array_equal(x["padding_mask"], np.array(token_ids) > 0)
    assert (y.tolist(), weight.tolist()) == ([3, 4, 5], [1, 1, 1])
    pair = preprocessor(x=(["aaaa"], ["bb"]))
    np.testing.assert_array_equal(numpy(pair["token_ids"]), [[1, a, a, 2, b, b, 2]])
    waterfall = make(ByteTokenizer(), sequence_length=7, truncate="waterfall")(x=("aaaa", "bb"))
    np.testing.assert_array_equal(numpy(waterfall["token_ids"]), [1, a, a, a, a, 2, 2])


def test_pairs_of_texts_train_as_their_tokens():
    pair = TEXTS, TEXTS[::-1]
    model = classifier(sequence_length=12)
    tokens = model.preprocessor(x=pair)
    expected = model.predict(tokens, verbose=0)
    np.testing.assert_array_equal(model.predict(pair, verbose=0), expected)
    losses = []
    for x, kwargs in [
        (pair, {"y": LABELS, "validation_data": (pair, LABELS)}),
        (tokens, {"y": LABELS, "validation_data": (tokens, LABELS)}),
        (((pair, LABELS) for _ in range(4)), {"steps_per_epoch": 1}),
    ]:
        model = classifier(sequence_length=12)
        model.fit(x, batch_size=12, shuffle=False, verbose=0, **kwargs)
        losses.append(model.evaluate(pair, LABELS, verbose=0)[0])
    np.testing.assert_allclose(losses[:2], losses[0], rtol=1e-6)
    assert np.isfinite(losses[2])


def test_clones_and_saved_functional_models_of_a_classifier_give_its_outputs(tmp_path):
    model = classifier(bidirectional=True)
    tokens = model.preprocessor(TEXTS)
    expected = model.predict(tokens, verbose=0)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    keras.Model(model.input, model.output).save(tmp_path / "part.keras")
    for other in (clone, keras.models.load_model(tmp_path / "part.keras")):
        np.testing.assert_array_equal(other.predict(tokens, verbose=0), expected)


@pytest.mark.parametrize(
    ("family", "bidirectional", "dtype"),
    [("griffin", True, "float32"), ("hgrn2", False, "mixed_bfloat16")],
)
def test_saved_classifier_loads_with_its_outputs_and_options(
    family, bidirectional, dtype, tmp_path
):
    model = classifier(family, dtype=dtype, bidirectional=bidirectional, dropout=0.1)
    model.train_on_batch(TEXTS, np.array(LABELS))
    expected = model.predict_on_batch(TEXTS[:3])
    assert expected.dtype == "float32"
    if family == "griffin":
        model.save_to_preset(str(tmp_path))
        with h5py.File(tmp_path / "task.weights.h5") as file:
            assert "optimizer" not in file
        loaded = type(model).from_preset(str(tmp_path))
    else:
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded) is type(model)
    options = loaded.get_config()["bidirectional"], loaded.dropout, loaded.num_classes
    assert options == (bidirectional, 0.1, 3)
    found = loaded.predict_on_batch(TEXTS[:3])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    if family == "hgrn2":  # a `.keras` file has the state of the optimizer
        assert int(loaded.optimizer.iterations) == 1
        states = (numpy([v.value for v in m.optimizer.variables]) for m in (model, loaded))
        keras.tree.map_structure(np.testing.assert_array_equal, *states)


def test_preset_names_load_classifiers_through_this_package_and_keras_hub():
    for name, family in (("griffin_tiny", "griffin"), ("hgrn2_tiny", "hgrn2")):
        cls, preprocessor = CLASSIFIERS[family]
        for caller in (cls, keras_hub.models.TextClassifier):
            model = caller.from_preset(name, num_classes=7, num_layers=1, sequence_length=9)
            assert type(model) is cls
            assert model.output_shape == (None, 7)
            assert type(model.preprocessor) is preprocessor
            assert model.preprocessor.sequence_length == 9
        other = keras_hub.models.TextClassifierPreprocessor.from_preset(name, sequence_length=9)
        assert type(other) is preprocessor
        assert name in cls.presets
    load = models.HGRN2TextClassifier.from_preset
    assert_rejects("`num_classes` is needed", load, "hgrn2_tiny", num_layers=1)
    match = "'packed', which nothing takes"
    assert_rejects(match, load, "hgrn2_tiny", num_classes=2, packed=True)
    match = "is no preset of `HGRN2TextClassifier`"
    assert_rejects(match, load, "hawk_tiny", num_classes=2)


def test_from_preset_names_missing_files_of_a_classifier(tmp_path):
    load = models.HGRN2TextClassifier.from_preset
    classifier().save_to_preset(str(tmp_path))
    (tmp_path / "task.weights.h5").unlink()
    with pytest.raises(FileNotFoundError, match=r"no task.weights.h5.*`num_classes=`"):
        load(str(tmp_path))
    assert load(str(tmp_path), num_classes=5).output_shape == (None, 5)
    for name in ("task.json", "tokenizer.json"):
        (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=r"neither task.json nor tokenizer.json"):
        load(str(tmp_path), num_classes=5)


@pytest.mark.every_backend
def test_output_matrix_of_the_language_model_is_frozen_in_a_classifier():
    """Fails on JAX, where Keras makes weights trainable that were frozen too early."""
    frozen = [w.name for w in classifier().non_trainable_weights]
    assert frozen == ["reverse_embeddings"]


def test_quantize_of_a_classifier_leaves_its_last_layer():
    """KerasHub's files do not store the dtype of the last layer."""
    model = classifier()
    model.quantize("int8")
    quantized = {layer.name for layer in model._flatten_layers() if layer.quantization_mode}
    assert {"q_proj", "token_embedding"} < quantized
    assert "logits" not in quantized


def test_classifier_and_preprocessor_reject_invalid_arguments():
    cls, preprocessor = CLASSIFIERS["hgrn2"]
    backbone = tiny_backbone(0, "hgrn2", num_layers=1)
    other = models.HGRN2CausalLMPreprocessor(ByteTokenizer())
    for kwargs, match in [
        ({}, "`num_classes` is needed: the number of classes, or 1 for regression"),
        ({"num_classes": 0}, "`num_classes` must be an integer, at least 1; got 0"),
        ({"num_classes": 2, "bidirectional": 1}, "`bidirectional` must be"),
        ({"num_classes": 2, "preprocessor": preprocessor(ByteTokenizer())}, "has 259 tokens, the"),
        ({"num_classes": 2, "preprocessor": other}, "must be a `HGRN2TextClassifierPreprocessor`"),
    ]:
        assert_rejects(match, cls, backbone, **kwargs)
    match = "`backbone` must be a `GriffinBackbone`"
    assert_rejects(match, models.GriffinTextClassifier, backbone, 2)
    for kwargs, match in [
        ({"sequence_length": 2}, "`sequence_length` must be at least 3"),
        ({"sequence_length": 0.5}, "`sequence_length` must be an integer"),
        ({"truncate": "left"}, "`truncate` must be 'round_robin' or 'waterfall'; got 'left'"),
    ]:
        assert_rejects(match, preprocessor, ByteTokenizer(), **kwargs)


def test_fit_and_evaluate_of_a_classifier_reject_invalid_texts_and_labels():
    model, regression = classifier(), classifier(num_classes=1)
    tokens, one_hot = model.preprocessor(TEXTS), np.eye(3)[LABELS]
    for x, y, match in [
        (TEXTS, None, r"`y` is needed with `x`: a label for each text, as in `model.fit\(texts"),
        (TEXTS, LABELS[:5], "one entry for each string; got 5 and 12|12 and 5"),
        (TEXTS, [3] * 12, "`y` must be integers from 0 to 2, .* got numbers from 3 to 3"),
        (TEXTS, [-1] * 12, "got numbers from -1 to -1"),
        (TEXTS, [0.5] * 12, "from 0.5 to 0.5.*`num_classes=1`"),
        (TEXTS, ["spam"] * 12, "`y` must be integers .* got <U4"),
        (TEXTS, one_hot, r"the shape \(12, 3\).*CategoricalCrossentropy"),
        ((TEXTS, TEXTS[:3]), LABELS, r"a pair must have as many first texts .*; got 12 and 3"),
        (tokens, None, "`y` is needed with `x`"),
        (tokens, [7] * 12, "got numbers from 7 to 7"),
        ({**tokens, "segment_ids": 0}, LABELS, "`x` has `segment_ids`, but a classifier"),
        ("tick", [0], "`x` must be several strings, .* got one string"),
    ]:
        for use in (model.fit, model.evaluate):
            assert_rejects(match, use, x, y, verbose=0)
    match = r"must be several strings, .* got one string"
    assert_rejects(match, model.predict, "tick", verbose=0)
    match = "`y` is needed with `validation_data`"
    assert_rejects(match, model.fit, TEXTS, LABELS, validation_data=TEXTS, verbose=0)
    for y, match in [
        (one_hot, r"`y` must be finite numbers, one for each sample; got the shape \(12, 3\)"),
        (["1"] * 12, "got <U1"),
        ([np.nan] * 12, "got NaN or infinity"),
    ]:
        assert_rejects(match, regression.fit, TEXTS, y, verbose=0)
