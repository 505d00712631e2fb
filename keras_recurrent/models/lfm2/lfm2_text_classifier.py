"""Text classifier with LFM2, and its preprocessor."""

import keras

from keras_recurrent.models.lfm2.lfm2_backbone import LFM2Backbone
from keras_recurrent.models.lfm2.lfm2_causal_lm import LFM2Tokenizer
from keras_recurrent.models.recurrent_text_classifier import RecurrentTextClassifier
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)


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
