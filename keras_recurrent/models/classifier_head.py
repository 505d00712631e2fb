"""What stands between a network and the classes."""

import keras
from keras import ops

from keras_recurrent.layers.sequences import last_real, where_any_real


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LastToken(keras.layers.Layer):
    """The hidden state of each row's last real token, wherever padding stands; 0 without one."""

    def call(self, hidden_states, padding_mask):
        """hidden_states: `[B, T, D]`. padding_mask: `[B, T]`, 0 at padding. Returns `[B, D]`."""
        mask = ops.cast(padding_mask, "bool")
        (last,) = last_real((hidden_states,), mask)
        return where_any_real(last[:, 0], mask, None)

    def compute_output_spec(self, hidden_states, padding_mask):
        batch, _, width = hidden_states.shape
        return keras.KerasTensor((batch, width), dtype=self.compute_dtype)

    def get_config(self):
        return super().get_config()  # Keras wants one where a policy is an argument


@keras.saving.register_keras_serializable(package="keras_recurrent")
class Logits(keras.layers.Dense):
    """A linear map that stays as it is when a model is quantized.

    KerasHub's files do not tell in which dtype the head of a task is. Keras leaves subclasses of
    `Dense` alone.
    """
