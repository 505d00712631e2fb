"""Residual block of TransNormerLLM."""

import keras

from keras_recurrent.inherited_docstrings import inherits_docstring
from keras_recurrent.layers import SGLU, SimpleRMSNorm
from keras_recurrent.models.residual_block import ResidualBlock


@keras.saving.register_keras_serializable(package="keras_recurrent")
@inherits_docstring
class TransNormerResidualBlock(ResidualBlock):
    """Residual block of TransNormerLLM, which mixes tokens and then channels.

    ```
    x = x + temporal_block(SimpleRMSNorm(x))
    x = x + SGLU(SimpleRMSNorm(x))
    ```

    Qin et al. 2023 (arXiv:2307.14995, section 3.1).

    Args:
        temporal_block: the layer that mixes tokens, a `keras_recurrent.layers.LightningAttention`
            in TransNormerLLM: any `StreamingLayer` whose output has the shape of its input.
    """

    def make_norm(self, name):
        return SimpleRMSNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype_policy, name=name)

    def make_mlp(self, name):
        return SGLU(self.intermediate_dim, dtype=self.dtype_policy, name=name)
