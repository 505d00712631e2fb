"""Layers and models in the test harnesses of Keras and KerasHub.

Other tests do not import private modules of these packages.
"""

from typing import Any, NamedTuple

import keras
import keras_hub
import numpy as np
import pytest

from keras_recurrent import layers, models
from keras_recurrent.tokenizers import ByteTokenizer
from tests.layers.table import ROWS, WIDTH
from tests.models.test_hgrn2_image_classifier import SIZES as VISION_SIZES
from tests.models.tiny import FAMILIES, any_family

# The harnesses train on datasets, and leave it to Keras to shuffle them.
pytestmark = [
    pytest.mark.once,  # tests/layers and tests/models have all backends
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed, but will be ignored"),
]

BATCH, LENGTH = 2, 5
# Two blocks: in a Griffin, one of them is local attention.
SIZES = {family: {**row.sizes, "num_layers": 2} for family, row in FAMILIES.items()}
VISION_SIZES = {**VISION_SIZES, "num_layers": 1}


class Layer(NamedTuple):
    make: Any
    shape: tuple = (BATCH, LENGTH, WIDTH)
    output_shape: tuple = (BATCH, LENGTH, WIDTH)
    masks: bool = True  # whether inputs may have a mask
    options: dict = {}  # of the harness


LAYERS = {name: Layer(row.make) for name, row in ROWS.items()} | {
    "BidirectionalHGRN2": Layer(
        lambda **kwargs: layers.BidirectionalHGRN2(expand_ratio=4, **kwargs)
    ),
    "LowerBounds": Layer(
        lambda **kwargs: layers.LowerBounds(3, **kwargs), output_shape=(2, 2, WIDTH)
    ),
    "LRPE": Layer(
        layers.LRPE,
        shape=(BATCH, LENGTH, 2, 4),
        output_shape=(BATCH, LENGTH, 2, 8),
        masks=False,
        options={
            "call_kwargs": {"positions": np.tile(np.arange(LENGTH, dtype="int32"), (BATCH, 1))},
            # There the harness calls the layer on its first tensor alone, without positions.
            "run_training_check": False,
            "run_mixed_precision_check": False,
        },
    ),
    # The harness trains, and Keras warns of a model that has nothing to train.
    "SimpleRMSNorm": Layer(ROWS["SimpleRMSNorm"].make, options={"run_training_check": False}),
}


def test_table_of_harnesses_has_every_public_layer():
    here = {type(row.make()).__name__ for row in LAYERS.values()}
    public = {name: getattr(layers, name) for name in layers.__all__}
    every = {name for name, cls in public.items() if issubclass(cls, keras.Layer)}
    assert here == every - {"StreamingLayer"}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_passes_keras_run_layer_test(name):
    from keras.src.testing import TestCase

    case, row = TestCase("run_layer_test"), LAYERS[name]
    case.setUp()
    case.run_layer_test(
        row.make,
        init_kwargs={},
        input_shape=row.shape,
        expected_output_shape=row.output_shape,
        expected_output_dtype="float32",
        expected_num_losses=0,
        expected_num_seed_generators=0,
        supports_masking=row.masks,
        **row.options,
    )


# Weights that are float32 under a policy of 16 bits too, as their layers' docstrings say.
IN_FLOAT32 = ("a_logit", "conv1d/kernel", "conv1d/bias", "lower_bounds/logits", "lrpe/theta")


def harness(name):
    """Returns a method of KerasHub's `TestCase`, whose module imports TensorFlow."""
    pytest.importorskip("tensorflow", reason="KerasHub's tests import it")
    from keras_hub.src.tests import test_case

    class TestCase(test_case.TestCase):
        def assertDTypeEqual(self, x, expected_dtype, msg=None):
            kept = getattr(x, "path", "").endswith(IN_FLOAT32)
            super().assertDTypeEqual(x, "float32" if kept else expected_dtype, msg)

    return getattr(TestCase(name), name)


@any_family
def test_backbone_passes_kerashub_run_backbone_test(family):
    sizes = SIZES[family]
    rng = np.random.default_rng(0)
    harness("run_backbone_test")(
        FAMILIES[family].backbone,
        init_kwargs=sizes,
        input_data={
            "token_ids": rng.integers(0, sizes["vocabulary_size"], (BATCH, LENGTH)),
            "padding_mask": np.ones((BATCH, LENGTH), "int32"),
        },
        expected_output_shape=(BATCH, LENGTH, sizes["hidden_dim"]),
    )


def test_vision_backbone_passes_kerashub_run_vision_backbone_test():
    height, width, _ = VISION_SIZES["image_shape"]
    patch = VISION_SIZES["patch_size"]
    harness("run_vision_backbone_test")(
        models.HGRN2VisionBackbone,
        init_kwargs=dict(VISION_SIZES),
        input_data=keras.ops.convert_to_tensor(images()),
        expected_output_shape=(
            *(BATCH, height // patch, width // patch),
            VISION_SIZES["hidden_dim"],
        ),
        # An `image_shape` is height, width and channels, whatever Keras's default is.
        run_data_format_check=False,
    )


# KerasHub calls a deprecated function of Keras.
task = pytest.mark.filterwarnings("ignore:The `check_types` argument is deprecated")


@task
def test_causal_lm_passes_kerashub_run_task_test():
    family, tokenizer = "griffin", ByteTokenizer()
    row = FAMILIES[family]
    vocabulary = tokenizer.vocabulary_size()
    harness("run_task_test")(
        row.causal_lm,
        init_kwargs={
            "backbone": row.backbone(**{**SIZES[family], "vocabulary_size": vocabulary}),
            "preprocessor": row.preprocessor(tokenizer, sequence_length=8),
        },
        train_data=(["airplane", "at airport"],),
        expected_output_shape=(2, 8, vocabulary),
    )


@task
def test_text_classifier_passes_kerashub_run_task_test():
    row, tokenizer = FAMILIES["hgrn2"], ByteTokenizer()
    sizes = {**SIZES["hgrn2"], "vocabulary_size": tokenizer.vocabulary_size(), "num_layers": 1}
    harness("run_task_test")(
        models.HGRN2TextClassifier,
        init_kwargs={
            "backbone": row.backbone(**sizes),
            "num_classes": 3,
            "preprocessor": models.HGRN2TextClassifierPreprocessor(tokenizer, sequence_length=8),
            "bidirectional": True,
        },
        train_data=(["airplane", "at airport"], [1, 2]),
        expected_output_shape=(2, 3),
    )


@task
def test_image_classifier_passes_kerashub_run_task_test():
    harness("run_task_test")(
        models.HGRN2ImageClassifier,
        init_kwargs={
            "backbone": models.HGRN2VisionBackbone(**VISION_SIZES),
            "num_classes": 3,
            "preprocessor": keras_hub.models.ImageClassifierPreprocessor(
                keras_hub.layers.ImageConverter(VISION_SIZES["image_shape"][:2])
            ),
        },
        train_data=(images(), np.array([0, 2])),
        expected_output_shape=(BATCH, 3),
    )


def images():
    return (
        np.random.default_rng(0)
        .normal(size=(BATCH, *VISION_SIZES["image_shape"]))
        .astype("float32")
    )
