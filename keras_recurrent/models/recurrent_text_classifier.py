"""Base class of the text classifiers of all families."""

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_recurrent.checks.arguments import check_boolean, check_positive_integer
from keras_recurrent.families import FamilyMember
from keras_recurrent.inherited_docstrings import InheritedDocstring
from keras_recurrent.layers.sequences import last_real, where_any_real
from keras_recurrent.models.parts import check_parts
from keras_recurrent.models.preset_loading import PresetLoading
from keras_recurrent.training.samples import is_text, is_tokens
from keras_recurrent.training.saved_training import SavedTraining
from keras_recurrent.training.text_training import TextTraining
from keras_recurrent.training.torch_training import TorchTraining


class RecurrentTextClassifier(
    TorchTraining,
    TextTraining,
    SavedTraining,
    PresetLoading,
    FamilyMember,
    InheritedDocstring,
    keras_hub.models.TextClassifier,
):
    """Base class of the text classifiers: a network, and a linear layer on its last token.

    ```
    h = dropout(x_T)                the hidden state of a text's last real token
    h = dropout([x_T; x'_1])        with `bidirectional`: x' from the reversed text
    z = activation(W h + b)
    ```

    The hidden state of the last token depends on the whole text.

    Args:
        backbone: the network, a backbone of the same family. Separate weights of its logits
            (`tie_word_embeddings=False` in HGRN2) are not used and are frozen: set
            `backbone.token_embedding.trainable = True` before training a language model with the
            same backbone.
        num_classes: integer, the number of outputs; 1 for regression.
        preprocessor: a preprocessor of the same family. None: inputs are tokens.
        bidirectional: boolean, also runs the network over each text in reverse. Both directions use
            the same weights, so every preset works. A text begins with the start token in one
            direction and with the end token in the other. A step takes twice the time.
        activation: activation of the outputs, such as `"softmax"`. None: the outputs are logits, or
            the prediction of a regression.
        dropout: float, dropout rate of the last hidden states.
        compile: boolean, compiles with the defaults of `compile`, which suit fine-tuning (Adam at
            5e-5). To train from scratch, compile with another optimizer.
        name: string.
        trainable: boolean.

    KerasHub's API of text classifiers applies: `fit`, `evaluate` and `predict` on strings and
    labels or on tokens, `save_to_preset`, LoRA by `backbone.enable_lora`, and `quantize("int8")`,
    which does not quantize the last layer.

    Call arguments:
        inputs: a dictionary of `token_ids` and `padding_mask`, both `[B, T]`, as for the backbone.
            Padding may be at any position and does not change the results. The hidden state of a
            text without real tokens is 0.

    Returns:
        `[B, num_classes]`, in the dtype of the weights: float32 under `"mixed_bfloat16"`.

    Raises:
        ValueError: the backbone or preprocessor is of another class, the tokenizer has more tokens
            than the backbone, `num_classes` is not an integer of at least 1, or `bidirectional` is
            not a boolean.

    Example: texts about ticking.

    >>> import keras, keras_recurrent
    >>> model = keras_recurrent.models.GriffinTextClassifier.from_preset(
    ...     "hawk_tiny", num_layers=1, num_classes=2, sequence_length=16
    ... )
    >>> model.compile(keras.optimizers.Adam(1e-3), model.loss, metrics=["accuracy"])
    >>> texts, labels = ["tick tick", "boom"] * 4, [1, 0] * 4
    >>> history = model.fit(texts, labels, batch_size=4, epochs=5, verbose=0)
    >>> model.predict(texts, verbose=0).argmax(axis=1)[:2].tolist()
    [1, 0]
    """

    def __init__(
        self,
        backbone,
        num_classes=None,
        preprocessor=None,
        bidirectional=False,
        activation=None,
        dropout=0.0,
        compile=True,
        name=None,
        trainable=True,
    ):
        kind = keras_hub.models.TextClassifierPreprocessor
        check_parts(type(self), backbone, preprocessor, kind)
        if num_classes is None:  # the default is for `from_preset`, where a file may have it
            raise ValueError("`num_classes` is needed: the number of classes, or 1 for regression.")
        check_positive_integer("num_classes", num_classes)
        check_boolean("bidirectional", bidirectional)
        self.backbone = backbone
        self.preprocessor = preprocessor
        dtype = backbone.dtype_policy
        self.last_token = LastToken(dtype=dtype, name="last_token")
        self.output_dropout = keras.layers.Dropout(dropout, dtype=dtype, name="output_dropout")
        self.output_dense = Logits(
            num_classes, activation=activation, dtype=dtype.variable_dtype, name="logits"
        )

        inputs = dict(backbone.input)
        x = self.last_token(backbone(inputs), inputs["padding_mask"])
        if bidirectional:
            reversed_inputs = {name: ops.flip(tensor, axis=1) for name, tensor in inputs.items()}
            first = self.last_token(backbone(reversed_inputs), reversed_inputs["padding_mask"])
            x = ops.concatenate([x, first], axis=-1)
        outputs = self.output_dense(self.output_dropout(x))

        # `compile`, called by the base class, reads `num_classes`.
        self.num_classes = num_classes
        self.bidirectional = bidirectional
        self.activation = keras.activations.get(activation)
        self.dropout = dropout
        super().__init__(
            inputs=inputs, outputs=outputs, compile=compile, name=name, trainable=trainable
        )
        # Keras would warn of unused weights, and weight decay would change them. On JAX the base
        # class makes all weights trainable.
        for weight in backbone.token_embedding.weights:
            if weight.name == "reverse_embeddings":
                weight.trainable = False

    def compile(self, optimizer="auto", loss="auto", *, metrics="auto", **kwargs):
        """Configures training; see `keras_hub.models.TextClassifier.compile`.

        `"auto"` is Adam at 5e-5, with the cross-entropy of integer labels and their accuracy, or,
        with `num_classes=1`, the mean squared error and the mean absolute error.
        """
        if self.num_classes == 1:  # the cross-entropy of one class would be 0
            if isinstance(loss, str) and loss == "auto":
                loss = keras.losses.MeanSquaredError()
            if isinstance(metrics, str) and metrics == "auto":
                metrics = [keras.metrics.MeanAbsoluteError()]
        super().compile(optimizer, loss, metrics=metrics, **kwargs)

    def convert_inputs(self, x, name="x"):
        """Tokenizes pairs of strings in memory."""
        if not _is_pair(x) or isinstance(x[0], str) or self.preprocessor is None:
            return x
        first, second = map(len, x)
        if first != second:
            raise ValueError(
                f"`{name}`: a pair must have as many first texts as second ones; got {first} and "
                f"{second}."
            )
        return keras.tree.map_structure(ops.convert_to_numpy, self.preprocessor(x=x))

    def preprocess_samples(self, x, y=None, sample_weight=None):
        if _is_pair(x):
            return self.preprocessor(x=x, y=y, sample_weight=sample_weight)
        return super().preprocess_samples(x, y, sample_weight)

    def check_labels(self, name, x, y, sample_weight):
        if not (is_text(x) or is_tokens(x)):
            return  # a source yields the labels
        if y is None:
            raise ValueError(
                f"`y` is needed with `{name}`: a label for each text, as in `model.fit(texts, "
                "labels)`, and as `validation_data=(texts, labels)`."
            )
        if is_tokens(x) and "segment_ids" in x:
            raise ValueError(
                f"`{name}` has `segment_ids`, but a classifier takes one text with one label per "
                "sequence. Pass each text as a separate sequence."
            )
        if isinstance(self.loss, keras.losses.SparseCategoricalCrossentropy):
            _check_classes(y, self.num_classes)
        elif self.num_classes == 1:
            _check_numbers(y)

    def rematerialized_call(self, layer_call, *args, **kwargs):
        return layer_call  # only the backbone's blocks are rematerialized

    def get_config(self):
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "bidirectional": self.bidirectional,
            "activation": keras.activations.serialize(self.activation),
            "dropout": self.dropout,
        }


