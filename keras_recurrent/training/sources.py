"""Whatever Keras trains on, with its batches of strings made into tokens on the way.

The sources of Keras are arrays in memory, `tf.data`, grain, torch's `DataLoader`, `PyDataset` and
Python generators. What comes out of `as_source` is one that Keras reads by itself.
"""

import random
import sys
import types

import keras
import numpy as np

from keras_recurrent.training.samples import is_text, is_tokens

# Threads that read a dataset of grain, and the batches that they may be ahead of a step.
THREADS = 4


def as_source(x, preprocess, steps=None):
    """A source of batches for Keras, and how many of them Keras has to count for an epoch.

    Args:
        x: a `tf.data.Dataset`, a dataset or `DataLoader` of grain, a `DataLoader` of torch, a
            `PyDataset` or a generator, whose batches are strings, or tokens with their labels. All
            else is returned as it is, and Keras judges it.
        preprocess: function of `(x, y, sample_weight)`, which makes tokens of strings.
        steps: integer, the batches of an epoch; None: as many as there are.

    Returns:
        The source, and `steps`: None where the source knows them.
    """
    if is_packed_text(x):
        if x.is_endless and steps is None:
            raise ValueError(
                "The `PackedText` has no end. Say by `steps_per_epoch`, `validation_steps` or "
                "`steps` how many of its batches are wanted, or give it a number of `passes`."
            )
        return x, steps
    if isinstance(x, keras.utils.PyDataset):
        return PreparedPyDataset(x, preprocess), steps
    if isinstance(x, types.GeneratorType):
        return (_prepared(batch, preprocess) for batch in x), steps
    kind = next((kind for kind in ADAPTERS if _comes_from(x, *kind)), None)
    return (x, steps) if kind is None else ADAPTERS[kind](x, preprocess, steps)


def is_packed_text(x):
    """Whether this is a `PackedText`, told without importing grain."""
    return _comes_from(x, "PackedText", "keras_recurrent.datasets")


def split(parts, fraction):
    """`(x, y, sample_weight)` for training and for validation, which gets the last ones.

    Raises:
        ValueError: no entry would be left for one of the two.
    """
    parts = tuple(_indexable(part) for part in parts)
    length = _length(parts[0])
    at = int(np.floor(length * (1.0 - fraction)))
    if not 0 < at < length:
        raise ValueError(
            f"`validation_split` of {fraction} leaves nothing to train on or nothing to validate "
            f"with, of {length} samples."
        )
    return tuple(
        tuple(_take(part, np.arange(begin, end)) for part in parts)
        for begin, end in ((0, at), (at, length))
    )


def as_arrays(*parts):
    """Labels and weights in lists as arrays, which Keras would take for trees of numbers."""
    return tuple(np.asarray(part) if isinstance(part, (list, tuple)) else part for part in parts)


class Indexed(keras.utils.PyDataset):
    """Batches by number, on and on. An epoch has the next `steps` of them.

    What comes in an epoch follows from its number, so that a run that is broken off and resumed at
    a later epoch goes on as it would have. `EpochNumber` tells it the number.
    """

    def __init__(self, steps, **kwargs):
        super().__init__(**kwargs)
        self._steps = steps
        self.epoch = 0

    def __len__(self):
        return self._steps

    def __getitem__(self, index):
        return self.batch(self.epoch * self._steps + index)


