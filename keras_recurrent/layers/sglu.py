"""Gated linear unit of TransNormerLLM."""

import keras

from keras_recurrent.inherited_docstrings import inherits_docstring
from keras_recurrent.layers.gated_linear_unit import GatedLinearUnit


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
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

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import SGLU

    assert SGLU(24)(np.ones((2, 5, 8))).shape == (2, 5, 8)
    ```
    """

    use_bias = False
    gate_activation = None
