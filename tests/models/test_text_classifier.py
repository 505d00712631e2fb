"""Classifiers of texts, and regression."""

import h5py
import keras
import keras_hub
import numpy as np
import pytest
import torch

from keras_recurrent import models
from keras_recurrent.tokenizers import ByteTokenizer
from tests.models import numpy_griffin, numpy_hgrn2
from tests.models.tiny import (
    FAMILIES,
    FEWER_LAYERS,
    VOCABULARY,
    set_weights,
    tiny_backbone,
    weights_of,
)

CLASSIFIERS = {
    "griffin": (models.GriffinTextClassifier, models.GriffinTextClassifierPreprocessor),
    "hgrn2": (models.HGRN2TextClassifier, models.HGRN2TextClassifierPreprocessor),
}
DOCUMENT = {"griffin": numpy_griffin.document, "hgrn2": numpy_hgrn2.document}
any_classifier = pytest.mark.parametrize("family", CLASSIFIERS)
TEXTS = ["tick", "tock tock", "boom", "tick tick", "no", "tock"] * 2
LABELS = [0, 1, 2, 0, 2, 1] * 2


def classifier(family="hgrn2", num_classes=3, sequence_length=8, num_layers=1, **kwargs):
    """One that reads bytes, with weights from NumPy."""
    cls, preprocessor = CLASSIFIERS[family]
    backbone = tiny_backbone(0, family, vocabulary_size=259, num_layers=num_layers)
    model = cls(
        backbone,
        num_classes,
        preprocessor(ByteTokenizer(), sequence_length=sequence_length),
        **kwargs,
    )
    set_weights(model, seed=0)
    return model


def compiled(model, learning_rate=1e-2):
    # XLA on TensorFlow would compile a step for each source anew.
    jit_compile = "auto" if keras.backend.backend() == "jax" else False
    model.compile(keras.optimizers.Adam(learning_rate), jit_compile=jit_compile)
    return model


def last_hidden_state(family, backbone, tokens):
    """In float64: the logits of a language model whose matrix is then taken off."""
    weights = {path: array.astype("float64") for path, array in weights_of(backbone).items()}
    name = "token_embedding/reverse_embeddings"
    logits = DOCUMENT[family](weights, backbone.get_config(), tokens)[-1]
    return logits @ np.linalg.pinv(weights.get(name, weights["token_embedding/embeddings"].T))


@any_classifier
@pytest.mark.parametrize("bidirectional", [False, True])
def test_outputs_are_a_map_of_the_last_real_token(family, bidirectional):
    cls, _ = CLASSIFIERS[family]
    backbone = tiny_backbone(0, family, **FEWER_LAYERS)
    model = cls(backbone, 3, bidirectional=bidirectional, activation="softmax")
    set_weights(model, seed=1)
    token_ids = np.random.default_rng(0).integers(0, VOCABULARY, (6, 9)).astype("int32")
    real = np.ones_like(token_ids)
    real[1, 6:] = 0  # behind, in front, in between, only one token is real, none is
    real[2, :3] = 0
    real[3, [0, 4, 8]] = 0
    real[4, 1:] = 0
    real[5] = 0
    token_ids[0, -1] = 0  # a token that other tokenizers pad with
    found = model.predict_on_batch({"token_ids": token_ids, "padding_mask": real})

    weights = weights_of(model)
    kernel, bias = weights["logits/kernel"], weights["logits/bias"]
    for row, mask, got in zip(token_ids, real > 0, found, strict=True):
        tokens = row[mask]
        directions = [tokens, tokens[::-1]] if bidirectional else [tokens]
        hidden = [
            last_hidden_state(family, backbone, t) if len(t) else np.zeros(16) for t in directions
        ]
        z = np.concatenate(hidden) @ kernel + bias
        np.testing.assert_allclose(got, np.exp(z) / np.exp(z).sum(), rtol=1e-3, atol=1e-5)


