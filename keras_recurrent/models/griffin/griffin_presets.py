"""The names of `keras_recurrent.presets.griffin`, and the checkpoints of RecurrentGemma."""

from keras_recurrent.conversion.recurrent_gemma import RecurrentGemma, embedding_scale
from keras_recurrent.models import presets
from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.presets.griffin import SIZES


def backbone_config(size):
    """The arguments of `GriffinBackbone` that a row of the table stands for.

    Those of all block types, so that another pattern takes one override.
    """
    kind = size.kind
    return {
        "vocabulary_size": size.vocabulary_size,
        "num_layers": size.num_layers,
        "hidden_dim": size.hidden_dim,
        "intermediate_dim": size.expansion * size.hidden_dim,
        "lru_width": size.lru_width,
        "num_blocks": kind.num_blocks or size.heads,
        "block_types": kind.block_types,
        "num_query_heads": size.heads,
        "head_dim": kind.head_dim,
        "sliding_window": kind.sliding_window,
        "partial_rotary_factor": kind.partial_rotary_factor,
        "embedding_scale": embedding_scale(size.hidden_dim) if kind.scaled_embeddings else None,
        "final_logit_soft_cap": kind.final_logit_soft_cap,
        "a_initializer": kind.a_initializer,
    }


def register():
    """Makes names and checkpoints known to `from_preset`, and the names to `presets`."""
    table = presets.of_sizes(SIZES, lambda size: size.kind.label, backbone_config)
    presets.register(GriffinBackbone, table)
    presets.register_layout(GriffinBackbone, RecurrentGemma())
