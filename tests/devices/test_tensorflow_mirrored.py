"""`tf.distribute.MirroredStrategy`: two replicas learn what one device learns."""

import keras
import numpy as np
import pytest

from tests.models.tiny import FAMILIES
from tests.processes import fresh_process

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "tensorflow", reason="MirroredStrategy is TensorFlow's"
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "layers", "packed"),
    [
        ("hgrn2", 1, "padded"),
        *(pytest.param(family, 3, "padded", marks=pytest.mark.nightly) for family in FAMILIES),
        *(pytest.param(family, 3, "packed", marks=pytest.mark.nightly) for family in FAMILIES),
    ],
)
def test_two_replicas_learn_what_one_device_learns(family, layers, packed):
    """Losses, weights and slots. Padded rows have a boolean mask, which has no mean."""
    module = "tests.devices.tensorflow_replicas"
    one, two = fresh_process("-m", module, family, str(layers), packed, CUDA_VISIBLE_DEVICES="")
    np.testing.assert_allclose(two[0], one[0], rtol=1e-5)
    assert len(two[1]) == len(one[1])
    for of_two, of_one in zip(two[1], one[1], strict=True):
        np.testing.assert_allclose(of_two, of_one, rtol=1e-4, atol=1e-5)
