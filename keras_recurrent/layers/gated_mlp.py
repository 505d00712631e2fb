"""Gated multilayer perceptron of Griffin and Hawk."""

import keras

from keras_recurrent.layers.gated_linear_unit import GatedLinearUnit


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GatedMLP(GatedLinearUnit):
    """Gated multilayer perceptron (GeGLU) of Griffin and Hawk.

    ```
    y = W_down (gelu(W_gate x + b_gate) * (W_up x + b_up)) + b_down
    ```

    De et al. 2024 (arXiv:2402.19427, section 2.2), with the tanh-approximated gelu.

    Args:
        intermediate_dim: integer, the inner width; three times that of the inputs in the paper.
        kernel_initializer: initializer of the three kernels.
        bias_initializer: initializer of the three biases.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[B, ..., D]`, with at least two axes.

    Returns:
        `[B, ..., D]` in the compute dtype.

    Sublayers: `gate_proj`, `up_proj`, `down_proj`, all `Dense`.

    Raises:
        ValueError: `intermediate_dim` is below 1, or the inputs have fewer than two axes or an
            unknown width.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import GatedMLP

    assert GatedMLP(24)(np.ones((2, 5, 8))).shape == (2, 5, 8)
    ```
    """

    use_bias = True
    gate_activation = "gelu"

    def __init__(
        self,
        intermediate_dim,
        *,
        kernel_initializer="lecun_normal",
        bias_initializer="zeros",
        **kwargs,
    ):
        super().__init__(intermediate_dim, kernel_initializer=kernel_initializer, **kwargs)
        self.bias_initializer = keras.initializers.get(bias_initializer)
