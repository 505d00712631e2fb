"""Tokenizer of presets of HypeNet and MiniCPM-SALA, and their preprocessor."""

import keras

from keras_recurrent.models.inherited_docstrings import inherits_docstring
from keras_recurrent.models.lightning_hybrid.lightning_hybrid_backbone import (
    LightningHybridBackbone,
)
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class LightningHybridTokenizer(ByteTokenizer):
    """Byte tokenizer of presets of HypeNet and MiniCPM-SALA without weights.

    Checkpoints have another tokenizer, see `keras_recurrent.tokenizers.BPETokenizer` and
    `SentencePieceTokenizer`.

    Example:

    >>> import keras_hub, keras_recurrent
    >>> tokenizer = keras_hub.tokenizers.Tokenizer.from_preset("hypenet_tiny")
    >>> tokenizer("hi")
    array([107, 108], dtype=int32)
    """

    backbone_cls = LightningHybridBackbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class LightningHybridCausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    backbone_cls = LightningHybridBackbone
    tokenizer_cls = LightningHybridTokenizer
