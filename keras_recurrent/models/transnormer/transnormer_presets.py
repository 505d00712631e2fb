"""The names of `keras_recurrent.presets.transnormer`, and the checkpoints of TransNormerLLM."""

from keras_recurrent.conversion.transnormer import TransNormer
from keras_recurrent.models import presets
from keras_recurrent.models.transnormer.transnormer_backbone import TransNormerBackbone
from keras_recurrent.presets.transnormer import SIZES


def backbone_config(size):
    """The arguments of `TransNormerBackbone` that a row of the table stands for."""
    return {
        "vocabulary_size": size.vocabulary_size,
        "num_layers": size.num_layers,
        "hidden_dim": size.hidden_dim,
        "intermediate_dim": size.intermediate_dim,
        "num_heads": size.heads,
        "head_dim": size.hidden_dim // size.heads,
        "tie_word_embeddings": size.tied,
    }


def register():
    """Makes names and checkpoints known to `from_preset`, and the names to `presets`."""
    table = presets.of_sizes(SIZES, lambda size: "TransNormerLLM", backbone_config)
    presets.register(TransNormerBackbone, table)
    presets.register_layout(TransNormerBackbone, TransNormer())
