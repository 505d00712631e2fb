"""Tasks of all families: language models, text classifiers, tokenizers and preprocessors."""

from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone
from keras_recurrent.models.lfm2.lfm2_backbone import LFM2Backbone
from keras_recurrent.models.lightning_hybrid.lightning_hybrid_backbone import (
    LightningHybridBackbone,
)
from keras_recurrent.models.mamba_hybrid.mamba_hybrid_backbone import MambaHybridBackbone
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM
from keras_recurrent.models.recurrent_causal_lm_preprocessor import RecurrentCausalLMPreprocessor
from keras_recurrent.models.recurrent_text_classifier import RecurrentTextClassifier
from keras_recurrent.models.recurrent_text_classifier_preprocessor import (
    RecurrentTextClassifierPreprocessor,
)
from keras_recurrent.models.transnormer.transnormer_backbone import TransNormerBackbone
from keras_recurrent.tokenizers.byte_tokenizer import ByteTokenizer

# === Hawk and Griffin ===


class GriffinTokenizer(ByteTokenizer, backbone=GriffinBackbone):
    """Byte tokenizer of Griffin presets. Checkpoints have a `SentencePieceTokenizer`."""


class GriffinCausalLMPreprocessor(RecurrentCausalLMPreprocessor, tokenizer=GriffinTokenizer): ...


class GriffinCausalLM(RecurrentCausalLM, preprocessor=GriffinCausalLMPreprocessor):
    """Language model with Hawk or Griffin.

    A `GriffinBackbone`, and logits of the next token computed by its embedding's weights. De et al.
    2024, arXiv:2402.19427. With recurrent blocks and local attention, time and memory of a decoding
    step do not depend on the length of the text; global attention caches the keys and values of the
    whole text.
    """


class GriffinTextClassifierPreprocessor(
    RecurrentTextClassifierPreprocessor, tokenizer=GriffinTokenizer
): ...


class GriffinTextClassifier(
    RecurrentTextClassifier, preprocessor=GriffinTextClassifierPreprocessor
):
    """Text classifier with Hawk or Griffin, also for regression.

    A `GriffinBackbone`, and a linear layer on the hidden state of each text's last real token. The
    network is that of De et al. 2024, arXiv:2402.19427.
    """


# === HGRN2 ===


class HGRN2Tokenizer(ByteTokenizer, backbone=HGRN2Backbone):
    """Byte tokenizer of HGRN2 presets. Checkpoints have a `SentencePieceTokenizer`."""


class HGRN2CausalLMPreprocessor(RecurrentCausalLMPreprocessor, tokenizer=HGRN2Tokenizer): ...


class HGRN2CausalLM(RecurrentCausalLM, preprocessor=HGRN2CausalLMPreprocessor):
    """Language model with HGRN2.

    An `HGRN2Backbone`, and logits of the next token. Qin et al. 2024, arXiv:2404.07904. Time and
    memory of a decoding step do not depend on the length of the text, except in hybrids with
    attention to all tokens. `"hgrn2_1.3b_100b"` has weights on the Hugging Face Hub.
    """


class HGRN2TextClassifierPreprocessor(
    RecurrentTextClassifierPreprocessor, tokenizer=HGRN2Tokenizer
): ...


class HGRN2TextClassifier(RecurrentTextClassifier, preprocessor=HGRN2TextClassifierPreprocessor):
    """Text classifier with HGRN2, also for regression.

    An `HGRN2Backbone`, and a linear layer on the hidden state of each text's last real token. The
    network is that of Qin et al. 2024, arXiv:2404.07904.
    """


# === LFM2 and LFM2.5 ===


class LFM2Tokenizer(ByteTokenizer, backbone=LFM2Backbone):
    """Byte tokenizer of LFM2 presets. Checkpoints have a `BPETokenizer`."""


class LFM2CausalLMPreprocessor(RecurrentCausalLMPreprocessor, tokenizer=LFM2Tokenizer): ...