def _is_pair(x):
    return isinstance(x, tuple) and len(x) == 2 and all(map(is_text, x))


def _labels_problem(labels, num_classes=None) -> str | None:
    """Returns a description of invalid labels, which no backend checks, or None.

    Args:
        labels: a list or NumPy array. Other labels are not checked.
        num_classes: integer, the number of classes. None: the labels are finite numbers.
    """
    if not isinstance(labels, (list, tuple, np.ndarray)):
        return None
    labels = np.asarray(labels)
    if labels.dtype.kind not in "iubf":
        return f"{labels.dtype}"
    if labels.ndim != 1 and (labels.ndim != 2 or labels.shape[1] != 1):
        return f"the shape {labels.shape}"
    if num_classes is None:
        return None if np.isfinite(labels).all() else "NaN or infinity"
    if labels.size and not np.isin(labels, np.arange(num_classes)).all():
        return f"numbers from {labels.min()} to {labels.max()}"
    return None


def _check_numbers(labels):
    if problem := _labels_problem(labels):
        raise ValueError(f"`y` must be finite numbers, one for each sample; got {problem}.")


def _check_classes(labels, num_classes):
    if problem := _labels_problem(labels, num_classes):
        raise ValueError(
            f"`y` must be integers from 0 to {num_classes - 1}, a class for each sample; got "
            f"{problem}. For numbers other than classes, use `num_classes=1`, and for other "
            "labels, another `loss` in `compile`, such as "
            "`keras.losses.CategoricalCrossentropy(from_logits=True)` for rows of probabilities."
        )


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LastToken(keras.layers.Layer):
    """Hidden state of the last real token of each sequence, or 0 without real tokens."""

    def call(self, hidden_states, padding_mask):
        """hidden_states: `[B, T, D]`. padding_mask: `[B, T]`, 0 at padding. Returns `[B, D]`."""
        mask = ops.cast(padding_mask, "bool")
        (last,) = last_real((hidden_states,), mask)
        return where_any_real(last[:, 0], mask, None)

    def compute_output_spec(self, hidden_states, padding_mask):
        batch, _, width = hidden_states.shape
        return keras.KerasTensor((batch, width), dtype=self.compute_dtype)

    def get_config(self):
        return super().get_config()  # Keras requires the method for a layer with a policy argument


@keras.saving.register_keras_serializable(package="keras_recurrent")
class Logits(keras.layers.Dense):
    """Linear layer that is not quantized with the model.

    KerasHub's files do not store the dtype of a task's head. Keras does not quantize subclasses of
    `Dense`.
    """
