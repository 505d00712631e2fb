"""The names of `keras_recurrent.presets.hgrn2`, and the checkpoints of HGRN2."""

from keras_recurrent.conversion.hgrn2 import HGRN2Layout
from keras_recurrent.models import presets
from keras_recurrent.models.hgrn2.hgrn2_backbone import HGRN2Backbone
from keras_recurrent.models.hgrn2.hgrn2_vision_backbone import HGRN2VisionBackbone
from keras_recurrent.presets.hgrn2 import SIZES, VISION_SIZES


def backbone_config(size):
    """The arguments of `HGRN2Backbone` that a row of the table stands for."""
    return {
        "vocabulary_size": size.vocabulary_size,
        "num_layers": size.num_layers,
        "hidden_dim": size.hidden_dim,
        "intermediate_dim": size.intermediate_dim,
        "expand_ratio": size.expand_ratio,
        "tie_word_embeddings": size.tied,
    }


def vision_backbone_config(size):
    """The arguments of `HGRN2VisionBackbone` that a row of the table stands for."""
    return {
        "image_shape": (size.image_size, size.image_size, 3),
        "patch_size": size.patch_size,
        "num_layers": size.num_layers,
        "hidden_dim": size.hidden_dim,
        "intermediate_dim": size.intermediate_dim,
        "expand_ratio": size.expand_ratio,
    }


def vision_description(size):
    return (
        f"HGRN2 for images of {size.image_size} x {size.image_size} pixels and 1,000 classes, with "
        f"{size.num_layers} blocks of width {size.hidden_dim}. {presets.where_weights_are()}"
    )


def register():
    """Makes names and checkpoints known to `from_preset`, and the names to `presets`."""
    table = presets.of_sizes(SIZES, lambda size: "HGRN2", backbone_config)
    presets.register(HGRN2Backbone, table)
    presets.register_layout(HGRN2Backbone, HGRN2Layout())
    vision_table = {
        name: presets.Preset(
            vision_description(size), size.parameters, vision_backbone_config(size), {}
        )
        for name, size in VISION_SIZES.items()
    }
    presets.register(HGRN2VisionBackbone, vision_table)
