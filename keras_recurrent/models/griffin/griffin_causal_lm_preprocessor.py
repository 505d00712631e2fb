"""Strings to what Hawk and Griffin read."""

import keras

from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.models.griffin.griffin_tokenizer import GriffinTokenizer
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinCausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    __doc__ = RecurrentCausalLMPreprocessor.__doc__
    backbone_cls = GriffinBackbone
    tokenizer_cls = GriffinTokenizer
