"""`griffin_tiny_text`, the preset whose weights come with the package."""

import math
import sys

import h5py
import keras_hub
import pytest

from keras_recurrent import presets
from keras_recurrent.evaluation import loss_by_position
from keras_recurrent.models import GriffinBackbone, GriffinCausalLM, GriffinTextClassifier
from tests.checkpoints import golden

pytestmark = pytest.mark.once

NAME = "griffin_tiny_text"
FILE = presets.path_of_weights(f"{NAME}.weights.h5")

# From the plays that were held out from training.
HELD_OUT = """\
PROSPERO:
Of the king's ship
The mariners say how thou hast disposed
And all the rest o' the fleet.

ARIEL:
Safely in harbour
Is the king's ship; in the deep nook, where once
Thou call'dst me up at midnight to fetch dew
From the still-vex'd Bermoothes, there she's hid:
The mariners all under hatches stow'd."""
BITS_PER_BYTE = 2.4416


@pytest.fixture(scope="module")
def model():
    return GriffinCausalLM.from_preset(NAME)


def bits_per_byte(model, text):
    tokenizer = model.preprocessor.tokenizer
    token_ids = [tokenizer.start_token_id, *tokenizer(text)]
    return loss_by_position(model, [token_ids]).loss.mean() / math.log(2)


@pytest.mark.every_backend
def test_trained_preset_has_its_loss_on_held_out_text(model):
    assert bits_per_byte(model, HELD_OUT) == pytest.approx(BITS_PER_BYTE, abs=1e-3)


def test_trained_preset_loads_equal_weights_through_every_class(model, monkeypatch):
    """Loading needs a package that only an extra installs."""
    for package in ("safetensors", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, package, None)
    for backbone in (
        keras_hub.models.CausalLM.from_preset(NAME).backbone,
        GriffinBackbone.from_preset(NAME, load_weights=True),
        GriffinTextClassifier.from_preset(NAME, num_classes=2).backbone,
    ):
        golden.assert_equal_weights(backbone, model.backbone)


def test_weights_of_the_trained_preset_are_stored_in_bfloat16():
    dtypes = []
    with h5py.File(FILE) as file:
        file.visititems(lambda _, item: dtypes.append(item.attrs.get("dtype", "none")))
    assert set(dtypes) == {"none", "bfloat16"}  # groups and float32 have none
    assert FILE.stat().st_size < 4_000_000
