"""Training that goes on from a `.keras` file, and directories without what training needs."""

import contextlib

import keras

from keras_recurrent.devices.jax_processes import SavedByAllProcesses

# What this package's models keep beside the arguments that every Keras model can be compiled with.
OWN = ("sampler", "optimizer_built")


class SavedTraining(SavedByAllProcesses):
    """Lets a `.keras` file keep how a model was compiled, and its optimizer's state.

    Keras leaves this to models with a `compile` of their own, as KerasHub's tasks have it, and
    would otherwise warn that training cannot go on.
    """

    def get_compile_config(self):
        config = super().get_compile_config()  # type: ignore[misc]
        if not config:
            return config
        arguments = {**config, "optimizer_built": self.optimizer.built}  # type: ignore[attr-defined]
        # As Keras writes an object, so that a model of another class can read it as well.
        return keras.saving.serialize_keras_object(CompileArguments(arguments))

    def compile_from_config(self, config):
        # Older files have the arguments by themselves.
        config = config["config"] if config.get("class_name") == "CompileArguments" else config
        config = keras.saving.deserialize_keras_object(config)
        optimizer_built = config.pop("optimizer_built")
        self.compile(**config)  # type: ignore[attr-defined]
        if optimizer_built:
            self.optimizer.build(self.trainable_variables)  # type: ignore[attr-defined]

    # A directory of `save_to_preset` says nothing of how a model was compiled. KerasHub writes the
    # optimizer's variables into it all the same, twice the size of the weights, and warns of them
    # when it reads them for an optimizer that has not trained.

    def save_task_weights(self, filepath):
        with _without_optimizer(self):
            super().save_task_weights(filepath)  # type: ignore[misc]

    def load_task_weights(self, filepath):
        with _without_optimizer(self):
            super().load_task_weights(filepath)  # type: ignore[misc]


@contextlib.contextmanager
def _without_optimizer(model):
    optimizer, model.optimizer = model.optimizer, None
    try:
        yield
    finally:
        model.optimizer = optimizer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class CompileArguments:
    """The arguments of `compile` in a file, for a model without `SavedTraining`.

    `keras.models.clone_model` makes such a model, a plain functional one, and compiles it as the
    original. It generates nothing, and its `compile` takes no sampler.
    """

    def __init__(self, arguments):
        self.arguments = arguments

    def get_config(self):
        return self.arguments

    @classmethod
    def from_config(cls, config):
        config = {name: value for name, value in config.items() if name not in OWN}
        return keras.saving.deserialize_keras_object(config)