@pytest.mark.once
def test_it_learns_what_strings_begin_with_and_end_with():
    """Eight classes: two letters at the ends of texts of all lengths."""
    rng = np.random.default_rng(0)
    texts, labels = [], []
    for label in rng.integers(4, size=240):
        between = "".join(rng.choice(list("abc"), rng.integers(0, 12)))
        texts.append("xy"[label // 2] + between + "xy"[label % 2])
        labels.append(label)
    model = compiled(classifier(num_classes=4, sequence_length=16, bidirectional=True))
    model.fit(texts[:200], labels[:200], batch_size=20, epochs=8, verbose=0)
    assert (model.predict(texts[200:], verbose=0).argmax(axis=1) == labels[200:]).mean() > 0.9


@pytest.mark.once
def test_regression():
    model = compiled(classifier(num_classes=1))
    assert isinstance(model.loss, keras.losses.MeanSquaredError)
    texts = ["a" * n for n in range(1, 7)] * 4
    targets = [float(len(text)) - 3 for text in texts]
    history = model.fit(texts, targets, batch_size=8, epochs=40, verbose=0).history
    assert list(history) == ["loss", "mean_absolute_error"]
    wanted = np.square(model.predict(texts, verbose=0)[:, 0] - targets).mean()
    found = model.evaluate(texts, targets, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert wanted < 0.3  # their variance is 2.9


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        part = slice(3 * index, 3 * index + 3)
        return np.array(TEXTS[part]), np.array(LABELS[part])


def tensorflow_dataset():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)).batch(3)


def torch_loader():
    return torch.utils.data.DataLoader(list(zip(TEXTS, LABELS, strict=True)), batch_size=3)


def grain_dataset():
    import grain

    return grain.MapDataset.source(list(zip(TEXTS, LABELS, strict=True))).batch(3)


def generator():
    for _ in range(3):  # Keras looks at two batches before the first
        yield from (Batches()[i] for i in range(4))


SOURCES = {
    "tf.data": tensorflow_dataset,
    "torch": torch_loader,
    "grain": grain_dataset,
    "PyDataset": Batches,
    "a generator": generator,
}


@pytest.mark.once
def test_every_source_trains_as_lists_do():
    model = classifier()
    model.compile(keras.optimizers.SGD(0.1))
    start = model.get_weights()

    def losses(x, y=None, **kwargs):
        model.set_weights(start)
        history = model.fit(x, y, shuffle=False, verbose=0, **kwargs).history
        return [history["loss"][0], history["val_loss"][0]]

    held_out = {"validation_data": (TEXTS, LABELS), "validation_batch_size": 3}
    wanted = losses(TEXTS, LABELS, batch_size=3, **held_out)
    assert wanted[0] != wanted[1]
    assert losses(np.array(TEXTS), np.array(LABELS), batch_size=3, **held_out) == wanted
    tokens = keras.tree.map_structure(keras.ops.convert_to_numpy, model.preprocessor(TEXTS))
    found = losses(tokens, LABELS, batch_size=3, validation_data=(tokens, LABELS))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for name, make in SOURCES.items():
        steps = 4 if name == "a generator" else None
        found = losses(make(), steps_per_epoch=steps, **held_out)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=name)
        loss = model.evaluate(make(), steps=steps, verbose=0)[0]
        np.testing.assert_allclose(loss, wanted[1], rtol=1e-5, err_msg=name)
    weighted = losses(TEXTS, LABELS, batch_size=3, sample_weight=[2.0] * 12, **held_out)
    np.testing.assert_allclose(weighted[0], 2 * wanted[0], rtol=0.1)
    assert (
        losses(TEXTS, LABELS, batch_size=3, class_weight={0: 0.0, 1: 0.0, 2: 0.0}, **held_out)[0]
        == 0
    )


@pytest.mark.once
def test_the_preprocessor_by_hand():
    make = models.HGRN2TextClassifierPreprocessor
    preprocessor = make(ByteTokenizer(), sequence_length=7)
    a, b = 100, 101
    x, y, weight = preprocessor(["ab", "abababab", ""], np.array([3, 4, 5]), np.ones(3))
    assert sorted(x) == ["padding_mask", "token_ids"]
    x = keras.tree.map_structure(keras.ops.convert_to_numpy, x)
    rows = [[1, a, b, 2, 0, 0, 0], [1, a, b, a, b, a, 2], [1, 2, 0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(x["token_ids"], rows)
    np.testing.assert_array_equal(x["padding_mask"], np.array(rows) > 0)
    assert keras.ops.convert_to_numpy(y).tolist() == [3, 4, 5]
    assert keras.ops.convert_to_numpy(weight).tolist() == [1, 1, 1]
    pair = preprocessor(x=(["aaaa"], ["bb"]))
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(pair["token_ids"]), [[1, a, a, 2, b, b, 2]]
    )
    waterfall = make(ByteTokenizer(), sequence_length=7, truncate="waterfall")(x=("aaaa", "bb"))
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(waterfall["token_ids"]), [1, a, a, a, a, 2, 2]
    )


