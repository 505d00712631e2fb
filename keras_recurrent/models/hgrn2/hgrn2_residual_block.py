"""Residual block of HGRN2."""

import keras

from keras_recurrent.layers.lower_bounds import BoundedLayer
from keras_recurrent.models.residual_block import ResidualBlock


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2ResidualBlock(BoundedLayer, ResidualBlock):
    """Residual block of HGRN2, which mixes tokens and then channels.

    ```
    x = x + temporal_block(RMSNorm(x))
    x = x + SwiGLU(RMSNorm(x))
    ```

    Qin et al. 2024 (arXiv:2404.07904, section 3).

    Made inside a `keras.RematScope`, the block saves only its inputs for the backward pass and
    recomputes the rest. Its sublayers are not rematerialized separately.

    Args:
        temporal_block: the layer that mixes tokens, a `keras_recurrent.layers.HGRN2`, `HGRN` or
            `LocalAttention`.
        intermediate_dim: integer, the width inside the SwiGLU.
        layer_norm_epsilon: float, ε of the norms.
        return_state: boolean. True: a call returns `(output, state)`.
        **kwargs: `return_sequences`, `zero_output_for_mask` and `go_backwards`, as in
            `keras_recurrent.layers.StreamingLayer`; `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[B, T, D]`.
        lower_bound: `[2, D]`, log β and log(1 - β), one entry of the output of
            `keras_recurrent.layers.LowerBounds`; None: β is 0. Attention has none.
        mask, segment_ids, initial_state, return_state, tokens: as in
            `keras_recurrent.layers.StreamingLayer`.

    Returns:
        `[B, T, D]` in the compute dtype. With `return_state` also the state:
        `{"temporal_block": its part, "segment": [B] int32}`, with `"position"` if it has positions.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.layers import HGRN2
    >>> from keras_recurrent.models import HGRN2ResidualBlock
    >>> block = HGRN2ResidualBlock(HGRN2(expand_ratio=4), intermediate_dim=24)
    >>> tuple(block(np.ones((2, 5, 8))).shape)
    (2, 5, 8)
    """
