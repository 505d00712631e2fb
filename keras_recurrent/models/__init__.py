"""Language models in KerasHub's shape."""

from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.models.griffin.griffin_causal_lm import GriffinCausalLM
from keras_recurrent.models.griffin.griffin_causal_lm_preprocessor import (
    GriffinCausalLMPreprocessor,
)
from keras_recurrent.models.griffin.griffin_residual_block import GriffinResidualBlock
from keras_recurrent.models.griffin.griffin_tokenizer import GriffinTokenizer

__all__ = [
    "GriffinBackbone",
    "GriffinCausalLM",
    "GriffinCausalLMPreprocessor",
    "GriffinResidualBlock",
    "GriffinTokenizer",
]
