"""A training run that resumes from a backup."""

import os
import pathlib

import keras
import numpy as np

from keras_recurrent.callbacks import TrainingBackup
from keras_recurrent.datasets import PackedText
from keras_recurrent.models import GriffinCausalLMPreprocessor
from keras_recurrent.tokenizers import ByteTokenizer

STEPS, EPOCHS = 6, 3
DTYPES = {"token_ids": "int32", "padding_mask": "bool", "segment_ids": "int32"}


def write_text(folder, lines=16):
    """Writes two files of as many lines; returns their paths."""
    rng = np.random.default_rng(0)
    paths = [pathlib.Path(folder, name) for name in ("one.txt", "two.txt")]
    for path in paths:
        texts = ["".join(rng.choice(list("abc é"), rng.integers(0, 40))) for _ in range(lines)]
        path.write_text("\n".join(texts), encoding="utf-8")
    return [str(path) for path in paths]


def packed_text(paths, batch_size=4, seed=1, **arguments):
    preprocessor = GriffinCausalLMPreprocessor(ByteTokenizer(), sequence_length=16, packed=True)
    return PackedText(paths, preprocessor, batch_size, seed=seed, **arguments)


def model_with_dropout(steps_per_execution=1):
    """A model that draws random numbers, with slots and metrics."""
    keras.utils.set_random_seed(0)
    inputs = {name: keras.Input((None,), dtype=dtype, name=name) for name, dtype in DTYPES.items()}
    x = keras.layers.Embedding(259, 8)(inputs["token_ids"])
    x = keras.layers.Dropout(0.5)(x)
    model = keras.Model(inputs, keras.layers.Dense(259)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.Adam(0.01),
        loss,
        weighted_metrics=["sparse_categorical_accuracy"],
        steps_per_execution=steps_per_execution,
    )
    model.optimizer.build(model.trainable_variables)
    return model


def variables(model):
    return [*model.variables, *model.optimizer.variables]


def values(model):
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables(model)]


class AtBatch(keras.callbacks.Callback):
    """Calls a function when a batch begins, counted over all epochs."""

    def __init__(self, batch, action, steps=STEPS):
        super().__init__()
        self.batch, self.action, self.steps = batch, action, steps

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self.epoch * self.steps + batch == self.batch:
            self.action()


def train(model, folder, *callbacks, steps=STEPS, epochs=EPOCHS, save_freq=2, paths=None):
    paths = paths or write_text(folder)
    rows = packed_text(paths)
    backup = TrainingBackup(os.path.join(folder, "run.backup"), save_freq, data=rows)
    return model.fit(
        rows,
        validation_data=next(iter(packed_text(paths))),
        steps_per_epoch=steps,
        epochs=epochs,
        callbacks=[backup, *callbacks],
        shuffle=False,
        verbose=0,
    )
