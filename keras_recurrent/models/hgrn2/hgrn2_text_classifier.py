"""Text classifier with HGRN2."""

import keras

from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone
from keras_recurrent.models.hgrn2.text import HGRN2TextClassifierPreprocessor
from keras_recurrent.models.recurrent_text_classifier import RecurrentTextClassifier


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2TextClassifier(RecurrentTextClassifier):
    """Text classifier with HGRN2, also for regression.

    An `HGRN2Backbone`, and a linear layer on the hidden state of each text's last real token. The
    network is that of Qin et al. 2024, arXiv:2404.07904. The class supports KerasHub's text
    classifier API: `fit`, `evaluate` and `predict` on strings and labels or on tokens,
    `save_to_preset`, LoRA by `backbone.enable_lora`, and `quantize("int8")`, which does not
    quantize the last layer.

    Args:
        backbone: an `HGRN2Backbone`. Separate weights of its logits are not used and are frozen:
            set `backbone.token_embedding.trainable = True` before training a language model with
            the same backbone.
        num_classes: integer, the number of outputs; 1 for regression.
        preprocessor: an `HGRN2TextClassifierPreprocessor`; None: inputs are tokens.
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

    Example: regression of the number of letters in a text.

    >>> import keras, keras_recurrent
    >>> model = keras_recurrent.models.HGRN2TextClassifier.from_preset(
    ...     "hgrn2_tiny", num_layers=1, num_classes=1, sequence_length=16
    ... )
    >>> model.compile(keras.optimizers.Adam(1e-3), model.loss)
    >>> texts = ["a" * length for length in range(1, 9)]
    >>> history = model.fit(texts, [float(len(text)) for text in texts], epochs=5, verbose=0)
    >>> model.predict(texts, verbose=0).shape
    (8, 1)
    """

    backbone_cls = HGRN2Backbone
    preprocessor_cls = HGRN2TextClassifierPreprocessor
