"""Tokenizer of TransNormerLLM presets, and its preprocessor."""

import keras

from keras_recurrent.models.inherited_docstrings import inherits_docstring
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.models.transnormer.transnormer_backbone import TransNormerBackbone
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class TransNormerTokenizer(ByteTokenizer):
    """Byte tokenizer of TransNormerLLM presets.

    KerasHub finds tokenizers by their backbone, so each family of models has a separate class. Code
    may also pass a `ByteTokenizer`. Checkpoints have another tokenizer, see
    `keras_recurrent.tokenizers.SentencePieceTokenizer`.

    Example:

    >>> import keras_hub
    >>> import keras_recurrent
    >>> tokenizer = keras_hub.tokenizers.Tokenizer.from_preset("tnl_tiny")
    >>> tokenizer("hi")
    array([107, 108], dtype=int32)
    """

    backbone_cls = TransNormerBackbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class TransNormerCausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    backbone_cls = TransNormerBackbone
    tokenizer_cls = TransNormerTokenizer
