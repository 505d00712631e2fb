"""Text classifier with HGRN2, and its preprocessor."""

import keras

from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone
from keras_recurrent.models.hgrn2.hgrn2_causal_lm import HGRN2Tokenizer
from keras_recurrent.models.recurrent_text_classifier import RecurrentTextClassifier
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2TextClassifierPreprocessor(RecurrentTextClassifierPreprocessor):
    backbone_cls = HGRN2Backbone
    tokenizer_cls = HGRN2Tokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2TextClassifier(RecurrentTextClassifier):
    """Text classifier with HGRN2, also for regression.

    An `HGRN2Backbone`, and a linear layer on the hidden state of each text's last real token. The
    network is that of Qin et al. 2024, arXiv:2404.07904.
    """

    backbone_cls = HGRN2Backbone
    preprocessor_cls = HGRN2TextClassifierPreprocessor
