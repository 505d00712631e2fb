"""Residual block of HGRN2."""

import keras

from keras_recurrent.inherited_docstrings import inherits_docstring
from keras_recurrent.layers.lower_bounds import BoundedLayer
from keras_recurrent.models.residual_block import ResidualBlock


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class HGRN2ResidualBlock(BoundedLayer, ResidualBlock):
    """Residual block of HGRN2, which mixes tokens and then channels.

    ```
    x = x + temporal_block(RMSNorm(x))
    x = x + SwiGLU(RMSNorm(x))
    ```

    Qin et al. 2024 (arXiv:2404.07904, section 3).

    Args:
        temporal_block: the layer that mixes tokens, a `keras_recurrent.layers.HGRN2`, `HGRN` or
            `LocalAttention`.

    Call arguments:
        lower_bound: `[2, D]`, log β and log(1 - β), one entry of the output of
            `keras_recurrent.layers.LowerBounds`; None: β is 0. Attention has none.
    """
