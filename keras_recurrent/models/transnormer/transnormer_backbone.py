"""Network of TransNormerLLM, and its residual block."""

import keras

from keras_recurrent.layers import SGLU, LightningAttention, SimpleRMSNorm
from keras_recurrent.models.recurrent_backbone import RecurrentBackbone, check_network_sizes
from keras_recurrent.models.residual_block import ResidualBlock


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TransNormerResidualBlock(ResidualBlock):
    """Residual block of TransNormerLLM, which mixes tokens and then channels.

    ```
    x = x + temporal_block(SimpleRMSNorm(x))
    x = x + SGLU(SimpleRMSNorm(x))
    ```

    Qin et al. 2023 (arXiv:2307.14995, section 3.1).
    """

    def make_norm(self, name):
        return SimpleRMSNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype_policy, name=name)

    def make_mlp(self, name):
        return SGLU(self.intermediate_dim, dtype=self.dtype_policy, name=name)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class TransNormerBackbone(RecurrentBackbone):
    """Network of TransNormerLLM, from tokens to hidden states.

    Residual blocks of Lightning Attention (see `TransNormerResidualBlock`) between an embedding,
    multiplied by sqrt(D), and a final SimpleRMSNorm. Only the first block has positions, by LRPE;
    decays decrease with depth. Qin et al. 2023 (arXiv:2307.14995) and 2024 (arXiv:2405.17381). The
    time per token in training and in decoding does not depend on the sequence length.

    Args:
        num_heads: integer, heads of Lightning Attention.
        head_dim: integer, the size of a head; `hidden_dim / num_heads` in the published models.
            Defaults to 128.
        decay_schedule: `"checkpoints"`, as in the published models, or `"paper"`, with which all
            but the last layers forget within a few tokens; see
            `keras_recurrent.layers.LightningAttention`.
        layer_norm_epsilon: float, ε of the norms of the residual stream.

    Embeddings are initialized such that their products with sqrt(D), and the logits, have about
    unit variance.

    Raises:
        ValueError: `decay_schedule` is unknown.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.models import TransNormerBackbone
    >>> backbone = TransNormerBackbone.from_preset("tnl_tiny")
    >>> token_ids = np.array([[1, 100, 101, 102, 0]])
    >>> tuple(backbone({"token_ids": token_ids, "padding_mask": token_ids > 0}).shape)
    (1, 5, 128)
    """

    def __init__(
        self,
        vocabulary_size,
        num_layers,
        hidden_dim,
        intermediate_dim,
        num_heads,
        *,
        head_dim=128,
        decay_schedule="checkpoints",
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-6,
        dtype=None,
        name=None,
        trainable=True,
    ):
        check_network_sizes(vocabulary_size, num_layers, hidden_dim, intermediate_dim)
        self.store_arguments(TransNormerBackbone, locals())
        arguments = self.make_arguments(TransNormerResidualBlock, locals())
        super().__init__(**arguments, embedding_scale=hidden_dim**0.5)

    def make_mixer(self, i, **kwargs):
        self.check_split(i, q_proj={"num_heads": self.num_heads})
        kwargs |= self.stored("head_dim", "decay_schedule", "num_layers")
        return LightningAttention(self.num_heads, layer_index=i, use_lrpe=i == 0, **kwargs)

    @staticmethod
    def weight_layout(data, model, num_devices, num_key_value_heads=1):
        # Each query head has a head of keys and values.
        layout = RecurrentBackbone.weight_layout(data, model, 1)
        return {**layout, "block.*lrpe/theta": (model, None)}
