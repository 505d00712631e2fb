"""Text classifier with Hawk or Griffin."""

import keras

from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.models.griffin.text import GriffinTextClassifierPreprocessor
from keras_recurrent.models.recurrent_text_classifier import RecurrentTextClassifier


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinTextClassifier(RecurrentTextClassifier):
    """Text classifier with Hawk or Griffin, also for regression.

    A `GriffinBackbone`, and a linear layer on the hidden state of each text's last real token. The
    network is that of De et al. 2024, arXiv:2402.19427. The class supports KerasHub's text
    classifier API: `fit`, `evaluate` and `predict` on strings and labels or on tokens,
    `save_to_preset`, LoRA by `backbone.enable_lora`, and `quantize("int8")`, which does not
    quantize the last layer.

    Args:
        backbone: a `GriffinBackbone`.
        num_classes: integer, the number of outputs; 1 for regression.
        preprocessor: a `GriffinTextClassifierPreprocessor`. None: inputs are tokens.
        bidirectional: boolean, also runs the network over each text in reverse, in twice the time;
            the linear layer then takes both hidden states.
        activation: activation of the outputs, such as `"softmax"`. None: the outputs are logits, or
            the prediction of a regression.
        dropout: float, dropout rate of the last hidden states.
        compile: boolean, compiles with the defaults: Adam at 5e-5, which suits fine-tuning, and
            cross-entropy with accuracy, or, with `num_classes=1`, the mean squared error.
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: a dictionary of `token_ids` and `padding_mask`, both `[B, T]`. Padding may be at any
            position and does not change the results.

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

    backbone_cls = GriffinBackbone
    preprocessor_cls = GriffinTextClassifierPreprocessor
