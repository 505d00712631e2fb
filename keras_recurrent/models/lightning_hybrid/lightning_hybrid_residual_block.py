"""Residual block of HypeNet and MiniCPM-SALA."""

import keras

from keras_recurrent.models.residual_block import ResidualBlock


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LightningHybridResidualBlock(ResidualBlock):
    """Residual block of HypeNet and MiniCPM-SALA, which mixes tokens and then channels.

    ```
    x = x + r temporal_block(RMSNorm(x))
    x = x + r SwiGLU(RMSNorm(x))
    ```

    Chen et al. 2026 (arXiv:2601.22156), with r = 1, and MiniCPM Team 2026 (arXiv:2602.11761).

    Made inside a `keras.RematScope`, the block saves only its inputs for the backward pass and
    recomputes the rest. Its sublayers are not rematerialized separately.

    Args:
        temporal_block: the layer that mixes tokens, such as a
            `keras_recurrent.layers.LightningAttention` or `LocalAttention`: any `StreamingLayer`
            whose output has the shape of its input.
        intermediate_dim: integer, the width inside the SwiGLU.
        layer_norm_epsilon: float, ε of the norms.
        residual_scale: number, r. None: 1.
        return_state: boolean. True: a call returns `(output, state)`.
        **kwargs: `return_sequences`, `zero_output_for_mask` and `go_backwards`, as in
            `keras_recurrent.layers.StreamingLayer`; `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[B, T, D]`.
        mask, segment_ids, initial_state, return_state, tokens: as in
            `keras_recurrent.layers.StreamingLayer`.

    Returns:
        `[B, T, D]` in the compute dtype. With `return_state` also the state:
        `{"temporal_block": its part, "segment": [B] int32}`, with `"position"` if it has positions.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.layers import LightningAttention
    >>> from keras_recurrent.models import LightningHybridResidualBlock
    >>> mixer = LightningAttention(2, head_dim=4, decay_schedule="alibi")
    >>> block = LightningHybridResidualBlock(mixer, intermediate_dim=24, residual_scale=0.5)
    >>> tuple(block(np.ones((2, 5, 8))).shape)
    (2, 5, 8)
    """
