"""Text classifier with Mamba-2 or a Mamba-2 hybrid, and its preprocessor."""

import keras

from keras_recurrent.models.mamba_hybrid.mamba_hybrid_backbone import MambaHybridBackbone
from keras_recurrent.models.mamba_hybrid.mamba_hybrid_causal_lm import MambaHybridTokenizer
from keras_recurrent.models.recurrent_text_classifier import RecurrentTextClassifier
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class MambaHybridTextClassifierPreprocessor(RecurrentTextClassifierPreprocessor):
    backbone_cls = MambaHybridBackbone
    tokenizer_cls = MambaHybridTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class MambaHybridTextClassifier(RecurrentTextClassifier):
    """Text classifier with Nemotron-H, Granite 4.0 H, Falcon-H1 or Mamba-2, also for regression.

    A `MambaHybridBackbone`, and a linear layer on the hidden state of each text's last real token.
    """

    backbone_cls = MambaHybridBackbone
    preprocessor_cls = MambaHybridTextClassifierPreprocessor
