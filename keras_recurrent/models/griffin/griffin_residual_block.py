"""Residual block of Griffin and Hawk."""

import keras

from keras_recurrent.inherited_docstrings import inherits_docstring
from keras_recurrent.layers import GatedMLP, RMSNorm
from keras_recurrent.models.residual_block import ResidualBlock


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class GriffinResidualBlock(ResidualBlock):
    """Residual block of Griffin and Hawk, which mixes tokens and then channels.

    ```
    x = x + temporal_block(RMSNorm(x))
    x = x + GatedMLP(RMSNorm(x))
    ```

    De et al. 2024 (arXiv:2402.19427, section 2.1). The norms multiply by 1 + `scale`, as in
    DeepMind's released code.

    Args:
        temporal_block: the layer that mixes tokens, such as a
            `keras_recurrent.layers.RecurrentBlock` or `LocalAttention`: any `StreamingLayer` whose
            output has the shape of its input.
    """

    def make_norm(self, name):
        return RMSNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype_policy, name=name)

    def make_mlp(self, name):
        return GatedMLP(self.intermediate_dim, dtype=self.dtype_policy, name=name)
