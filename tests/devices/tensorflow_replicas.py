"""Trains a tiny model on one device and on two replicas. Prints both as JSON."""

import json
import sys

import keras
import tensorflow as tf

from keras_recurrent.tokenizers import ByteTokenizer
from tests.models.tiny import FAMILIES, set_weights

# Two rows a step, one for each replica, padded or packed.
TEXTS = ["tick tock ti", "a clock tick", "tick tock ta", "tock"]


def trained(family, layers, packed, strategy):
    """Losses of training and evaluation, weights and slots."""
    cls = FAMILIES[family]
    with strategy.scope():
        preprocessor = cls.preprocessor(ByteTokenizer(), sequence_length=13, packed=packed)
        backbone = cls.backbone(**{**cls.sizes, "vocabulary_size": 259, "num_layers": layers})
        set_weights(backbone, 0)
        model = cls.causal_lm(backbone, preprocessor)
        # Without XLA, which takes longer to compile than all else here.
        model.compile(
            keras.optimizers.Adam(0.01), model.loss, weighted_metrics=[], jit_compile=False
        )
    assert len(preprocessor(TEXTS)[1]) == 4
    losses = model.fit(TEXTS, batch_size=2, shuffle=False, verbose=0).history["loss"]
    losses.append(model.evaluate(TEXTS, batch_size=2, verbose=0))
    variables = (*model.weights, *model.optimizer.variables)
    return losses, [keras.ops.convert_to_numpy(v).tolist() for v in variables]


def main(family, layers, packed):
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    one, two = tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    both = [trained(family, int(layers), packed == "packed", strategy) for strategy in (one, two)]
    print(json.dumps(both))


if __name__ == "__main__":
    main(*sys.argv[1:])
