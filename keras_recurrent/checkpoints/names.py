"""Registry of preset names, available to `from_preset` after `import keras_recurrent`."""

from keras_recurrent import compat

# {name: (class of the backbone, `keras_recurrent.presets.Preset`)}
PRESETS: dict = {}


def register(backbone_cls, table):
    """Registers a table `{name: row}` for `from_preset` and `presets` of a backbone's models."""
    family = backbone_cls.__name__.removesuffix("Backbone").lower()
    for name, row in table.items():
        PRESETS[name] = (backbone_cls, row)
        metadata = {"description": row.description, "params": row.parameters, "path": family}
        compat.register_presets({name: {"metadata": metadata}}, backbone_cls)
