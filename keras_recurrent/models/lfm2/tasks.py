"""Tasks of LFM2 and LFM2.5: language model, text classifier, tokenizer and preprocessors."""

import keras

from keras_recurrent.models.lfm2.lfm2_backbone import LFM2Backbone
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.models.recurrent_text_classifier import RecurrentTextClassifier
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LFM2Tokenizer(ByteTokenizer):
    """Byte tokenizer of LFM2 presets. Checkpoints have a `BPETokenizer`."""

    backbone_cls = LFM2Backbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LFM2CausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    backbone_cls = LFM2Backbone
    tokenizer_cls = LFM2Tokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LFM2CausalLM(RecurrentCausalLM):
    """Language model with LFM2 or LFM2.5.

    An `LFM2Backbone`, and logits of the next token. Liquid AI 2025 (arXiv:2511.23404). Blocks of
    attention cache the keys and values of the whole text. The state of the other blocks has a fixed
    size.
    """

    backbone_cls = LFM2Backbone
    preprocessor_cls = LFM2CausalLMPreprocessor


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LFM2TextClassifierPreprocessor(RecurrentTextClassifierPreprocessor):
    backbone_cls = LFM2Backbone
    tokenizer_cls = LFM2Tokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LFM2TextClassifier(RecurrentTextClassifier):
    """Text classifier with LFM2, also for regression.

    An `LFM2Backbone`, and a linear layer on the hidden state of each text's last real token. The
    network is that of Liquid AI 2025, arXiv:2511.23404.
    """

    backbone_cls = LFM2Backbone
    preprocessor_cls = LFM2TextClassifierPreprocessor
