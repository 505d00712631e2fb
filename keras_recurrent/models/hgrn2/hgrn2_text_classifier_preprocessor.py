"""Strings and labels to what a text classifier of HGRN2 trains on."""

import keras

from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone
from keras_recurrent.models.hgrn2.hgrn2_tokenizer import HGRN2Tokenizer
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2TextClassifierPreprocessor(RecurrentTextClassifierPreprocessor):
    __doc__ = RecurrentTextClassifierPreprocessor.__doc__
    backbone_cls = HGRN2Backbone
    tokenizer_cls = HGRN2Tokenizer
