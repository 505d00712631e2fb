"""Strings to what TransNormerLLM reads."""

import keras

from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.models.transnormer.transnormer_backbone import TransNormerBackbone
from keras_recurrent.models.transnormer.transnormer_tokenizer import TransNormerTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TransNormerCausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    __doc__ = RecurrentCausalLMPreprocessor.__doc__
    backbone_cls = TransNormerBackbone
    tokenizer_cls = TransNormerTokenizer
