"""Tasks of TransNormerLLM: language model, tokenizer and preprocessor."""

import keras

from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.models.transnormer.transnormer_backbone import TransNormerBackbone
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TransNormerTokenizer(ByteTokenizer):
    """Byte tokenizer of TransNormerLLM presets. Checkpoints have a `SentencePieceTokenizer`."""

    backbone_cls = TransNormerBackbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TransNormerCausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    backbone_cls = TransNormerBackbone
    tokenizer_cls = TransNormerTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TransNormerCausalLM(RecurrentCausalLM):
    """Language model with TransNormerLLM.

    A `TransNormerBackbone`, and logits of the next token computed by separate weights. Qin et al.
    2023 (arXiv:2307.14995) and 2024 (arXiv:2405.17381). The time per token in training and in
    decoding does not depend on the length of the text.
    """

    backbone_cls = TransNormerBackbone
    preprocessor_cls = TransNormerCausalLMPreprocessor
