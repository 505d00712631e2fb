"""Asserts that a tiny model trained on two replicas matches the same model on one device.

Arguments: a family, and "padded" or "packed".
"""

import sys

import keras
import numpy as np
import tensorflow as tf

from keras_recurrent.tokenizers import ByteTokenizer
from tests.models.tiny import FAMILIES, set_weights

# Two sequences a step, one for each replica.
TEXTS = ["tick tock ti", "a clock tick", "tick tock ta", "tock"]


def train(family, packed, strategy):
    """Returns losses of training and evaluation, and weights and slots."""
    row = FAMILIES[family]
    with strategy.scope():
        preprocessor = row.preprocessor(ByteTokenizer(), sequence_length=13, packed=packed)
        backbone = row.backbone(**{**row.sizes, "vocabulary_size": 259, "num_layers": 3})
        set_weights(backbone, 0)
        model = row.causal_lm(backbone, preprocessor)
        # XLA would take longer to compile than all else here.
        optimizer = keras.optimizers.Adam(0.01)
        model.compile(optimizer, model.loss, weighted_metrics=[], jit_compile=False)
    assert len(preprocessor(TEXTS)[1]) == 4
    losses = model.fit(TEXTS, batch_size=2, shuffle=False, verbose=0).history["loss"]
    losses.append(model.evaluate(TEXTS, batch_size=2, verbose=0))
    variables = (*model.weights, *model.optimizer.variables)
    return losses, [keras.ops.convert_to_numpy(v) for v in variables]


def main(family, form):
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    expected_losses, expected = train(family, form == "packed", tf.distribute.get_strategy())
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    losses, arrays = train(family, form == "packed", strategy)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for array, expected_array in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(array, expected_array, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main(*sys.argv[1:])
