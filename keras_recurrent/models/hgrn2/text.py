"""Tokenizer of HGRN2 presets, and preprocessors of HGRN2."""

import keras

from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone
from keras_recurrent.models.inherited_docstrings import inherits_docstring
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class HGRN2Tokenizer(ByteTokenizer):
    """Byte tokenizer of HGRN2 presets.

    KerasHub finds tokenizers by their backbone, so each family of models has a separate class. Code
    may also pass a `ByteTokenizer`. Checkpoints have another tokenizer, see
    `keras_recurrent.tokenizers.SentencePieceTokenizer`.

    Example:

    >>> import keras_hub
    >>> import keras_recurrent
    >>> tokenizer = keras_hub.tokenizers.Tokenizer.from_preset("hgrn2_tiny")
    >>> tokenizer("hi")
    array([107, 108], dtype=int32)
    """

    backbone_cls = HGRN2Backbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class HGRN2CausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    backbone_cls = HGRN2Backbone
    tokenizer_cls = HGRN2Tokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class HGRN2TextClassifierPreprocessor(RecurrentTextClassifierPreprocessor):
    backbone_cls = HGRN2Backbone
    tokenizer_cls = HGRN2Tokenizer
