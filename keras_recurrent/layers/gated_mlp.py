"""Gated multilayer perceptron of Griffin and Hawk."""

import keras

from keras_recurrent.inherited_docstrings import inherits_docstring
from keras_recurrent.layers.gated_linear_unit import GatedLinearUnit


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class GatedMLP(GatedLinearUnit):
    """Gated multilayer perceptron (GeGLU) of Griffin and Hawk.

    ```
    y = W_down (gelu(W_gate x + b_gate) * (W_up x + b_up)) + b_down
    ```

    De et al. 2024 (arXiv:2402.19427, section 2.2), with the tanh-approximated gelu.

    Args:
        intermediate_dim: integer, the inner width; three times that of the inputs in the paper.
        bias_initializer: initializer of the three biases.

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
