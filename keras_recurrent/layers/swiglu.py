"""Gated multilayer perceptron of HGRN2."""

import keras

from keras_recurrent.inherited_docstrings import inherits_docstring
from keras_recurrent.layers.gated_linear_unit import GatedLinearUnit


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class SwiGLU(GatedLinearUnit):
    """Gated multilayer perceptron (SwiGLU), the channel-mixing layer of HGRN2.

    ```
    y = W_down (silu(W_gate x) * W_up x)
    ```

    Shazeer 2020 (arXiv:2002.05202), without biases.

    Args:
        intermediate_dim: integer, the inner width; about 8/3 of that of the inputs in HGRN2.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import SwiGLU

    assert SwiGLU(24)(np.ones((2, 5, 8))).shape == (2, 5, 8)
    ```
    """

    use_bias = False
    gate_activation = "silu"
