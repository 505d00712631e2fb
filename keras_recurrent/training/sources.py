"""Adapters that tokenize the batches of each kind of data source.

The sources of Keras are arrays in memory, `tf.data`, grain, torch's `DataLoader`, `PyDataset` and
Python generators. `as_source` returns one of these.
"""

import random
import sys
import types

import keras
import numpy as np

from keras_recurrent.training.dialogues import is_conversation, is_conversations
from keras_recurrent.training.samples import Texts, as_texts, is_tokens

# Number of threads that read a dataset of grain, and of batches read ahead.
THREADS = 4


def as_source(x, preprocess, steps=None):
    """Returns a source of tokenized batches for Keras, and the steps per epoch to pass to Keras.

    Args:
        x: a `tf.data.Dataset`, a dataset or `DataLoader` of grain, a `DataLoader` of torch, a
            `PyDataset` or a generator, whose batches are strings, or tokens with their labels.
            Anything else is returned unchanged, for Keras to check.
        preprocess: function of `(x, y, sample_weight)` that tokenizes strings.
        steps: integer, batches per epoch. None: all batches of `x`.

    Returns:
        The source, and `steps`, None if the source knows them.
    """
    if is_packed_text(x):
        if x.is_endless and steps is None:
            raise ValueError(
                "The `PackedText` has no end. Pass the number of batches as `steps_per_epoch`, "
                "`validation_steps` or `steps`, or give it a number of `passes`."
            )
        return x, steps
    if isinstance(x, keras.utils.PyDataset):
        return TokenizedPyDataset(x, preprocess), steps
    if isinstance(x, types.GeneratorType):
        return (_tokenize_batch(batch, preprocess) for batch in x), steps
    kind = next((kind for kind in ADAPTERS if _is_instance_by_name(x, *kind)), None)
    return (x, steps) if kind is None else ADAPTERS[kind](x, preprocess, steps)


def is_packed_text(x):
    """Returns True for a `PackedText`, without importing grain."""
    return _is_instance_by_name(x, "PackedText", "keras_recurrent.datasets")


def split(parts, fraction):
    """Splits `(x, y, sample_weight)` into training samples and the last ones for validation.

    Raises:
        ValueError: one of the two would be empty.
    """
    parts = tuple(_indexable(part) for part in parts)
    length = _length(parts[0])
    at = int(np.floor(length * (1.0 - fraction)))
    if not 0 < at < length:
        raise ValueError(
            f"`validation_split` of {fraction} leaves no samples for training or none for "
            f"validation, of {length}."
        )
    return tuple(
        tuple(_take(part, np.arange(begin, end)) for part in parts)
        for begin, end in ((0, at), (at, length))
    )


def as_arrays(*parts):
    """Converts labels and weights in lists to arrays; Keras would take lists for nested data."""
    return tuple(np.asarray(part) if isinstance(part, (list, tuple)) else part for part in parts)


class IndexedBatches(keras.utils.PyDataset):
    """Endless sequence of batches by number. An epoch has the next `steps` of them.

    The batches of an epoch follow from its number, so a run resumed at a later epoch trains on the
    same batches. A callback calls `start_epoch`.
    """

    def __init__(self, steps, **kwargs):
        super().__init__(**kwargs)
        self._steps = steps
        self.epoch = 0

    def __len__(self):
        return self._steps

    def __getitem__(self, index):
        return self.batch(self.epoch * self._steps + index)

    def start_epoch(self, epoch, logs=None):
        """Sets the number of the epoch, as the `on_epoch_begin` of a callback."""
        self.epoch = epoch


