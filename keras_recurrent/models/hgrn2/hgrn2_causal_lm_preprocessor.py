"""Strings to what HGRN2 reads."""

import keras

from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone
from keras_recurrent.models.hgrn2.hgrn2_tokenizer import HGRN2Tokenizer
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2CausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    __doc__ = RecurrentCausalLMPreprocessor.__doc__
    backbone_cls = HGRN2Backbone
    tokenizer_cls = HGRN2Tokenizer