@pytest.mark.once
def test_pairs_of_texts():
    """They train as their tokens do, wherever they come from."""
    pair = TEXTS, TEXTS[::-1]
    model = classifier(sequence_length=12)
    tokens = model.preprocessor(x=pair)
    wanted = model.predict(tokens, verbose=0)
    np.testing.assert_array_equal(model.predict(pair, verbose=0), wanted)
    losses = []
    for x, kwargs in [
        (pair, {"y": LABELS, "validation_data": (pair, LABELS)}),
        (tokens, {"y": LABELS, "validation_data": (tokens, LABELS)}),
        ([(pair, LABELS)], {"steps_per_epoch": 1}),
    ]:
        model = compiled(classifier(sequence_length=12))
        data = (batch for batch in x * 4) if isinstance(x, list) else x
        model.fit(data, batch_size=12, shuffle=False, verbose=0, **kwargs)
        losses.append(model.evaluate(pair, LABELS, verbose=0)[0])
    np.testing.assert_allclose(losses[:2], losses[0], rtol=1e-6)
    assert np.isfinite(losses[2])


@pytest.mark.once
def test_clones_and_functional_parts(tmp_path):
    model = classifier(bidirectional=True)
    tokens = model.preprocessor(TEXTS)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(
        clone.predict(tokens, verbose=0), model.predict(tokens, verbose=0)
    )
    keras.Model(model.input, model.output).save(tmp_path / "part.keras")
    part = keras.models.load_model(tmp_path / "part.keras")
    np.testing.assert_array_equal(part.predict(tokens, verbose=0), model.predict(tokens, verbose=0))


