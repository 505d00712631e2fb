"""The gated linear unit of TransNormerLLM."""

import keras

from keras_recurrent.layers.gated_linear_unit import GatedLinearUnit


@keras.saving.register_keras_serializable(package="keras_recurrent")
class SGLU(GatedLinearUnit):
    """The simple gated linear unit that mixes channels in TransNormerLLM.

    ```
    y = W_down (W_gate x * W_up x)
    ```

    Qin et al. 2023 (arXiv:2307.14995, section 3.1): without activation, as the product itself is
    nonlinear, and without biases.

    Args:
        intermediate_dim: integer, the width inside; 2.75 times that of the inputs in the
            published models.
        kernel_initializer: of the three kernels.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[B, ..., D]`, of two axes or more.

    Returns:
        `[B, ..., D]` in the compute dtype.

    Sublayers: `gate_proj`, `up_proj`, `down_proj`, all `Dense`.

    Raises:
        ValueError: an `intermediate_dim` below 1, or inputs of fewer than two axes or whose width
            is not known.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import SGLU

    assert SGLU(24)(np.ones((2, 5, 8))).shape == (2, 5, 8)
    ```
    """

    use_bias = False
    gate_activation = None

    def __init__(self, intermediate_dim, kernel_initializer="lecun_normal", **kwargs):
        super().__init__(intermediate_dim, kernel_initializer, **kwargs)
