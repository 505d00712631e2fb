"""Tasks of Mamba-2 and hybrids: language model, text classifier, tokenizer and preprocessors."""

import keras

from keras_recurrent.models.mamba_hybrid.mamba_hybrid_backbone import MambaHybridBackbone
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.models.recurrent_text_classifier import RecurrentTextClassifier
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class MambaHybridTokenizer(ByteTokenizer):
    """Byte tokenizer of presets. Checkpoints have a `BPETokenizer`."""

    backbone_cls = MambaHybridBackbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
class MambaHybridCausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    backbone_cls = MambaHybridBackbone
    tokenizer_cls = MambaHybridTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class MambaHybridCausalLM(RecurrentCausalLM):
    """Language model with Nemotron-H, Granite 4.0 H, Falcon-H1 or Mamba-2.

    A `MambaHybridBackbone`, and logits of the next token. Attention layers cache the keys and
    values of the whole text; the state of Mamba-2 layers has a fixed size.
    """

    backbone_cls = MambaHybridBackbone
    preprocessor_cls = MambaHybridCausalLMPreprocessor


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
