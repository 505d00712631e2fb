"""Residual block of HGRN2."""

import keras
from keras import ops

from keras_recurrent.layers import HGRN2, RMSNorm, SwiGLU, one_token
from keras_recurrent.layers.lower_bounds import BoundedLayer
from keras_recurrent.models.residual_block import ResidualBlock
from keras_recurrent.ops import hgrn2_step


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
        temporal_block: the layer that mixes tokens, a `keras_recurrent.layers.HGRN2` or `HGRN`.
        intermediate_dim: integer, the width inside the SwiGLU.
        layer_norm_epsilon: float, ε of the norms.
        return_state: boolean. True: a call returns `(output, state)`.
        **kwargs: `return_sequences`, `zero_output_for_mask` and `go_backwards`, as in
            `keras_recurrent.layers.StreamingLayer`; `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[B, T, D]`.
        lower_bound: `[2, D]`, log β and log(1 - β), a row of what
            `keras_recurrent.layers.LowerBounds` returns; None: β is 0.
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

    def make_norm(self, name):
        return RMSNorm(
            self.layer_norm_epsilon, zero_centered=False, dtype=self.dtype_policy, name=name
        )

    def make_mlp(self, name):
        return SwiGLU(self.intermediate_dim, dtype=self.dtype_policy, name=name)

    def unfused_because(self):
        mixer, mlp = self.temporal_block, self.mlp
        if type(mixer) is not HGRN2:
            return f"`{mixer.name}` is a {type(mixer).__name__}, no HGRN2"
        if type(mlp) is not SwiGLU:
            return f"`{mlp.name}` is a {type(mlp).__name__}, no SwiGLU"
        if mixer.conv_size is not None:
            return f"`{mixer.name}` has convolutions"
        activations = mixer.gate_activation, mixer.input_activation
        if activations != (keras.activations.silu, keras.activations.linear):
            return f"`{mixer.name}` has other activations than silu of gates and none of inputs"
        maps = [[mixer.q_proj, mixer.f_proj, mixer.i_proj], [mixer.o_proj]]
        maps += [[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
        norms = self.temporal_norm, self.channel_norm, mixer.norm
        return one_token.first(
            [
                *map(one_token.because_of_call, (mixer, mlp)),
                one_token.because_of_maps(*maps),
                *map(one_token.because_of_norm, norms),
            ]
        )

    def step(self, x, tokens, state, lower_bound=None):
        mixer, mlp = self.temporal_block, self.mlp
        if not state or self.unfused_because() is not None:
            return None
        if lower_bound is not None:
            lower_bound = ops.cast(lower_bound, mixer.state_dtype)
        maps = mixer.q_proj, mixer.f_proj, mixer.i_proj
        q, f, v = one_token.linear(x, maps, self.temporal_norm)
        o, memory = hgrn2_step(
            *(q, f, v, state["memory"]),
            lower_bound=lower_bound,
            token_kind=one_token.kinds(tokens),
        )
        (x,) = one_token.linear(o, [mixer.o_proj], mixer.norm, residual=x)
        return one_token.mlp(x, mlp, self.channel_norm, "silu"), {"memory": memory}
