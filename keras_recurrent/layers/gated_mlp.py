"""The gated multilayer perceptron of Griffin and Hawk."""

import keras
from keras import ops

from keras_recurrent.layers.checks import check_positive_integer, check_width_known
from keras_recurrent.layers.initializers import clone_initializer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GatedMLP(keras.layers.Layer):
    """The gated multilayer perceptron (GeGLU) of Griffin and Hawk.

    ```
    y = W_down (gelu(W_gate x + b_gate) * (W_up x + b_up)) + b_down
    ```

    De et al. 2024 (arXiv:2402.19427, section 2.2), with the tanh-approximated gelu.

    Args:
        intermediate_dim: integer, the width inside; three times that of the inputs in the paper.
        kernel_initializer: of the three kernels.
        bias_initializer: of the three biases.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[..., D]`.

    Returns:
        `[..., D]` in the compute dtype.

    Sublayers: `gate_proj`, `up_proj`, `down_proj`, all `Dense`.

    Raises:
        ValueError: an `intermediate_dim` below 1, or inputs whose width is not known.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import GatedMLP

    assert GatedMLP(24)(np.ones((2, 5, 8))).shape == (2, 5, 8)
    ```
    """

    def __init__(
        self,
        intermediate_dim,
        kernel_initializer="lecun_normal",
        bias_initializer="zeros",
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_positive_integer("intermediate_dim", intermediate_dim)
        self.intermediate_dim = intermediate_dim
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.supports_masking = True
        self.gate_proj = self._dense(intermediate_dim, "gate_proj")
        self.up_proj = self._dense(intermediate_dim, "up_proj")

    def _dense(self, units, name):
        # Recomputed with this layer, if at all, not a second time by itself.
        with keras.RematScope(mode=None):
            return keras.layers.Dense(
                units,
                kernel_initializer=clone_initializer(self.kernel_initializer),
                bias_initializer=clone_initializer(self.bias_initializer),
                dtype=self.dtype_policy,
                name=name,
            )

    def build(self, input_shape):
        check_width_known(self, input_shape)
        self.gate_proj.build(input_shape)
        self.up_proj.build(input_shape)
        self.down_proj = self._dense(input_shape[-1], "down_proj")
        self.down_proj.build((*input_shape[:-1], self.intermediate_dim))

    def call(self, inputs):
        gate = ops.gelu(self.gate_proj(inputs), approximate=True)
        return self.down_proj(ops.multiply(gate, self.up_proj(inputs)))

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "intermediate_dim": self.intermediate_dim,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
        }