class InMemory(Indexed):
    """Batches of strings, or rows of tokens, that are in memory, in a new order in each pass.

    The order follows from the number of the pass and a seed, which is drawn by Python's `random`,
    and so from `keras.utils.set_random_seed`.

    Args:
        parts: `(x, y, sample_weight)`: several strings or tokens, and for each an entry of the
            others, which may be None.
        preprocess: function of `(x, y, sample_weight)`, which makes tokens of strings; None: `x`
            are tokens.
        batch_size: integer; None: 32, as in Keras.
        shuffle: whether each pass has an order of its own; "batch": of whole batches alone.
        steps: integer, the batches of an epoch; None: a pass.

    Raises:
        ValueError: the parts are not of one length.
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
        self._batches_of_a_pass = -(-self._length // self._batch_size)
        super().__init__(steps or self._batches_of_a_pass)
        self._preprocess, self._shuffle = preprocess, shuffle
        self._seed = random.randrange(2**32) if shuffle else 0
        self._order_of = {}  # the pass that was last asked for, and its order

    def batch(self, number):
        number_of_pass, index = divmod(number, self._batches_of_a_pass)
        if number_of_pass not in self._order_of:
            self._order_of = {number_of_pass: self._order(number_of_pass)}
        order = self._order_of[number_of_pass]
        places = order[index * self._batch_size : (index + 1) * self._batch_size]
        batch = tuple(_take(part, places) for part in self._parts)
        if self._preprocess is not None:
            return _prepared(batch, self._preprocess)
        return _without_none(*batch)

    def _order(self, number_of_pass):
        order = np.arange(self._length)
        rng = np.random.default_rng((self._seed, number_of_pass))
        if self._shuffle == "batch":  # the last batch, which may be smaller, stays the last
            whole = self._length // self._batch_size * self._batch_size
            rng.shuffle(order[:whole].reshape(-1, self._batch_size))
        elif self._shuffle:
            rng.shuffle(order)
        return order


class OfGrain(Indexed):
    """The batches of a `grain.MapDataset`, read by a few threads."""

    def __init__(self, dataset, preprocess, steps):
        super().__init__(steps, workers=THREADS, max_queue_size=THREADS)
        self._dataset, self._preprocess = dataset, preprocess

    def batch(self, number):
        return _prepared(self._dataset[number], self._preprocess)


class EpochNumber(keras.callbacks.Callback):
    """Tells an `Indexed` source which epoch begins."""

    def __init__(self, source):
        super().__init__()
        self._source = source

    def on_epoch_begin(self, epoch, logs=None):
        self._source.epoch = epoch


class PreparedPyDataset(keras.utils.PyDataset):
    """The batches of another `PyDataset`, as tokens."""

    def __init__(self, dataset, preprocess):
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._preprocess = dataset, preprocess

    @property
    def num_batches(self):
        return self._dataset.num_batches

    def __getitem__(self, index):
        return _prepared(self._dataset[index], self._preprocess)

    def on_epoch_begin(self):
        self._dataset.on_epoch_begin()

    def on_epoch_end(self):
        self._dataset.on_epoch_end()


def _of_tensorflow(x, preprocess, steps):
    import tensorflow as tf

    prepared = x.map(preprocess, num_parallel_calls=tf.data.AUTOTUNE)
    return prepared.prefetch(tf.data.AUTOTUNE), steps


def _of_torch(x, preprocess, steps):
    import torch

    class Prepared(torch.utils.data.IterableDataset):
        def __iter__(self):
            return (_prepared(batch, preprocess) for batch in x)

    class PreparedOfKnownLength(Prepared):
        def __len__(self):
            return len(x)

    known = hasattr(x.dataset, "__len__")
    dataset = PreparedOfKnownLength() if known else Prepared()
    return torch.utils.data.DataLoader(dataset, batch_size=None), steps


def _of_grain(x, preprocess, steps):
    length = len(x)
    endless = length == sys.maxsize
    if endless and steps is None:
        raise ValueError(
            "The dataset has no end, as after `repeat()`. Say by `steps_per_epoch`, "
            "`validation_steps` or `steps` how many of its batches are wanted."
        )
    return OfGrain(x if endless else x.repeat(), preprocess, steps or length), None


def _of_grain_stream(x, preprocess, steps):
    return x.map(lambda batch: _prepared(batch, preprocess)), steps


def _of_grain_loader(x, preprocess, steps):
    from keras_recurrent.training.grain_loader import LoaderDataset

    return _of_grain_stream(LoaderDataset(x), preprocess, steps)


# By the name of a class and of its package, as Keras does: none of these need be installed.
ADAPTERS = {
    ("DatasetV2", "tensorflow.python."): _of_tensorflow,
    ("DataLoader", "torch.utils.data"): _of_torch,
    ("MapDataset", "grain"): _of_grain,
    ("IterDataset", "grain"): _of_grain_stream,
    ("DataLoader", "grain"): _of_grain_loader,
}


def _comes_from(x, name, package):
    return any(c.__name__ == name and c.__module__.startswith(package) for c in type(x).__mro__)


def _prepared(batch, preprocess):
    """A batch of tokens and their labels, in NumPy, of a batch of strings, or of tokens."""
    if isinstance(batch, (str, bytes)):
        raise ValueError(
            "Each batch must hold several strings; got one string. Give lists of them, such as "
            "`dataset.batch(8)` makes."
        )
    # Torch and generators give strings as a list or tuple, which Keras would take for (x, y).
    parts = (batch,) if is_text(batch) else batch
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(parts)
    y, sample_weight = as_arrays(y, sample_weight)
    if not is_tokens(x):
        x = _as_strings(x) if is_text(x) else x
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(preprocess(x, y, sample_weight))
        x, y, sample_weight = keras.tree.map_structure(_as_numpy, (x, y, sample_weight))
    return _without_none(x, y, sample_weight)


def _without_none(*parts):
    return tuple(part for part in parts if part is not None)


def _as_strings(x):
    """A list of `str`, of text in any form."""
    x = x.numpy() if hasattr(x, "numpy") else x
    texts = np.ravel(x).tolist() if isinstance(x, np.ndarray) else x
    return [text.decode("utf-8") if isinstance(text, bytes) else text for text in texts]


def _as_numpy(x):
    return x if x is None else keras.ops.convert_to_numpy(x)


def _indexable(part):
    """Strings as a list, and tensors as arrays."""
    if part is None or is_tokens(part):
        return part
    return _as_strings(part) if is_text(part) else np.asarray(part)


def _length(part):
    return len(next(iter(part.values()))) if isinstance(part, dict) else len(part)


def _take(part, places):
    if part is None:
        return None
    if isinstance(part, list):
        return [part[place] for place in places]
    if isinstance(part, dict):
        return {name: array[places] for name, array in part.items()}
    return part[places]
