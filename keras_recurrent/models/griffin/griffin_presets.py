"""The names of `keras_recurrent.presets.griffin`, for `from_preset`."""

from keras_recurrent import compat
from keras_recurrent.models.griffin.griffin_backbone import GriffinBackbone
from keras_recurrent.models.presets import FreshPresetLoader
from keras_recurrent.presets.griffin import SIZES


def backbone_config(size):
    """The arguments of `GriffinBackbone` that a row of the table stands for."""
    return {
        "vocabulary_size": size.vocabulary_size,
        "num_layers": size.num_layers,
        "hidden_dim": size.hidden_dim,
        "lru_width": size.lru_width,
        "intermediate_dim": size.expansion * size.hidden_dim,
        "num_blocks": size.num_blocks,
        "block_types": size.block_types,
    }


def metadata(name, size):
    """What `presets` tells of a name, in KerasHub's form."""
    return {
        "description": (
            f"{name.split('_')[0].capitalize()} with {size.num_layers} blocks of width "
            f"{size.hidden_dim} and a vocabulary of {size.vocabulary_size:,}. Starts from fresh "
            "initialization: no weights are published."
        ),
        "params": size.parameters,
        "path": "griffin",
    }


def register():
    """Makes the names known to `from_preset` and `presets`."""
    presets = {name: {"metadata": metadata(name, size)} for name, size in SIZES.items()}
    compat.register_presets(presets, GriffinBackbone)
    for name, size in SIZES.items():
        preprocessor = {"sequence_length": size.sequence_length}
        loader = FreshPresetLoader(name, GriffinBackbone, backbone_config(size), preprocessor)
        compat.serve_preset(name, loader)
