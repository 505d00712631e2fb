"""Text classifier with Hawk or Griffin, and its preprocessor."""

import keras

from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.models.griffin.griffin_causal_lm import GriffinTokenizer
from keras_recurrent.models.recurrent_text_classifier import RecurrentTextClassifier
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinTextClassifierPreprocessor(RecurrentTextClassifierPreprocessor):
    backbone_cls = GriffinBackbone
    tokenizer_cls = GriffinTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinTextClassifier(RecurrentTextClassifier):
    """Text classifier with Hawk or Griffin, also for regression.

    A `GriffinBackbone`, and a linear layer on the hidden state of each text's last real token. The
    network is that of De et al. 2024, arXiv:2402.19427.
    """

    backbone_cls = GriffinBackbone
    preprocessor_cls = GriffinTextClassifierPreprocessor
