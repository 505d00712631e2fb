"""Tasks of HypeNet and MiniCPM-SALA: language model, tokenizer and preprocessor."""

import keras

from keras_recurrent.models.lightning_hybrid.lightning_hybrid_backbone import (
    LightningHybridBackbone,
)
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LightningHybridTokenizer(ByteTokenizer):
    """Byte tokenizer of HypeNet and MiniCPM-SALA presets.

    Checkpoints have a `BPETokenizer` or a `SentencePieceTokenizer`.
    """

    backbone_cls = LightningHybridBackbone


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LightningHybridCausalLMPreprocessor(RecurrentCausalLMPreprocessor):
    backbone_cls = LightningHybridBackbone
    tokenizer_cls = LightningHybridTokenizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LightningHybridCausalLM(RecurrentCausalLM):
    """Language model with HypeNet or MiniCPM-SALA.

    A `LightningHybridBackbone`, and logits of the next token. Chen et al. 2026 (arXiv:2601.22156)
    and MiniCPM Team 2026 (arXiv:2602.11761). Blocks of attention cache the keys and values of the
    whole text; the state of the other blocks has a fixed size.
    """

    backbone_cls = LightningHybridBackbone
    preprocessor_cls = LightningHybridCausalLMPreprocessor
