"""What the text classifiers of all families share."""

import keras
import keras_hub
import numpy as np
from keras import ops

from keras_recurrent.checkpoints import loading
from keras_recurrent.checks.arguments import check_boolean, check_positive_integer
from keras_recurrent.models.classifier_head import LastToken, Logits
from keras_recurrent.models.parts import check_parts
from keras_recurrent.training.samples import is_text, is_tokens
from keras_recurrent.training.saved_training import SavedTraining
from keras_recurrent.training.text_training import TextTraining
from keras_recurrent.training.torch_training import CheckedTorchTraining


class RecurrentTextClassifier(
    CheckedTorchTraining, TextTraining, SavedTraining, keras_hub.models.TextClassifier
):
    """Base class of the text classifiers: a network, and a linear map of its last token.

    ```
    h = dropout(x_T)                the hidden state of a row's last real token
    h = dropout([x_T; x'_1])        with `bidirectional`: x' reads the row from its last token
    z = activation(W h + b)
    ```

    A recurrent network knows of a whole row what the hidden state of its last token tells. A family
    says `backbone_cls` and `preprocessor_cls`, and registers its class with Keras.

    Args:
        backbone: a `RecurrentBackbone`. Where its logits have weights of their own
            (`tie_word_embeddings=False` in an HGRN2), these serve nothing here, and are frozen.
        num_classes: integer, the number of outputs; 1 for regression.
        preprocessor: a `RecurrentTextClassifierPreprocessor`; None: inputs are tokens.
        bidirectional: boolean, whether the same network reads each row from its last token to its
            first as well. Its weights serve both directions, so that every preset does; a row
            begins with the start token in one direction, and with the end token in the other. A
            step takes twice the time.
        activation: of the outputs, such as `"softmax"`; None: they are logits, or the prediction of
            a regression.
        dropout: float, the part of the last hidden states that is dropped in training.
        compile: whether to compile with the defaults of `compile`. They suit fine-tuning (Adam at
            5e-5): compile with an optimizer of your own to train from the start.
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: a dictionary of `token_ids` and `padding_mask`, both `[B, T]`, as the backbone takes
            them. Padding may stand anywhere in a row and changes nothing. Of a row without a real
            token the hidden state is 0.

    Returns:
        `[B, num_classes]`, in the dtype of the weights: float32 under `"mixed_bfloat16"`.

    Raises:
        ValueError: a backbone or preprocessor of another kind, a tokenizer with tokens that the
            backbone does not know, a `num_classes` that is no integer from 1 on, or a
            `bidirectional` that is no boolean.
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
        if num_classes is None:  # it has a default for `from_preset`, where a file may tell it
            raise ValueError("`num_classes` is needed: the number of classes, or 1 for regression.")
        check_positive_integer("num_classes", num_classes)
        check_boolean("bidirectional", bidirectional)
        self.backbone = backbone
        self.preprocessor = preprocessor
        # Weights that no loss reaches would be a warning of Keras, and decay.
        for weight in backbone.token_embedding.weights:
            if weight.name == "reverse_embeddings":
                weight.trainable = False
        dtype = backbone.dtype_policy
        self.last_token = LastToken(dtype=dtype, name="last_token")
        self.output_dropout = keras.layers.Dropout(dropout, dtype=dtype, name="output_dropout")
        self.output_dense = Logits(
            num_classes, activation=activation, dtype=dtype.variable_dtype, name="logits"
        )

        inputs = dict(backbone.input)
        x = self.last_token(backbone(inputs), inputs["padding_mask"])
        if bidirectional:
            turned = {name: ops.flip(tensor, axis=1) for name, tensor in inputs.items()}
            first = self.last_token(backbone(turned), turned["padding_mask"])
            x = ops.concatenate([x, first], axis=-1)
        outputs = self.output_dense(self.output_dropout(x))

        # `compile` reads it.
        self.num_classes = num_classes
        self.bidirectional = bidirectional
        self.activation = keras.activations.get(activation)
        self.dropout = dropout
        super().__init__(
            inputs=inputs, outputs=outputs, compile=compile, name=name, trainable=trainable
        )

    @classmethod
    def from_preset(cls, preset, load_weights=None, **kwargs):
        """A classifier by the name of a preset, from a checkpoint, or a saved directory.

        What a language model's `from_preset` takes, this takes, too, a directory that a language
        model was saved to included: the network has its weights then, and those of the classes
        are fresh. A directory of a classifier's own `save_to_preset` brings these as well, unless
        `num_classes` is given.

        Args:
            preset: string, a name, a directory, or `hf://owner/repository`.
            load_weights: None, the default, loads weights where they belong to the preset: all but
                names without published ones. True insists on them, False leaves them alone.
            **kwargs: whatever the backbone (`dtype=`), the preprocessor (`sequence_length=`) and
                the classifier (`num_classes=`, `bidirectional=`, `dropout=`) take, in place of what
                the preset says.

        Raises:
            ValueError: an unknown name, one of another class, no `num_classes` where the preset has
                none, `load_weights=True` where there are none, or an argument that nothing
                understands; a checkpoint that does not fit.
            FileNotFoundError: a directory of `save_to_preset` without its `.weights.h5` files.

        Example:

        >>> import keras_recurrent
        >>> model = keras_recurrent.models.HGRN2TextClassifier.from_preset(
        ...     "hgrn2_tiny", num_classes=3, num_layers=1, sequence_length=64, bidirectional=True
        ... )
        >>> model.output_shape, model.preprocessor.sequence_length
        ((None, 3), 64)
        """
        loader, load_weights, kwargs = loading.resolve_task(cls, preset, load_weights, kwargs)
        return super().from_preset(loader, load_weights, **kwargs)

    def compile(self, optimizer="auto", loss="auto", *, metrics="auto", **kwargs):
        """Sets how the model trains; see `keras_hub.models.TextClassifier.compile`.

        `"auto"` is Adam at 5e-5; crossentropy with integer labels and their accuracy; and, with
        `num_classes=1`, the mean squared error and the mean absolute one.
        """
        if self.num_classes == 1:  # a crossentropy of one class would be 0
            if isinstance(loss, str) and loss == "auto":
                loss = keras.losses.MeanSquaredError()
            if isinstance(metrics, str) and metrics == "auto":
                metrics = [keras.metrics.MeanAbsoluteError()]
        super().compile(optimizer, loss, metrics=metrics, **kwargs)

    def as_samples(self, x):
        """Pairs of strings in memory as tokens."""
        if not _is_pair(x) or isinstance(x[0], str) or self.preprocessor is None:
            return x
        first, second = map(len, x)
        if first != second:
            raise ValueError(
                f"`x`: a pair must have as many first texts as second ones; got {first} and "
                f"{second}."
            )
        return keras.tree.map_structure(ops.convert_to_numpy, self.preprocessor(x=x))

    def preprocess_samples(self, x, y=None, sample_weight=None):
        if _is_pair(x):
            return self.preprocessor(x=x, y=y, sample_weight=sample_weight)
        return super().preprocess_samples(x, y, sample_weight)

    def check_labels(self, name, x, y, sample_weight):
        if not (is_text(x) or is_tokens(x)):
            return  # a source brings them
        if y is None:
            raise ValueError(
                f"`y` is needed beside `{name}`: a label for each row, as in `model.fit(texts, "
                "labels)`, and as `validation_data=(texts, labels)`."
            )
        if is_tokens(x) and "segment_ids" in x:
            raise ValueError(
                f"`{name}` has `segment_ids`, but a row is one text here, with one label. Give "
                "each text a row of its own."
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


def _check_numbers(labels):
    """Raises for a list or a NumPy array that does not hold a finite number for each row."""
    if not isinstance(labels, (list, tuple, np.ndarray)):
        return
    labels = np.asarray(labels)
    if labels.dtype.kind not in "iubf":
        found = f"{labels.dtype}"
    elif not _is_one_each(labels):
        found = f"the shape {labels.shape}"
    elif not np.isfinite(labels).all():
        found = "NaN or infinity"
    else:
        return
    raise ValueError(f"`y` must be finite numbers, one for each row; got {found}.")


def _is_one_each(labels):
    return labels.ndim == 1 or (labels.ndim == 2 and labels.shape[1] == 1)


def _check_classes(labels, num_classes):
    """Raises for a list or a NumPy array that does not hold classes, which no backend notices."""
    if not isinstance(labels, (list, tuple, np.ndarray)):
        return
    labels = np.asarray(labels)
    if labels.dtype.kind not in "iubf":
        found = f"{labels.dtype}"
    elif not _is_one_each(labels):
        found = f"the shape {labels.shape}"
    elif labels.size and not np.isin(labels, np.arange(num_classes)).all():
        found = f"numbers from {labels.min()} to {labels.max()}"
    else:
        return
    raise ValueError(
        f"`y` must be integers from 0 to {num_classes - 1}, a class for each row; got "
        f"{found}. Numbers that are no classes are learned with `num_classes=1`, and other labels "
        "with another `loss` in `compile`, such as rows of probabilities with "
        "`keras.losses.CategoricalCrossentropy(from_logits=True)`."
    )
