"""The residual block of Griffin and Hawk."""

import keras

from keras_recurrent.layers import GatedMLP, RMSNorm, StreamingLayer


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinResidualBlock(StreamingLayer):
    """The residual block of Griffin and Hawk: tokens are mixed, then channels.

    ```
    x = x + temporal_block(RMSNorm(x))
    x = x + GatedMLP(RMSNorm(x))
    ```

    De et al. 2024 (arXiv:2402.19427, section 2.1).

    With `keras.RematScope` around its making, the block keeps only its inputs for the backward
    pass and computes the rest once more; what is inside the block never does so by itself.

    Args:
        temporal_block: the layer that mixes tokens, such as a
            `keras_recurrent.layers.RecurrentBlock`: any `StreamingLayer` whose output has the shape
            of its input.
        intermediate_dim: integer, the width inside the gated MLP.
        layer_norm_epsilon: float, ε of the norms.
        return_state: boolean, whether a call returns `(output, state)`.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[B, T, D]`.
        mask, segment_ids, initial_state, return_state: as in
            `keras_recurrent.layers.StreamingLayer`.

    Returns:
        `[B, T, D]` in the compute dtype. With `return_state` also the temporal block's state.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.layers import RecurrentBlock
    >>> from keras_recurrent.models import GriffinResidualBlock
    >>> block = GriffinResidualBlock(RecurrentBlock(16, num_blocks=4), intermediate_dim=24)
    >>> tuple(block(np.ones((2, 5, 8))).shape)
    (2, 5, 8)
    """

    def __init__(
        self,
        temporal_block,
        intermediate_dim,
        layer_norm_epsilon=1e-6,
        return_state=False,
        **kwargs,
    ):
        super().__init__(return_state=return_state, **kwargs)
        self.temporal_block = temporal_block
        self.intermediate_dim = intermediate_dim
        self.layer_norm_epsilon = layer_norm_epsilon

    def build(self, input_shape):
        super().build(input_shape)
        # A layer takes up the scope in which it is made: without this one, each sublayer would
        # recompute by itself inside the block, which does so already.
        with keras.RematScope(mode=None):
            self.temporal_norm = self._norm("temporal_norm")
            self.channel_norm = self._norm("channel_norm")
            self.mlp = GatedMLP(self.intermediate_dim, dtype=self.dtype_policy, name="mlp")
            for layer in (self.temporal_norm, self.temporal_block, self.channel_norm, self.mlp):
                if not layer.built:
                    layer.build(input_shape)

    def _norm(self, name):
        return RMSNorm(self.layer_norm_epsilon, dtype=self.dtype_policy, name=name)

    def stream(self, inputs, mask, segment_ids, state):
        x, state = self.temporal_block(
            self.temporal_norm(inputs),
            mask=mask,
            segment_ids=segment_ids,
            initial_state=state,
            return_state=True,
        )
        x = inputs + x
        return x + self.mlp(self.channel_norm(x)), state

    def state_spec(self, batch_size=None):
        return self.temporal_block.state_spec(batch_size)

    def get_config(self):
        return {
            **super().get_config(),
            "temporal_block": keras.layers.serialize(self.temporal_block),
            "intermediate_dim": self.intermediate_dim,
            "layer_norm_epsilon": self.layer_norm_epsilon,
        }

    @classmethod
    def from_config(cls, config):
        temporal_block = keras.layers.deserialize(config["temporal_block"])
        return cls(**{**config, "temporal_block": temporal_block})
