"""The update of Keras's Adam for weights in 16 bits, in float32."""

import keras
from keras import ops

from keras_recurrent.optimizers.stochastic_rounding import (
    SIXTEEN_BITS,
    rounding_keys,
    stochastic_round,
)


class Updates(keras.optimizers.Adam):
    """Base class of `Adam` and `AdamW`; see `Adam`."""

    def add_variable(self, shape, initializer="zeros", dtype=None, *args, **kwargs):
        dtype = "float32" if dtype in SIXTEEN_BITS else dtype
        return super().add_variable(shape, initializer, dtype, *args, **kwargs)

    def apply(self, grads, trainable_variables=None):
        if self.loss_scale_factor or self.gradient_accumulation_steps:
            grads = cast_to_float32(grads)
        super().apply(grads, trainable_variables)

    def _clip_gradients(self, grads):
        if self.clipnorm or self.clipvalue or self.global_clipnorm:
            grads = cast_to_float32(grads)
        return super()._clip_gradients(grads)

    def _update_model_variables_moving_average(self, trainable_variables):
        super()._update_model_variables_moving_average(cast_to_float32(trainable_variables))

    def _overwrite_model_variables_with_average_value(self, trainable_variables):
        if not any(v.dtype in SIXTEEN_BITS for v in trainable_variables):
            super()._overwrite_model_variables_with_average_value(trainable_variables)
            return
        averages = self._model_variables_moving_average
        for variable, average in zip(trainable_variables, averages, strict=True):
            if average is not None:  # TensorFlow does not cast it
                variable.assign(ops.cast(average, variable.dtype))

    def _is_decayed(self, variable):
        return bool(self.weight_decay) and self._use_weight_decay(variable)

    def _apply_weight_decay(self, variables):
        decayed = [v for v in variables if v.dtype not in SIXTEEN_BITS and self._is_decayed(v)]
        if decayed:  # weights in 16 bits decay in the update
            super()._apply_weight_decay(decayed)

    def update_step(self, gradient, variable, learning_rate):
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if dtype not in SIXTEEN_BITS:
            super().update_step(gradient, variable, learning_rate)
            return
        index = self._get_variable_index(variable)
        momentum, velocity = self._momentums[index], self._velocities[index]
        gradient, weight = ops.cast(gradient, "float32"), ops.cast(variable, "float32")
        learning_rate = ops.cast(learning_rate, "float32")
        step = ops.cast(self.iterations + 1, "float32")
        correction = ops.sqrt(1 - ops.power(self.beta_2, step)) / (1 - ops.power(self.beta_1, step))

        self.assign_add(momentum, (gradient - momentum) * (1 - self.beta_1))
        self.assign_add(velocity, (ops.square(gradient) - velocity) * (1 - self.beta_2))
        if self.amsgrad:
            largest = self._velocity_hats[index]
            self.assign(largest, ops.maximum(largest, velocity))
            velocity = largest
        if self._is_decayed(variable):
            weight = weight - weight * self.weight_decay * learning_rate
        change = learning_rate * correction * momentum / (ops.sqrt(velocity) + self.epsilon)
        key = rounding_keys(self._iterations, index)
        self.assign(variable, stochastic_round(weight - change, dtype, key))


def cast_to_float32(tensors):
    """Returns tensors or variables, or None, with those in 16 bits as float32."""
    return [
        ops.cast(x, "float32")
        if x is not None and keras.backend.standardize_dtype(x.dtype) in SIXTEEN_BITS
        else x
        for x in tensors
    ]
