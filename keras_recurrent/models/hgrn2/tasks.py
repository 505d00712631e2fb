"""Tasks of HGRN2: language model, text classifier, tokenizer and preprocessors."""

import keras

from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.models.recurrent_text_classifier import RecurrentTextClassifier
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2Tokenizer(ByteTokenizer):
    """Byte tokenizer of HGRN2 presets. Checkpoints have a `SentencePieceTokenizer`."""

    backbone_cls = HGRN2Backbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2CausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    backbone_cls = HGRN2Backbone
    tokenizer_cls = HGRN2Tokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2CausalLM(RecurrentCausalLM):
    """Language model with HGRN2.

    An `HGRN2Backbone`, and logits of the next token. Qin et al. 2024, arXiv:2404.07904. Time and
    memory of a decoding step do not depend on the length of the text, except in hybrids with
    attention to all tokens. `"hgrn2_1.3b_100b"` has weights on the Hugging Face Hub.
    """

    backbone_cls = HGRN2Backbone
    preprocessor_cls = HGRN2CausalLMPreprocessor


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2TextClassifierPreprocessor(RecurrentTextClassifierPreprocessor):
    backbone_cls = HGRN2Backbone
    tokenizer_cls = HGRN2Tokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2TextClassifier(RecurrentTextClassifier):
    """Text classifier with HGRN2, also for regression.

    An `HGRN2Backbone`, and a linear layer on the hidden state of each text's last real token. The
    network is that of Qin et al. 2024, arXiv:2404.07904.
    """

    backbone_cls = HGRN2Backbone
    preprocessor_cls = HGRN2TextClassifierPreprocessor
