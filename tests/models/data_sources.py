"""Sources of training data that Keras accepts, all with the same samples."""

import grain
import keras
import pytest
import torch


def make_sources(samples, columns, batch_size):
    """Returns `{name: function that makes a source}` of batches of samples.

    `samples` is a list; `columns` holds the arrays of all samples, in the structure of a batch.
    """

    def batch(index):
        part = slice(index * batch_size, (index + 1) * batch_size)
        return keras.tree.map_structure(lambda column: column[part], columns)

    def tensorflow_dataset():
        tf = pytest.importorskip("tensorflow")
        return tf.data.Dataset.from_tensor_slices(columns).batch(batch_size)

    count = len(samples) // batch_size
    return {
        "tf.data": tensorflow_dataset,
        "grain": lambda: grain.MapDataset.source(samples).batch(batch_size),
        "torch": lambda: torch.utils.data.DataLoader(samples, batch_size=batch_size),
        # For several epochs: Keras looks at two batches before the first step.
        "generator": lambda: (batch(i % count) for i in range(3 * count)),
    }
