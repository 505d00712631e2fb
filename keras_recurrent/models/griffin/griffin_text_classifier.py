"""Hawk and Griffin as classifiers of texts."""

import keras

from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.models.griffin.text import GriffinTextClassifierPreprocessor
from keras_recurrent.models.recurrent_text_classifier import RecurrentTextClassifier


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinTextClassifier(RecurrentTextClassifier):
    """Hawk and Griffin as classifiers of texts, and for regression.

    A `GriffinBackbone`, and a linear map of the hidden state of each row's last real token. De et
    al. 2024, arXiv:2402.19427, is the network's source. It does what a KerasHub text classifier
    does: `fit`, `evaluate` and `predict` on strings and labels or on tokens, `save_to_preset`, LoRA
    through `backbone.enable_lora`, `quantize("int8")`, which leaves the last map as it is.

    Args:
        backbone: a `GriffinBackbone`.
        num_classes: integer, the number of outputs; 1 for regression.
        preprocessor: a `GriffinTextClassifierPreprocessor`; None: inputs are tokens.
        bidirectional: boolean, whether the same network reads each row from its last token to its
            first as well, in twice the time; the map then has both hidden states.
        activation: of the outputs, such as `"softmax"`; None: they are logits, or the prediction of
            a regression.
        dropout: float, the part of the last hidden states that is dropped in training.
        compile: whether to compile with the defaults: Adam at 5e-5, which suits fine-tuning, and
            crossentropy with accuracy, or, with `num_classes=1`, the mean squared error.
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: a dictionary of `token_ids` and `padding_mask`, both `[B, T]`. Padding may
            stand anywhere in a row and changes nothing.

    Returns:
        `[B, num_classes]`, in the dtype of the weights: float32 under `"mixed_bfloat16"`.

    Raises:
        ValueError: a backbone or preprocessor of another kind, a tokenizer with tokens that the
            backbone does not know, a `num_classes` that is no integer from 1 on, or a
            `bidirectional` that is no boolean.

    Example: which texts are about ticking.

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

    backbone_cls = GriffinBackbone
    preprocessor_cls = GriffinTextClassifierPreprocessor
