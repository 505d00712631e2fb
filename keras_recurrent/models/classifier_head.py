"""Layers between a network and the classes."""

import keras
from keras import ops

from keras_recurrent.layers.sequences import last_real, where_any_real


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LastToken(keras.layers.Layer):
    """Hidden state of the last real token of each sequence, or 0 without real tokens."""

    def call(self, hidden_states, padding_mask):
        """hidden_states: `[B, T, D]`. padding_mask: `[B, T]`, 0 at padding. Returns `[B, D]`."""
        mask = ops.cast(padding_mask, "bool")
        (last,) = last_real((hidden_states,), mask)
        return where_any_real(last[:, 0], mask, None)

    def compute_output_spec(self, hidden_states, padding_mask):
        batch, _, width = hidden_states.shape
        return keras.KerasTensor((batch, width), dtype=self.compute_dtype)

    def get_config(self):
        return super().get_config()  # Keras requires the method for a layer with a policy argument


@keras.saving.register_keras_serializable(package="keras_recurrent")
class Logits(keras.layers.Dense):
    """Linear layer that is not quantized with the model.

    KerasHub's files do not store the dtype of a task's head. Keras does not quantize subclasses of
    `Dense`.
    """
