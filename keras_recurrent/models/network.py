"""Base class of all networks, which stores the arguments of constructors."""

import inspect

import keras
import keras_hub

from keras_recurrent.compat import BackendNeutralCompileConfig
from keras_recurrent.devices.jax_processes import SavedByAllProcesses
from keras_recurrent.layers.saved_quantization import SavedQuantization
from keras_recurrent.models.lora import LoraBackbone
from keras_recurrent.models.preset_loading import PresetLoading

PLAIN = (str, int, float, tuple, type(None))


class Network(
    BackendNeutralCompileConfig,
    SavedByAllProcesses,
    LoraBackbone,
    SavedQuantization,
    PresetLoading,
    keras_hub.models.Backbone,
):
    """Base class of all networks, with the arguments of `store_arguments` in `get_config`."""

    _argument_names: tuple = ()

    def store_arguments(self, cls, values):
        """Stores the arguments that `from_config` needs, after the base class is constructed.

        Args:
            cls: the class whose constructor calls this method. All its arguments are stored, except
                `dtype`, `name` and `trainable`.
            values: the `locals()` of its constructor.
        """
        parameters = list(inspect.signature(cls.__init__).parameters)[1:]  # without `self`
        names = [name for name in parameters if name not in ("dtype", "name", "trainable")]
        for name in names:
            setattr(self, name, values[name])
        self._argument_names = tuple(names)

    def stored(self, *names):
        """Returns a dictionary of stored arguments, for layers with arguments of the same names."""
        return {name: getattr(self, name) for name in names}

    def get_config(self):
        config = super().get_config()
        for name in self._argument_names:
            value = getattr(self, name)
            plain = isinstance(value, PLAIN)
            config[name] = value if plain else keras.saving.serialize_keras_object(value)
        return config
