"""Strings and labels to what a text classifier of Griffin trains on."""

import keras

from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.models.griffin.griffin_tokenizer import GriffinTokenizer
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinTextClassifierPreprocessor(RecurrentTextClassifierPreprocessor):
    __doc__ = RecurrentTextClassifierPreprocessor.__doc__
    backbone_cls = GriffinBackbone
    tokenizer_cls = GriffinTokenizer
