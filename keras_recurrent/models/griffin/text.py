"""Tokenizer of Griffin presets, and preprocessors of Hawk and Griffin."""

import keras

from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.models.inherited_docstrings import inherits_docstring
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class GriffinTokenizer(ByteTokenizer):
    """Byte tokenizer of Griffin presets.

    KerasHub finds tokenizers by their backbone, so each family of models has a separate class. Code
    may also pass a `ByteTokenizer`.

    Example:

    >>> import keras_hub
    >>> import keras_recurrent
    >>> tokenizer = keras_hub.tokenizers.Tokenizer.from_preset("hawk_tiny")
    >>> tokenizer("hi")
    array([107, 108], dtype=int32)
    """

    backbone_cls = GriffinBackbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class GriffinCausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    backbone_cls = GriffinBackbone
    tokenizer_cls = GriffinTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class GriffinTextClassifierPreprocessor(RecurrentTextClassifierPreprocessor):
    backbone_cls = GriffinBackbone
    tokenizer_cls = GriffinTokenizer
