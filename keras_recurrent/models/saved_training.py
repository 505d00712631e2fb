"""Training that goes on from a `.keras` file."""

import keras


class SavedTraining:
    """Lets a `.keras` file keep how a model was compiled, and its optimizer's state.

    Keras leaves this to models with a `compile` of their own, as KerasHub's tasks have it, and
    would otherwise warn that training cannot go on.
    """

    def get_compile_config(self):
        config = super().get_compile_config()  # type: ignore[misc]
        if config:
            config["optimizer_built"] = self.optimizer.built  # type: ignore[attr-defined]
        return config

    def compile_from_config(self, config):
        config = keras.saving.deserialize_keras_object(config)
        optimizer_built = config.pop("optimizer_built")
        self.compile(**config)  # type: ignore[attr-defined]
        if optimizer_built:
            self.optimizer.build(self.trainable_variables)  # type: ignore[attr-defined]
