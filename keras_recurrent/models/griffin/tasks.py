"""Tasks of Hawk and Griffin: language model, text classifier, tokenizer and preprocessors."""

import keras

from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.models.recurrent_text_classifier import RecurrentTextClassifier
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinTokenizer(ByteTokenizer):
    """Byte tokenizer of Griffin presets. Checkpoints have a `SentencePieceTokenizer`."""

    backbone_cls = GriffinBackbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinCausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    backbone_cls = GriffinBackbone
    tokenizer_cls = GriffinTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinCausalLM(RecurrentCausalLM):
    """Language model with Hawk or Griffin.

    A `GriffinBackbone`, and logits of the next token computed by its embedding's weights. De et al.
    2024, arXiv:2402.19427. With recurrent blocks and local attention, time and memory of a decoding
    step do not depend on the length of the text; global attention caches the keys and values of the
    whole text.
    """

    backbone_cls = GriffinBackbone
    preprocessor_cls = GriffinCausalLMPreprocessor


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