class LFM2CausalLM(RecurrentCausalLM, preprocessor=LFM2CausalLMPreprocessor):
    """Language model with LFM2 or LFM2.5.

    An `LFM2Backbone`, and logits of the next token. Liquid AI 2025 (arXiv:2511.23404). Blocks of
    attention cache the keys and values of the whole text. The state of the other blocks has a fixed
    size.
    """


class LFM2TextClassifierPreprocessor(
    RecurrentTextClassifierPreprocessor, tokenizer=LFM2Tokenizer
): ...


class LFM2TextClassifier(RecurrentTextClassifier, preprocessor=LFM2TextClassifierPreprocessor):
    """Text classifier with LFM2, also for regression.

    An `LFM2Backbone`, and a linear layer on the hidden state of each text's last real token. The
    network is that of Liquid AI 2025, arXiv:2511.23404.
    """


# === HypeNet and MiniCPM-SALA ===


class LightningHybridTokenizer(ByteTokenizer, backbone=LightningHybridBackbone):
    """Byte tokenizer of HypeNet and MiniCPM-SALA presets.

    Checkpoints have a `BPETokenizer` or a `SentencePieceTokenizer`.
    """


class LightningHybridCausalLMPreprocessor(
    RecurrentCausalLMPreprocessor, tokenizer=LightningHybridTokenizer
): ...


class LightningHybridCausalLM(RecurrentCausalLM, preprocessor=LightningHybridCausalLMPreprocessor):
    """Language model with HypeNet or MiniCPM-SALA.

    A `LightningHybridBackbone`, and logits of the next token. Chen et al. 2026 (arXiv:2601.22156)
    and MiniCPM Team 2026 (arXiv:2602.11761). Blocks of attention cache the keys and values of the
    whole text; the state of the other blocks has a fixed size.
    """


# === Nemotron-H, Granite 4.0 H, Falcon-H1 and Mamba-2 ===


class MambaHybridTokenizer(ByteTokenizer, backbone=MambaHybridBackbone):
    """Byte tokenizer of Nemotron-H, Granite 4.0 H, Falcon-H1 and Mamba-2 presets.

    Checkpoints have a `BPETokenizer`.
    """


class MambaHybridCausalLMPreprocessor(
    RecurrentCausalLMPreprocessor, tokenizer=MambaHybridTokenizer
): ...


class MambaHybridCausalLM(RecurrentCausalLM, preprocessor=MambaHybridCausalLMPreprocessor):
    """Language model with Nemotron-H, Granite 4.0 H, Falcon-H1 or Mamba-2.

    A `MambaHybridBackbone`, and logits of the next token. Attention layers cache the keys and
    values of the whole text; the state of Mamba-2 layers has a fixed size.
    """


class MambaHybridTextClassifierPreprocessor(
    RecurrentTextClassifierPreprocessor, tokenizer=MambaHybridTokenizer
): ...


class MambaHybridTextClassifier(
    RecurrentTextClassifier, preprocessor=MambaHybridTextClassifierPreprocessor
):
    """Text classifier with Nemotron-H, Granite 4.0 H, Falcon-H1 or Mamba-2, also for regression.

    A `MambaHybridBackbone`, and a linear layer on the hidden state of each text's last real token.
    """


# === TransNormerLLM ===


class TransNormerTokenizer(ByteTokenizer, backbone=TransNormerBackbone):
    """Byte tokenizer of TransNormerLLM presets. Checkpoints have a `SentencePieceTokenizer`."""


class TransNormerCausalLMPreprocessor(
    RecurrentCausalLMPreprocessor, tokenizer=TransNormerTokenizer
): ...


class TransNormerCausalLM(RecurrentCausalLM, preprocessor=TransNormerCausalLMPreprocessor):
    """Language model with TransNormerLLM.

    A `TransNormerBackbone`, and logits of the next token computed by separate weights. Qin et al.
    2023 (arXiv:2307.14995) and 2024 (arXiv:2405.17381). The time per token in training and in
    decoding does not depend on the length of the text.
    """
