"""Language models, and classifiers of texts and images, with KerasHub's API."""

from keras_recurrent.generation.cache import GenerationCache
from keras_recurrent.generation.sampling_params import SamplingParams, TokenLogprobs
from keras_recurrent.generation.sequence import GenerationOutput
from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone, GriffinResidualBlock
from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone, HGRN2ResidualBlock
from keras_recurrent.models.hgrn2.hgrn2_image_classifier import HGRN2ImageClassifier
from keras_recurrent.models.hgrn2.hgrn2_vision_backbone import HGRN2VisionBackbone
from keras_recurrent.models.lfm2.lfm2_backbone import LFM2Backbone, LFM2ResidualBlock
from keras_recurrent.models.lightning_hybrid.lightning_hybrid_backbone import (
    LightningHybridBackbone,
    LightningHybridResidualBlock,
)
from keras_recurrent.models.mamba_hybrid.mamba_hybrid_backbone import (
    MambaHybridBackbone,
    MambaHybridResidualBlock,
    ParallelMixers,
)
from keras_recurrent.models.memory import (
    MemorySizes,
    TrainingSizes,
    memory_sizes,
    training_sizes,
)
from keras_recurrent.models.tasks import (
    GriffinCausalLM,
    GriffinCausalLMPreprocessor,
    GriffinTextClassifier,
    GriffinTextClassifierPreprocessor,
    GriffinTokenizer,
    HGRN2CausalLM,
    HGRN2CausalLMPreprocessor,
    HGRN2TextClassifier,
    HGRN2TextClassifierPreprocessor,
    HGRN2Tokenizer,
    LFM2CausalLM,
    LFM2CausalLMPreprocessor,
    LFM2TextClassifier,
    LFM2TextClassifierPreprocessor,
    LFM2Tokenizer,
    LightningHybridCausalLM,
    LightningHybridCausalLMPreprocessor,
    LightningHybridTokenizer,
    MambaHybridCausalLM,
    MambaHybridCausalLMPreprocessor,
    MambaHybridTextClassifier,
    MambaHybridTextClassifierPreprocessor,
    MambaHybridTokenizer,
    TransNormerCausalLM,
    TransNormerCausalLMPreprocessor,
    TransNormerTokenizer,
)
from keras_recurrent.models.transnormer.transnormer_backbone import (
    TransNormerBackbone,
    TransNormerResidualBlock,
)
from keras_recurrent.training.token_crossentropy import TokenCrossentropy

__all__ = [
    "GenerationCache",
    "GenerationOutput",
    "GriffinBackbone",
    "GriffinCausalLM",
    "GriffinCausalLMPreprocessor",
    "GriffinResidualBlock",
    "GriffinTextClassifier",
    "GriffinTextClassifierPreprocessor",
    "GriffinTokenizer",
    "HGRN2Backbone",
    "HGRN2CausalLM",
    "HGRN2CausalLMPreprocessor",
    "HGRN2ImageClassifier",
    "HGRN2ResidualBlock",
    "HGRN2TextClassifier",
    "HGRN2TextClassifierPreprocessor",
    "HGRN2Tokenizer",
    "HGRN2VisionBackbone",
    "LFM2Backbone",
    "LFM2CausalLM",
    "LFM2CausalLMPreprocessor",
    "LFM2ResidualBlock",
    "LFM2TextClassifier",
    "LFM2TextClassifierPreprocessor",
    "LFM2Tokenizer",
    "LightningHybridBackbone",
    "LightningHybridCausalLM",
    "LightningHybridCausalLMPreprocessor",
    "LightningHybridResidualBlock",
    "LightningHybridTokenizer",
    "MambaHybridBackbone",
    "MambaHybridCausalLM",
    "MambaHybridCausalLMPreprocessor",
    "MambaHybridResidualBlock",
    "MambaHybridTextClassifier",
    "MambaHybridTextClassifierPreprocessor",
    "MambaHybridTokenizer",
    "MemorySizes",
    "ParallelMixers",
    "SamplingParams",
    "TokenCrossentropy",
    "TokenLogprobs",
    "TrainingSizes",
    "TransNormerBackbone",
    "TransNormerCausalLM",
    "TransNormerCausalLMPreprocessor",
    "TransNormerResidualBlock",
    "TransNormerTokenizer",
    "memory_sizes",
    "training_sizes",
]