@pytest.mark.once
def test_it_saves(tmp_path):
    for family, bidirectional, dtype in (
        ("griffin", True, "float32"),
        ("hgrn2", False, "mixed_bfloat16"),
    ):
        cls, preprocessor = CLASSIFIERS[family]
        sizes = {**FAMILIES[family].sizes, "vocabulary_size": 259, "num_layers": 1, "dtype": dtype}
        made_of = preprocessor(ByteTokenizer(), sequence_length=8)
        model = cls(FAMILIES[family].backbone(**sizes), 3, made_of, bidirectional, dropout=0.1)
        set_weights(model, seed=0)
        wanted = model.predict_on_batch(TEXTS[:3])
        assert wanted.dtype == "float32"
        path = tmp_path / family
        if family == "griffin":
            model.save_to_preset(str(path))
            again = cls.from_preset(str(path))
        else:
            model.save(path.with_suffix(".keras"))
            again = keras.saving.load_model(path.with_suffix(".keras"))
        assert type(again) is cls
        assert again.get_config()["bidirectional"] is bidirectional
        assert (again.dropout, again.num_classes) == (0.1, 3)
        found = again.predict_on_batch(TEXTS[:3])
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.once
def test_training_goes_on_from_a_file(tmp_path):
    model = compiled(classifier())
    model.fit(TEXTS, LABELS, batch_size=6, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    losses = [m.train_on_batch(TEXTS, np.array(LABELS)) for m in (model, again) for _ in range(2)]
    np.testing.assert_allclose(losses[:2], losses[2:], rtol=1e-5)


@pytest.mark.once
def test_names_load_through_our_classes_and_kerashubs():
    for name, family in (("griffin_tiny", "griffin"), ("hgrn2_tiny", "hgrn2")):
        cls, preprocessor = CLASSIFIERS[family]
        for caller in (cls, keras_hub.models.TextClassifier):
            model = caller.from_preset(name, num_classes=7, num_layers=1, sequence_length=9)
            assert type(model) is cls
            assert model.output_shape == (None, 7)
            assert type(model.preprocessor) is preprocessor
            assert model.preprocessor.sequence_length == 9
        theirs = keras_hub.models.TextClassifierPreprocessor.from_preset(name, sequence_length=9)
        assert type(theirs) is preprocessor
        assert name in cls.presets
    with pytest.raises(ValueError, match="`num_classes` is needed"):
        models.HGRN2TextClassifier.from_preset("hgrn2_tiny", num_layers=1)
    with pytest.raises(ValueError, match="'packed', which nothing takes"):
        models.HGRN2TextClassifier.from_preset("hgrn2_tiny", num_classes=2, packed=True)
    with pytest.raises(ValueError, match="is no preset of `HGRN2TextClassifier`"):
        models.HGRN2TextClassifier.from_preset("hawk_tiny", num_classes=2)


@pytest.mark.once
def test_a_language_model_becomes_a_classifier(tmp_path):
    row, sizes = FAMILIES["hgrn2"], {**FAMILIES["hgrn2"].sizes, "vocabulary_size": 259}
    trained = row.causal_lm(row.backbone(**sizes), row.preprocessor(row.tokenizer()))
    set_weights(trained, seed=3)
    trained.save_to_preset(str(tmp_path))
    with pytest.raises(ValueError, match="`num_classes` is needed"):
        models.HGRN2TextClassifier.from_preset(str(tmp_path))
    model = models.HGRN2TextClassifier.from_preset(str(tmp_path), num_classes=2, sequence_length=8)
    for path, array in weights_of(trained.backbone).items():
        np.testing.assert_array_equal(weights_of(model.backbone)[path], array)
    assert model.predict(TEXTS, verbose=0).shape == (12, 2)


@pytest.mark.once
def test_a_directory_of_a_trained_classifier_has_no_optimizer(tmp_path):
    """The one that reads it is compiled anew, and trains."""
    model = compiled(classifier())
    model.fit(TEXTS, LABELS, batch_size=4, verbose=0)
    model.save_to_preset(str(tmp_path))
    assert int(model.optimizer.iterations) == 3
    again = models.HGRN2TextClassifier.from_preset(str(tmp_path))
    wanted = model.predict(TEXTS, verbose=0)
    np.testing.assert_allclose(again.predict(TEXTS, verbose=0), wanted, rtol=1e-5, atol=1e-6)
    with h5py.File(tmp_path / "task.weights.h5") as file:
        assert "optimizer" not in file
    compiled(again).fit(TEXTS, LABELS, batch_size=4, verbose=0)


@pytest.mark.once
def test_missing_weights_of_the_classes_are_an_error(tmp_path):
    model = classifier()
    model.save_to_preset(str(tmp_path))
    (tmp_path / "task.weights.h5").unlink()
    with pytest.raises(FileNotFoundError, match=r"no task.weights.h5.*`num_classes=`"):
        models.HGRN2TextClassifier.from_preset(str(tmp_path))
    again = models.HGRN2TextClassifier.from_preset(str(tmp_path), num_classes=5)
    assert again.output_shape == (None, 5)
    for name in ("task.json", "tokenizer.json"):
        (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=r"neither task.json nor tokenizer.json"):
        models.HGRN2TextClassifier.from_preset(str(tmp_path), num_classes=5)


def test_unused_weights_are_frozen():
    """Fails on JAX, where Keras makes weights trainable that were frozen too early."""
    frozen = [w.name for w in classifier().non_trainable_weights]
    assert frozen == ["reverse_embeddings"]


@pytest.mark.once
@pytest.mark.filterwarnings("error:Gradients do not exist")
def test_only_what_is_used_is_trained():
    """Logits of tokens are not; with LoRA, low-rank weights and the classes are."""
    model = compiled(classifier())
    frozen = {w.name for w in model.backbone.weights} - {w.name for w in model.trainable_weights}
    assert frozen == {"reverse_embeddings"}
    model.backbone.enable_lora(2)
    compiled(model)
    before = weights_of(model)
    model.fit(TEXTS, LABELS, verbose=0)
    changed = {path for path, array in weights_of(model).items() if (array != before[path]).any()}
    wanted = {path for path in before if "lora" in path}
    assert wanted
    # The first step cannot tell the others from the factor that is still 0.
    assert {path for path in wanted if "kernel_b" in path} < changed
    assert changed <= wanted | {"logits/kernel", "logits/bias"}


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
def test_int8_saves(tmp_path):
    model = classifier()
    wanted = model.predict(TEXTS, verbose=0)
    model.quantize("int8")
    quantized = {layer.name for layer in model._flatten_layers() if layer.quantization_mode}
    assert {"q_proj", "token_embedding"} < quantized
    assert "logits" not in quantized
    found = model.predict(TEXTS, verbose=0)
    np.testing.assert_allclose(found, wanted, atol=0.1 * np.abs(wanted).max())
    model.save_to_preset(str(tmp_path))
    again = models.HGRN2TextClassifier.from_preset(str(tmp_path))
    np.testing.assert_allclose(again.predict(TEXTS, verbose=0), found, rtol=1e-5, atol=1e-6)


@pytest.mark.once
def test_bad_parts_and_labels():
    cls, preprocessor = CLASSIFIERS["hgrn2"]
    backbone = tiny_backbone(0, "hgrn2", num_layers=1)
    for kwargs, match in [
        ({}, "`num_classes` is needed: the number of classes, or 1 for regression"),
        ({"num_classes": 0}, "`num_classes` must be an integer, at least 1; got 0"),
        ({"num_classes": 2, "bidirectional": 1}, "`bidirectional` must be"),
        ({"num_classes": 2, "preprocessor": preprocessor(ByteTokenizer())}, "has 259 tokens, the"),
        (
            {"num_classes": 2, "preprocessor": models.HGRN2CausalLMPreprocessor(ByteTokenizer())},
            "`preprocessor` must be a `HGRN2TextClassifierPreprocessor`",
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            cls(backbone, **kwargs)
    with pytest.raises(ValueError, match="`backbone` must be a `GriffinBackbone`"):
        models.GriffinTextClassifier(backbone, 2)
    for kwargs, match in [
        ({"sequence_length": 2}, "`sequence_length` must be at least 3"),
        ({"sequence_length": 0.5}, "`sequence_length` must be an integer"),
        ({"truncate": "left"}, "`truncate` must be 'round_robin' or 'waterfall'; got 'left'"),
    ]:
        with pytest.raises(ValueError, match=match):
            preprocessor(ByteTokenizer(), **kwargs)
    model = classifier()
    tokens = model.preprocessor(TEXTS)
    for x, y, match in [
        (TEXTS, None, r"`y` is needed with `x`: a label for each text, as in `model.fit\(texts"),
        (TEXTS, LABELS[:5], "one entry for each string; got 5 and 12|12 and 5"),
        (TEXTS, [3] * 12, "`y` must be integers from 0 to 2, .* got numbers from 3 to 3"),
        (TEXTS, [-1] * 12, "got numbers from -1 to -1"),
        (TEXTS, [0.5] * 12, "from 0.5 to 0.5.*`num_classes=1`"),
        (TEXTS, ["spam"] * 12, "`y` must be integers .* got <U4"),
        (tokens, None, "`y` is needed with `x`"),
        (tokens, [7] * 12, "got numbers from 7 to 7"),
        (
            {**tokens, "segment_ids": tokens["token_ids"]},
            LABELS,
            "`x` has `segment_ids`, but a classifier",
        ),
        ("tick", [0], "`x` must be several strings, .* got one string"),
    ]:
        with pytest.raises(ValueError, match=match):
            model.fit(x, y, verbose=0)
        with pytest.raises(ValueError, match=match):
            model.evaluate(x, y, verbose=0)
    one_hot = np.eye(3)[LABELS]
    with pytest.raises(ValueError, match=r"the shape \(12, 3\).*CategoricalCrossentropy"):
        model.fit(TEXTS, one_hot, verbose=0)
    with pytest.raises(ValueError, match=r"a pair must have as many first texts .*; got 12 and 3"):
        model.fit((TEXTS, TEXTS[:3]), LABELS, verbose=0)
    with pytest.raises(ValueError, match=r"must be several strings, .* got one string"):
        model.predict("tick", verbose=0)
    regression = classifier(num_classes=1)
    for y, match in [
        (one_hot, r"`y` must be finite numbers, one for each sample; got the shape \(12, 3\)"),
        (["1"] * 12, "got <U1"),
        ([np.nan] * 12, "got NaN or infinity"),
    ]:
        with pytest.raises(ValueError, match=match):
            regression.fit(TEXTS, y, verbose=0)
    with pytest.raises(ValueError, match="`y` is needed with `validation_data`"):
        model.fit(TEXTS, LABELS, validation_data=TEXTS, verbose=0)
