"""Residual block of HypeNet and MiniCPM-SALA."""

import keras

from keras_recurrent.inherited_docstrings import inherits_docstring
from keras_recurrent.models.residual_block import ResidualBlock


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class LightningHybridResidualBlock(ResidualBlock):
    """Residual block of HypeNet and MiniCPM-SALA, which mixes tokens and then channels.

    ```
    x = x + r temporal_block(RMSNorm(x))
    x = x + r SwiGLU(RMSNorm(x))
    ```

    Chen et al. 2026 (arXiv:2601.22156), with r = 1, and MiniCPM Team 2026 (arXiv:2602.11761).

    Args:
        temporal_block: the layer that mixes tokens, such as a
            `keras_recurrent.layers.LightningAttention` or `LocalAttention`: any `StreamingLayer`
            whose output has the shape of its input.
    """
