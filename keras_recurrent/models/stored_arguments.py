"""Constructor arguments of a backbone as attributes and in its configuration."""

import keras

PLAIN = (str, int, float, tuple, type(None))


class StoredArguments:
    """Mixin that stores constructor arguments as attributes and returns them in `get_config`."""

    _argument_names: tuple = ()

    def store_arguments(self, **arguments):
        """Stores the arguments that `from_config` needs, after the base class is constructed."""
        for name, value in arguments.items():
            setattr(self, name, value)
        self._argument_names = tuple(arguments)

    def get_config(self):
        config = super().get_config()  # type: ignore[misc]
        for name in self._argument_names:
            value = getattr(self, name)
            plain = isinstance(value, PLAIN)
            config[name] = value if plain else keras.saving.serialize_keras_object(value)
        return config
