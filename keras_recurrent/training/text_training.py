"""`fit` and `evaluate` on strings, whichever way they come."""

import contextlib
import warnings
from typing import Any

import keras
from keras import ops

from keras_recurrent.checks.token_ids import check_segment_ids, check_token_ids
from keras_recurrent.training import sources
from keras_recurrent.training.samples import check_samples, is_strings, is_text, is_tokens


class TextTraining:
    """Lets a model with a preprocessor train on strings from every source of Keras.

    A model says by `check_labels` which labels belong to them.
    """

    preprocessor: Any
    preprocessor_cls: type
    backbone: Any
    _distribute_strategy: Any

    def fit(
        self,
        x=None,
        y=None,
        batch_size=None,
        sample_weight=None,
        validation_data=None,
        validation_split=None,
        **kwargs,
    ):
        """As in Keras, from strings or from the tokens that the preprocessor makes of them.

        Strings come in a list, an array, or in the batches of a `tf.data.Dataset`, a dataset or
        `DataLoader` of grain, a `DataLoader` of torch, a `keras.utils.PyDataset` or a generator;
        `keras_recurrent.datasets.PackedText` reads them from files. So do those of
        `validation_data`.

        A language model makes its labels of the strings. A classifier is given them: a number for
        each string, as `y`, or beside the strings in each batch of a source.

        Strings in a list or an array are shuffled in each epoch, as arrays are in Keras, unless
        `shuffle=False`. The order follows from `keras.utils.set_random_seed` and the number of the
        epoch, so that a run that is resumed finds the order that it would have had.

        With a packing preprocessor, lists and arrays of strings are packed as a whole, and
        `batch_size`, `validation_split` and `shuffle` mean rows; in other sources each batch of
        strings is packed by itself. See `RecurrentCausalLMPreprocessor`.

        Under a `tf.distribute.MirroredStrategy` each replica takes its part of `batch_size`, and
        their gradients are averaged: as on one device, if every batch can be divided by the number
        of replicas. In a last, smaller one that cannot, rows of the smaller parts weigh more.

        Of tokens in NumPy arrays all ids and segments are looked at first. Inside a step they are
        not: there, negative ids count from the end of the vocabulary. Those beyond it are an error
        of torch, and of TensorFlow on a CPU without XLA; elsewhere NaN, zeros or another token take
        their place. What a negative segment does there stands in
        `keras_recurrent.layers.StreamingLayer`. At padding any id and segment may stand.

        Raises:
            ValueError: neither strings nor tokens nor a source of them, no strings at all, strings
                where the model has no preprocessor, labels beside strings for a language model or
                none for a classifier, tokens without labels, or NumPy arrays with a `token_ids`
                that the vocabulary lacks, a label that there is not (unless its weight is 0 in a
                language model), or a segment below 0; a `PackedText` without end and
                without `steps_per_epoch`.
        """
        x = self.as_samples(x)
        self._check_samples(x, y, sample_weight)
        if is_strings(validation_data):
            validation_data = (validation_data,)
        if isinstance(validation_data, (tuple, list)):
            held_out, *labels = keras.utils.unpack_x_y_sample_weight(tuple(validation_data))
            validation_data = (self.as_samples(held_out), *labels)
            self._check_samples(*validation_data, name="validation_data")
        elif validation_data is not None:
            self._check_samples(validation_data, name="validation_data")
            validation_data = (validation_data, None, None)
        steps = kwargs.pop("steps_per_epoch", None)
        if is_text(x):
            parts = self._rows(x, y, sample_weight)
            if validation_split and validation_data is None:
                parts, held_out = sources.split(parts, validation_split)
                validation_data = (self._in_memory(held_out, batch_size), None, None)
            validation_split = y = sample_weight = None
            # Its order is its own affair.
            x = self._in_memory(parts, batch_size, kwargs.get("shuffle", True), steps)
            kwargs["shuffle"], steps = False, None
        elif is_tokens(x):
            y, sample_weight = sources.as_arrays(y, sample_weight)
        else:
            if not isinstance(x, keras.utils.PyDataset):
                kwargs.setdefault("shuffle", False)  # Keras cannot, and would warn
            x, steps = sources.as_source(x, self.preprocess_samples, steps)
        if isinstance(x, sources.Indexed):
            kwargs["callbacks"] = _with(sources.EpochNumber(x), kwargs.get("callbacks"))
        if validation_data is not None:
            size = kwargs.get("validation_batch_size") or batch_size
            validation_data, kwargs["validation_steps"] = self._held_out(
                validation_data, size, kwargs.get("validation_steps")
            )
        with _quiet_end_of(x, validation_data):
            return keras.Model.fit(
                self,
                x=x,
                y=y,
                batch_size=batch_size,
                sample_weight=sample_weight,
                validation_data=validation_data,
                validation_split=validation_split,
                steps_per_epoch=steps,
                **kwargs,
            )

    def evaluate(self, x=None, y=None, batch_size=None, sample_weight=None, **kwargs):
        """As in Keras, from strings or tokens in what `fit` takes; checked and packed as there."""
        if not kwargs.get("_use_cached_eval_dataset"):  # as `fit` calls it
            x = self.as_samples(x)
            self._check_samples(x, y, sample_weight)
            steps = kwargs.get("steps")
            (x, y, sample_weight), kwargs["steps"] = self._held_out(
                (x, y, sample_weight), batch_size, steps
            )
        with _quiet_end_of(x):
            return keras.Model.evaluate(
                self, x=x, y=y, batch_size=batch_size, sample_weight=sample_weight, **kwargs
            )

    def predict(self, x=None, batch_size=None, **kwargs):
        """As in Keras, logits for strings or tokens, which come in whatever `fit` takes."""
        steps, x = kwargs.pop("steps", None), self.as_samples(x)
        check_samples("x", x, self.preprocessor_cls, self.preprocessor is not None)
        if is_text(x):
            x, steps = self._in_memory((x, None, None), batch_size, steps=steps), None
        elif not is_tokens(x):
            x, steps = sources.as_source(x, self.preprocess_samples, steps)
        return keras.Model.predict(self, x=x, batch_size=batch_size, steps=steps, **kwargs)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Under a `tf.distribute` strategy Keras builds by one batch: here that of one replica.

        Keras would take the mean of all replicas' batches, which boolean masks have not.
        """
        strategy = self._distribute_strategy
        if strategy is not None and iterator is not None:
            _, _, batches = next(iter(iterator))
            data_batch = keras.tree.map_structure(
                lambda part: strategy.experimental_local_results(part)[0], next(batches)
            )
            iterator = None
        super()._maybe_symbolic_build(iterator, data_batch)  # type: ignore[misc]

    def _check_samples(self, x, y=None, sample_weight=None, *, name="x"):
        """Raises for what cannot be learned: by its kind, or by the numbers in NumPy arrays."""
        check_samples(name, x, self.preprocessor_cls, self.preprocessor is not None)
        if is_tokens(x):
            size = self.backbone.vocabulary_size
            check_token_ids("token_ids", x["token_ids"], size, x.get("padding_mask"))
            check_segment_ids(x.get("segment_ids"), x.get("padding_mask"))
        self.check_labels(name, x, y, sample_weight)

    def as_samples(self, x):
        """Strings or tokens, of what a model takes beside them; anything else as it is."""
        return x

    def check_labels(self, name, x, y, sample_weight):
        """Raises for labels that do not fit to strings or tokens in memory."""
        raise NotImplementedError

    def _held_out(self, parts, batch_size, steps):
        """`(x, y, sample_weight)` that Keras can evaluate, and the steps of an evaluation."""
        x, *labels = parts
        if is_text(x):
            x, labels = self._in_memory(self._rows(*parts), batch_size, steps=steps), (None, None)
            return (x, *labels), None
        if is_tokens(x):
            return (x, *sources.as_arrays(*labels)), steps
        if isinstance(x, sources.Indexed):
            return parts, steps
        x, steps = sources.as_source(x, self.preprocess_samples, steps)
        return (x, *labels), steps

    def _rows(self, x, y, sample_weight):
        """Strings as they are, or, with a packing preprocessor, the rows that they make."""
        if not getattr(self.preprocessor, "packed", False):
            return x, y, sample_weight
        rows = self.preprocessor(x, y=y, sample_weight=sample_weight)
        return keras.tree.map_structure(ops.convert_to_numpy, rows)

    def _in_memory(self, parts, batch_size, shuffle=False, steps=None):
        preprocess = None if is_tokens(parts[0]) else self.preprocess_samples
        return sources.InMemory(parts, preprocess, batch_size, shuffle, steps)

    def preprocess_samples(self, x, y=None, sample_weight=None):
        check_samples("x", x, self.preprocessor_cls, self.preprocessor is not None)
        if is_tokens(x):
            return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        return super().preprocess_samples(x, y, sample_weight)  # type: ignore[misc]


@contextlib.contextmanager
def _quiet_end_of(*data):
    """Keras warns where data of unknown length ends, as a `PackedText` of some passes is to."""
    parts = [part[0] if isinstance(part, tuple) else part for part in data]
    if not any(sources.is_packed_text(part) and not part.is_endless for part in parts):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield


def _with(callback, callbacks):
    """The callbacks that `fit` got, in any of their forms, and one before them."""
    if callbacks is None:
        return [callback]
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.append(callback)
        return callbacks
    return [callback, *(callbacks if isinstance(callbacks, (list, tuple)) else [callbacks])]
