"""Saves the compile config and optimizer in `.keras` files; omits the optimizer from presets."""

import contextlib

import keras

from keras_recurrent.compat import BackendNeutralCompileConfig, use_public_optimizers
from keras_recurrent.devices.jax_processes import SavedByAllProcesses
from keras_recurrent.training import weight_decay
from keras_recurrent.training.sixteen_bit_weights import check_16_bit_updates

# Arguments saved in addition to those that `compile` of every Keras model takes.
OWN_ARGUMENTS = ("sampler", "optimizer_built", "excluded_from_weight_decay")


class SavedTraining(BackendNeutralCompileConfig, SavedByAllProcesses):
    """Mixin that saves the compile arguments and the optimizer's state in a `.keras` file.

    Keras requires this of models that override `compile`, such as KerasHub's tasks, and otherwise
    warns that training cannot be resumed. The file loads on every backend. Exclusions from weight
    decay, which no configuration of an optimizer of Keras has, are saved as paths of weights.
    """

    _loads_compile_config = False

    def compile(self, optimizer="auto", *args, **kwargs):
        # No check in the constructor and `load_model`: the model may only generate. `fit` checks.
        if optimizer != "auto" and not self._loads_compile_config:
            optimizer = keras.optimizers.get(optimizer)
            check_16_bit_updates(optimizer, self.trainable_variables)  # type: ignore[attr-defined]
        super().compile(optimizer, *args, **kwargs)  # type: ignore[misc]
        self._requested_jit_compile = kwargs.get("jit_compile", "auto")
        if self.optimizer is not None:  # type: ignore[attr-defined]
            weight_decay.warn_of_decayed_decays(self.optimizer, self)  # type: ignore[attr-defined]

    def get_compile_config(self):
        config = super().get_compile_config()
        if not config:
            return config
        optimizer = self.optimizer  # type: ignore[attr-defined]
        arguments = {
            **config,
            # Keras stores the value that "auto" has on this backend.
            "jit_compile": self._requested_jit_compile,
            "optimizer_built": optimizer.built,
            "excluded_from_weight_decay": weight_decay.excluded_paths(optimizer, self),
        }
        # A serialized object, so that models of other classes can read it, too.
        return keras.saving.serialize_keras_object(CompileArguments(arguments))

    def compile_from_config(self, config):
        # Older files have only the arguments.
        config = config["config"] if config.get("class_name") == "CompileArguments" else config
        config = keras.saving.deserialize_keras_object(use_public_optimizers(config))
        optimizer_built = config.pop("optimizer_built")
        # Older files have no exclusions.
        if excluded := config.pop("excluded_from_weight_decay", None):
            config["optimizer"] = keras.optimizers.get(config["optimizer"])
            weight_decay.restore_exclusions(config["optimizer"], self, excluded)
        self._loads_compile_config = True
        self.compile(**config)
        self._loads_compile_config = False
        if optimizer_built:
            self.optimizer.build(self.trainable_variables)  # type: ignore[attr-defined]

    # A directory of `save_to_preset` has no compile arguments. KerasHub still writes the
    # optimizer's variables to it, twice the size of the weights, and warns when it loads them into
    # an optimizer that has not trained.

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
    """Arguments of `compile` in a file, readable by models without `SavedTraining`.

    `keras.models.clone_model` makes such a model, a plain functional one, and compiles it like the
    original. It cannot generate, and its `compile` takes no sampler.
    """

    def __init__(self, arguments):
        self.arguments = arguments

    def get_config(self):
        return self.arguments

    @classmethod
    def from_config(cls, config):
        config = {name: value for name, value in config.items() if name not in OWN_ARGUMENTS}
        return keras.saving.deserialize_keras_object(config)
