"""`fit`, `evaluate` and `predict` on strings from any source."""

import contextlib
import warnings
from typing import Any

import keras
from keras import ops

from keras_recurrent.checks.token_ids import check_segment_ids, check_token_ids
from keras_recurrent.training import sources
from keras_recurrent.training.dialogues import has_responses
from keras_recurrent.training.samples import Texts, as_texts, check_samples, is_tokens


class TextTraining:
    """Mixin that lets a model with a preprocessor train on strings from every source of Keras.

    A model defines `check_labels` for its kind of labels.
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
        """Trains the model as `keras.Model.fit`, on strings or on the preprocessor's tokens.

        `x` and `validation_data` are strings in a list or an array, or a source whose batches are
        strings: a `tf.data.Dataset`, a dataset or `DataLoader` of grain, a `DataLoader` of torch, a
        `keras.utils.PyDataset` or a generator. `keras_recurrent.datasets.PackedText` reads strings
        from files.

        A language model makes its labels from the strings. It also takes a dictionary of `prompts`
        and `responses`, as many strings each, and a list of conversations, which are lists of
        messages `{"role": ..., "content": ...}`; or batches of these. The loss then excludes all
        tokens but those of responses; see `RecurrentCausalLMPreprocessor`. A classifier takes one
        number for each string, as `y`, or with the strings in each batch of a source.

        Strings in a list or an array are shuffled in each epoch, like arrays in Keras, unless
        `shuffle=False`. The order follows from `keras.utils.set_random_seed` and the number of the
        epoch, so a resumed run has the order of an uninterrupted one.

        With a packing preprocessor, lists and arrays of strings are packed as a whole, and
        `batch_size`, `validation_split` and `shuffle` apply to packed sequences. In other sources
        each batch of strings is packed separately. See `RecurrentCausalLMPreprocessor`.

        Under a `tf.distribute.MirroredStrategy` each replica takes its part of `batch_size`, and
        gradients are averaged. Results equal those on one device if the number of replicas divides
        every batch; otherwise sequences in the smaller parts of the last batch have more weight.

        All ids and segments of tokens in NumPy arrays are checked before training. Tokens in other
        sources are not: inside a step, negative ids count from the end of the vocabulary. Ids
        beyond it raise an error on torch, and on TensorFlow on a CPU without XLA; otherwise the
        result is NaN, zeros or that of another token. `keras_recurrent.layers.StreamingLayer`
        describes negative segments. At padding, any id and segment is allowed.

        Raises:
            ValueError: `x` is not one of these, or is empty; strings without a preprocessor; labels
                with strings for a language model, or no labels for a classifier; tokens without
                labels; `class_weight` for a language model; NumPy arrays with an id outside the
                vocabulary, an invalid label (unless its weight is 0 in a language model) or a
                segment below 0; an endless `PackedText` without `steps_per_epoch`.
        """
        self.check_class_weight(**kwargs)
        samples = self._validate_inputs(x, y, sample_weight)
        if validation_data is not None:
            validation_data = self._validate_inputs(
                *_unpack(validation_data), name="validation_data"
            )
        steps = kwargs.pop("steps_per_epoch", None)
        if isinstance(samples[0], Texts):
            # Strings in memory are packed here, as a whole, so that packed sequences are split and
            # shuffled. `_make_data` packs them for validation and `evaluate`; strings of `predict`
            # and of other sources are packed batch by batch, by the preprocessor.
            samples = self._pack(*samples)
            if validation_split and validation_data is None:
                samples, validation_data = sources.split(samples, validation_split)
            shuffle = kwargs.get("shuffle", True)
            x = self._make_in_memory_source(samples, batch_size, shuffle, steps)
            y = sample_weight = validation_split = steps = None
            kwargs["shuffle"] = False  # the source shuffles by itself
        else:
            if not (is_tokens(samples[0]) or isinstance(x, keras.utils.PyDataset)):
                kwargs.setdefault("shuffle", False)  # Keras cannot shuffle sources, and would warn
            (x, y, sample_weight), steps = self._make_data(samples, batch_size, steps)
        if isinstance(x, sources.IndexedBatches):
            # Only Keras knows the number of the epoch, which begins at `initial_epoch`.
            callback = keras.callbacks.LambdaCallback(on_epoch_begin=x.start_epoch)
            kwargs["callbacks"] = _prepend_callback(callback, kwargs.get("callbacks"))
        if validation_data is not None:
            size = kwargs.get("validation_batch_size") or batch_size
            data = self._make_data(validation_data, size, kwargs.get("validation_steps"))
            validation_data, kwargs["validation_steps"] = data
        with _ignore_end_of_data(x, validation_data):
            # Not KerasHub's `fit`, which would apply the preprocessor again.
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

    def train_on_batch(self, x, y=None, sample_weight=None, **kwargs):
        self.check_class_weight(**kwargs)
        return super().train_on_batch(x, y, sample_weight, **kwargs)  # type: ignore[misc]

    def evaluate(self, x=None, y=None, batch_size=None, sample_weight=None, **kwargs):
        """Evaluates the model as `keras.Model.evaluate`, on the same inputs as `fit`."""
        if not kwargs.get("_use_cached_eval_dataset"):  # set in calls by `fit`
            samples = self._validate_inputs(x, y, sample_weight)
            data = self._make_data(samples, batch_size, kwargs.get("steps"))
            (x, y, sample_weight), kwargs["steps"] = data
        with _ignore_end_of_data(x):
            return keras.Model.evaluate(
                self, x=x, y=y, batch_size=batch_size, sample_weight=sample_weight, **kwargs
            )

    def predict(self, x=None, batch_size=None, **kwargs):
        """Returns logits as `keras.Model.predict`, for the same inputs as `fit`."""
        steps, x = kwargs.pop("steps", None), as_texts(self.convert_inputs(x))
        check_samples("x", x, self)
        if isinstance(x, Texts):  # each batch is packed separately
            x, steps = self._make_in_memory_source((x, None, None), batch_size, steps=steps), None
        else:
            (x, _, _), steps = self._make_data((x, None, None), batch_size, steps)
        return keras.Model.predict(self, x=x, batch_size=batch_size, steps=steps, **kwargs)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Builds the model from one replica's batch under a `tf.distribute` strategy.

        Keras would take the mean over the batches of all replicas, which fails for boolean masks.
        """
        strategy = self._distribute_strategy
        if strategy is not None and iterator is not None:
            _, _, batches = next(iter(iterator))
            data_batch = keras.tree.map_structure(
                lambda part: strategy.experimental_local_results(part)[0], next(batches)
            )
            iterator = None
        super()._maybe_symbolic_build(iterator, data_batch)  # type: ignore[misc]

    def _validate_inputs(self, x, y, sample_weight, *, name="x"):
        """Converts strings in memory to `Texts`, and checks samples and ids in NumPy arrays.

        Returns `(x, y, sample_weight)`. `x` is `Texts`, tokens, or a source of either.
        """
        x = as_texts(self.convert_inputs(x, name=name))
        check_samples(name, x, self)
        if is_tokens(x):
            size = self.backbone.vocabulary_size
            check_token_ids("token_ids", x["token_ids"], size, x.get("padding_mask"))
            check_segment_ids(x.get("segment_ids"), x.get("padding_mask"))
        self.check_labels(name, x, y, sample_weight)
        return x, y, sample_weight

    def convert_inputs(self, x, name="x"):
        """Converts further inputs of a model to strings or tokens. Returns others unchanged."""
        return x

    def check_labels(self, name, x, y, sample_weight):
        """Raises an error for labels that do not fit strings or tokens in memory."""
        raise NotImplementedError

    def check_class_weight(self, class_weight=None, **kwargs):
        """Raises an error for a `class_weight` if samples have several labels."""

    def _make_data(self, samples, batch_size, steps):
        """Returns `(x, y, sample_weight)` and the number of steps for Keras, in order."""
        x, *labels = samples
        if isinstance(x, Texts):
            packed = self._pack(*samples)
            return (self._make_in_memory_source(packed, batch_size, steps=steps), None, None), None
        if is_tokens(x):
            return (x, *sources.as_arrays(*labels)), steps
        x, steps = sources.as_source(x, self.preprocess_samples, steps)
        return (x, *labels), steps

    def _pack(self, x, y, sample_weight):
        """Packs strings with a packing preprocessor; returns them unchanged with another."""
        if not getattr(self.preprocessor, "packed", False):
            return x, y, sample_weight
        rows = self.preprocessor(x.as_inputs(), y=y, sample_weight=sample_weight)
        return keras.tree.map_structure(ops.convert_to_numpy, rows)

    def _make_in_memory_source(self, parts, batch_size, shuffle=False, steps=None):
        preprocess = None if is_tokens(parts[0]) else self.preprocess_samples
        return sources.InMemory(parts, preprocess, batch_size, shuffle, steps)

    def preprocess_samples(self, x, y=None, sample_weight=None):
        check_samples("x", x, self)
        if is_tokens(x):
            return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        x = x.as_inputs() if isinstance(x, Texts) else x
        return super().preprocess_samples(x, y, sample_weight)  # type: ignore[misc]


def _unpack(validation_data):
    """Returns `(x, y, sample_weight)`, of which `validation_data` may be only `x`."""
    x = as_texts(validation_data)
    if isinstance(x, Texts) or has_responses(x) or not isinstance(x, (tuple, list)):
        return x, None, None
    return keras.utils.unpack_x_y_sample_weight(tuple(x))


@contextlib.contextmanager
def _ignore_end_of_data(*data):
    """Silences Keras's warning at the end of data, which is expected of a finite `PackedText`."""
    parts = [part[0] if isinstance(part, tuple) else part for part in data]
    if not any(sources.is_packed_text(part) and not part.is_endless for part in parts):
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield


def _prepend_callback(callback, callbacks):
    """Adds a callback to the `callbacks` argument of `fit`, in any of its forms."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.append(callback)
        return callbacks
    return [callback, *keras.tree.flatten(callbacks or [])]