class InMemory(IndexedBatches):
    """Batches of strings or tokens in memory, in a new order in each pass.

    The order follows from the number of the pass and a seed drawn by Python's `random`, and so from
    `keras.utils.set_random_seed`.

    Args:
        parts: `(x, y, sample_weight)`: several strings or tokens, and labels and weights with one
            entry for each, or None.
        preprocess: function of `(x, y, sample_weight)` that tokenizes strings. None: `x` are
            tokens.
        batch_size: integer. None: 32, as in Keras.
        shuffle: boolean, shuffles each pass; "batch": shuffles whole batches.
        steps: integer, batches per epoch. None: one pass.

    Raises:
        ValueError: the parts differ in length.
    """

    def __init__(self, parts, preprocess, batch_size=None, shuffle=False, steps=None):
        self._parts = tuple(_indexable(part) for part in parts)
        lengths = {_length(part) for part in self._parts if part is not None}
        if len(lengths) > 1:
            raise ValueError(
                "`x`, `y` and `sample_weight` must have one entry for each string; got "
                f"{' and '.join(map(str, sorted(lengths)))} entries."
            )
        self._length, self._batch_size = lengths.pop(), batch_size or 32
        self._batches_per_pass = -(-self._length // self._batch_size)
        super().__init__(steps or self._batches_per_pass)
        self._preprocess, self._shuffle = preprocess, shuffle
        self._seed = random.randrange(2**32) if shuffle else 0
        self._orders = {}  # {last pass: its order}

    def batch(self, number):
        pass_index, index = divmod(number, self._batches_per_pass)
        if pass_index not in self._orders:
            self._orders = {pass_index: self._order(pass_index)}
        order = self._orders[pass_index]
        indices = order[index * self._batch_size : (index + 1) * self._batch_size]
        batch = tuple(_take(part, indices) for part in self._parts)
        if self._preprocess is not None:
            return _tokenize_batch(batch, self._preprocess)
        return _drop_none(*batch)

    def _order(self, pass_index):
        order = np.arange(self._length)
        rng = np.random.default_rng((self._seed, pass_index))
        if self._shuffle == "batch":  # the last batch, which may be smaller, stays the last
            end = self._length // self._batch_size * self._batch_size
            rng.shuffle(order[:end].reshape(-1, self._batch_size))
        elif self._shuffle:
            rng.shuffle(order)
        return order


class GrainSource(IndexedBatches):
    """Tokenized batches of a `grain.MapDataset`, read by several threads."""

    def __init__(self, dataset, preprocess, steps):
        super().__init__(steps, workers=THREADS, max_queue_size=THREADS)
        self._dataset, self._preprocess = dataset, preprocess

    def batch(self, number):
        return _tokenize_batch(self._dataset[number], self._preprocess)


class TokenizedPyDataset(keras.utils.PyDataset):
    """Tokenized batches of another `PyDataset`."""

    def __init__(self, dataset, preprocess):
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._preprocess = dataset, preprocess

    @property
    def num_batches(self):
        return self._dataset.num_batches

    def __getitem__(self, index):
        return _tokenize_batch(self._dataset[index], self._preprocess)

    def on_epoch_begin(self):
        self._dataset.on_epoch_begin()

    def on_epoch_end(self):
        self._dataset.on_epoch_end()


def _adapt_tensorflow(x, preprocess, steps):
    import tensorflow as tf

    tokenized = x.map(preprocess, num_parallel_calls=tf.data.AUTOTUNE)
    return tokenized.prefetch(tf.data.AUTOTUNE), steps


def _adapt_torch(x, preprocess, steps):
    import torch

    class Tokenized(torch.utils.data.IterableDataset):
        def __iter__(self):
            return (_tokenize_batch(batch, preprocess) for batch in x)

    class SizedTokenized(Tokenized):
        def __len__(self):
            return len(x)

    known = hasattr(x.dataset, "__len__")
    dataset = SizedTokenized() if known else Tokenized()
    return torch.utils.data.DataLoader(dataset, batch_size=None), steps


def _adapt_grain_map(x, preprocess, steps):
    length = len(x)
    endless = length == sys.maxsize
    if endless and steps is None:
        raise ValueError(
            "The dataset has no end, as after `repeat()`. Pass the number of batches as "
            "`steps_per_epoch`, `validation_steps` or `steps`."
        )
    return GrainSource(x if endless else x.repeat(), preprocess, steps or length), None


def _adapt_grain_iter(x, preprocess, steps):
    return x.map(lambda batch: _tokenize_batch(batch, preprocess)), steps


def _adapt_grain_loader(x, preprocess, steps):
    from keras_recurrent.training.grain_loader import LoaderDataset

    return _adapt_grain_iter(LoaderDataset(x), preprocess, steps)


# {(class name, package): adapter}. As in Keras, names avoid importing the packages.
ADAPTERS = {
    ("DatasetV2", "tensorflow.python."): _adapt_tensorflow,
    ("DataLoader", "torch.utils.data"): _adapt_torch,
    ("MapDataset", "grain"): _adapt_grain_map,
    ("IterDataset", "grain"): _adapt_grain_iter,
    ("DataLoader", "grain"): _adapt_grain_loader,
}


def _is_instance_by_name(x, name, package):
    return any(c.__name__ == name and c.__module__.startswith(package) for c in type(x).__mro__)


def _tokenize_batch(batch, preprocess):
    """Converts a batch of strings or tokens to NumPy arrays of tokens and labels."""
    if isinstance(batch, (str, bytes)) or is_conversation(batch):
        one = "string" if isinstance(batch, (str, bytes)) else "conversation"
        raise ValueError(
            f"Each batch must hold several {one}s; got one {one}. Batch the dataset, such as by "
            "`dataset.batch(8)`."
        )
    # Torch and generators yield strings as a list or tuple, which Keras would take for (x, y).
    batch = as_texts(batch)
    parts = (batch,) if isinstance(batch, Texts) or is_conversations(batch) else batch
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(parts)
    y, sample_weight = as_arrays(y, sample_weight)
    if not is_tokens(x):
        found = preprocess(as_texts(x), y, sample_weight)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(found)
        x, y, sample_weight = keras.tree.map_structure(_as_numpy, (x, y, sample_weight))
    return _drop_none(x, y, sample_weight)


def _drop_none(*parts):
    return tuple(part for part in parts if part is not None)


def _as_numpy(x):
    return x if x is None else keras.ops.convert_to_numpy(x)


def _indexable(part):
    """Converts strings to a list and tensors to arrays."""
    if part is None or is_tokens(part):
        return part
    part = as_texts(part)
    return part if isinstance(part, Texts) else np.asarray(part)


def _length(part):
    return len(next(iter(part.values()))) if isinstance(part, dict) else len(part)


def _take(part, indices):
    if part is None:
        return None
    if isinstance(part, Texts):
        return type(part)(part[i] for i in indices)
    if isinstance(part, dict):
        return {name: array[indices] for name, array in part.items()}
    return part[indices]
