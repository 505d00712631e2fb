"""Image classifiers of HGRN2."""

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent.models import HGRN2ImageClassifier, HGRN2VisionBackbone
from keras_recurrent.presets.hgrn2 import VISION_SIZES
from tests.layers.table import JIT, arguments_of, assert_rejects
from tests.models.tiny import set_weights

pytestmark = pytest.mark.once

SIZES = {
    "image_shape": (10, 8, 1),
    "patch_size": 2,
    "num_layers": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
    "expand_ratio": 8,
}


def patterns(count, seed):
    """Noisy images of ten patterns, each shifted by up to one pixel, and their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(10, size=count)
    pattern = np.random.default_rng(10).integers(2, size=(10, *SIZES["image_shape"]))
    images = [np.roll(pattern[label], rng.integers(2, size=2), axis=(0, 1)) for label in labels]
    return (images + 0.2 * rng.normal(size=np.shape(images))).astype("float32"), labels


def classifier(**kwargs):
    return HGRN2ImageClassifier(HGRN2VisionBackbone(**{**SIZES, **kwargs}), num_classes=10)


def test_fit_learns_patterns():
    model = classifier()
    model.compile(keras.optimizers.Adam(1e-2), model.loss, metrics=["accuracy"], jit_compile=JIT)
    model.fit(*patterns(1000, seed=0), batch_size=50, epochs=5, verbose=0)
    _, accuracy = model.evaluate(*patterns(200, seed=1), batch_size=50, verbose=0)
    assert accuracy > 0.9


def test_every_output_depends_on_every_patch():
    backbone = HGRN2VisionBackbone(**SIZES)
    set_weights(backbone, seed=0)
    image = patterns(1, seed=0)[0]
    moved = np.repeat(image, 20, axis=0)
    for i in range(20):
        row, column = divmod(i, 4)
        moved[i, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] += 1.0
    outputs = keras.ops.convert_to_numpy(backbone(np.concatenate([image, moved])))
    assert outputs.shape == (21, 5, 4, 16)
    change = np.abs(outputs[1:] - outputs[0]).max(axis=-1)
    assert (change > 1e-5).all()


@pytest.mark.parametrize(("name", "millions"), [("tiny", 6.1), ("small", 23.8)])
def test_preset_has_as_many_parameters_as_in_the_paper(name, millions):
    name, cls = f"hgrn2_vision_{name}", HGRN2ImageClassifier
    listed = cls.presets[name]["metadata"]["params"]
    assert listed == VISION_SIZES[name].parameters
    with keras.StatelessScope(initialize_variables=False):  # weights have shapes, but no values
        model = cls.from_preset(name, compile=False)
        assert listed == sum(int(np.prod(weight.shape)) for weight in model.weights)
    # Keras would give the weights values at the end of the next scope.
    keras.utils.clear_session(free_memory=False)
    assert round(listed / 1e6, 1) == millions


def test_preset_loads_through_this_package_and_keras_hub():
    kwargs = {"num_layers": 1, "image_shape": (32, 32, 3), "num_classes": 7}
    for cls in (HGRN2ImageClassifier, keras_hub.models.ImageClassifier):
        model = cls.from_preset("hgrn2_vision_tiny", **kwargs)
        assert type(model) is HGRN2ImageClassifier
        assert model.output_shape == (None, 7)
        assert model.backbone.output_shape == (None, 2, 2, 192)
    load, name = HGRN2ImageClassifier.from_preset, "hgrn2_vision_tiny"
    assert_rejects("'image_size', which nothing takes", load, name, image_size=32)
    assert_rejects("no published weights", load, name, load_weights=True)


def test_saved_classifier_gives_equal_outputs(tmp_path):
    images, _ = patterns(3, seed=2)
    for dtype, name in [("float32", "preset"), ("mixed_bfloat16", "model.keras")]:
        model = classifier(dtype=dtype)
        set_weights(model, seed=0)
        if name == "preset":
            model.save_to_preset(str(tmp_path / name))
            loaded = HGRN2ImageClassifier.from_preset(str(tmp_path / name))
        else:
            model.save(tmp_path / name)
            loaded = keras.saving.load_model(tmp_path / name)
        assert loaded.backbone.get_config() == model.backbone.get_config()
        expected, found = (m.predict_on_batch(images) for m in (model, loaded))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_enable_lora_trains_only_low_rank_weights():
    model = classifier()
    model.backbone.enable_lora(2)
    trainable = {weight.path.rsplit("/", 2)[1] for weight in model.backbone.trainable_weights}
    assert trainable == {"q_proj", "f_proj", "i_proj", "o_proj"}
    assert all("lora" in weight.path for weight in model.backbone.trainable_weights)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("image_shape", (9, 8, 1), "`image_shape` must be a multiple of `patch_size`"),
        ("image_shape", (8, 8), "`image_shape` must be "),
        ("image_shape", (None, 8, 1), r"`image_shape\[0\]` must be an integer"),
        ("expand_ratio", 5, "`expand_ratio` must divide"),
        *(
            (name, 0, f"`{name}` must be an integer, at least 1; got 0")
            for name in arguments_of(HGRN2VisionBackbone, "size")
        ),
    ],
)
def test_backbone_rejects_invalid_sizes(name, value, match):
    assert_rejects(match, HGRN2VisionBackbone, **{**SIZES, name: value})
