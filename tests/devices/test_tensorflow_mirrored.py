"""`tf.distribute.MirroredStrategy`: training on two replicas."""

import keras
import pytest

from tests.models.tiny import any_family
from tests.processes import printed

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "tensorflow", reason="MirroredStrategy is TensorFlow's"
)


@pytest.mark.nightly
@any_family
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_training_on_two_replicas_matches_one_device(family, form):
    """Losses, weights or slots differ, for example by the mean of a boolean padding mask."""
    command = ("-m", "tests.devices.tensorflow_replicas", family, form)
    printed(*command, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
