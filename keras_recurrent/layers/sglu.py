"""Gated linear unit of TransNormerLLM."""

import keras

from keras_recurrent.layers.gated_linear_unit import GatedLinearUnit


@keras.saving.register_keras_serializable(package="keras_recurrent")
class SGLU(GatedLinearUnit):
    """Simple gated linear unit, the channel-mixing layer of TransNormerLLM.

    ```
    y = W_down (W_gate x * W_up x)
    ```

    Qin et al. 2023 (arXiv:2307.14995, section 3.1). There is no activation, because the product is
    nonlinear, and there are no biases.

    Args:
        intermediate_dim: integer, the inner width; 2.75 times that of the inputs in the published
            models.
        kernel_initializer: initializer of the three kernels.
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
    from keras_recurrent.layers import SGLU

    assert SGLU(24)(np.ones((2, 5, 8))).shape == (2, 5, 8)
    ```
    """

    use_bias = False
    gate_activation = None
