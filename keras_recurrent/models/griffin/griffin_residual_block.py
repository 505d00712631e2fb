"""Residual block of Griffin and Hawk."""

import keras
from keras import ops

from keras_recurrent.layers import (
    RGLRU,
    GatedMLP,
    LocalAttention,
    RecurrentBlock,
    RMSNorm,
    one_token,
)
from keras_recurrent.layers.rotary import frequencies
from keras_recurrent.models.residual_block import ResidualBlock
from keras_recurrent.ops import local_attention_step, rg_lru_step


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GriffinResidualBlock(ResidualBlock):
    """Residual block of Griffin and Hawk, which mixes tokens and then channels.

    ```
    x = x + temporal_block(RMSNorm(x))
    x = x + GatedMLP(RMSNorm(x))
    ```

    De et al. 2024 (arXiv:2402.19427, section 2.1). The norms multiply by 1 + `scale`, as in
    DeepMind's released code.

    Made inside a `keras.RematScope`, the block saves only its inputs for the backward pass and
    recomputes the rest. Its sublayers are not rematerialized separately.

    Args:
        temporal_block: the layer that mixes tokens, such as a
            `keras_recurrent.layers.RecurrentBlock` or `LocalAttention`: any `StreamingLayer` whose
            output has the shape of its input.
        intermediate_dim: integer, the width inside the gated MLP.
        layer_norm_epsilon: float, ε of the norms.
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
    >>> from keras_recurrent.layers import RecurrentBlock
    >>> from keras_recurrent.models import GriffinResidualBlock
    >>> block = GriffinResidualBlock(RecurrentBlock(16, num_blocks=4), intermediate_dim=24)
    >>> tuple(block(np.ones((2, 5, 8))).shape)
    (2, 5, 8)
    """

    def make_norm(self, name):
        return RMSNorm(self.layer_norm_epsilon, dtype=self.dtype_policy, name=name)

    def make_mlp(self, name):
        return GatedMLP(self.intermediate_dim, dtype=self.dtype_policy, name=name)

    def unfused_because(self):
        mixer, mlp = self.temporal_block, self.mlp
        if type(mixer) is RecurrentBlock:
            maps = [[mixer.linear_x, mixer.linear_y], [mixer.linear_out]]
            inside = _because_of_recurrence(mixer)
        elif type(mixer) is LocalAttention:
            maps, inside = [[mixer.q_proj, mixer.k_proj, mixer.v_proj], [mixer.o_proj]], None
        else:
            return f"`{mixer.name}` is a {type(mixer).__name__}"
        if type(mlp) is not GatedMLP:
            return f"`{mlp.name}` is a {type(mlp).__name__}, no GatedMLP"
        maps += [[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
        return one_token.first(
            [
                inside,
                *map(one_token.because_of_call, (mixer, mlp)),
                one_token.because_of_maps(*maps),
                *map(one_token.because_of_norm, (self.temporal_norm, self.channel_norm)),
            ]
        )

    def step(self, x, tokens, state):
        mixer = self.temporal_block
        if not state or self.unfused_because() is not None:
            return None
        if type(mixer) is RecurrentBlock:
            mixed, after = _recurrent_step(mixer, self.temporal_norm, x, tokens, state)
            out = mixer.linear_out
        else:
            maps = [mixer.q_proj, mixer.k_proj, mixer.v_proj]
            q, k, v = one_token.linear(x, maps, self.temporal_norm)
            mixed, after = _attention_step(mixer, q, k, v, tokens, state)
            out = mixer.o_proj
        (x,) = one_token.linear(mixed, [out], residual=x)
        return one_token.mlp(x, self.mlp, self.channel_norm, "gelu"), after


def _recurrent_step(block, norm, x, tokens, state):
    """What a `RecurrentBlock` makes of a token before its last map, and its state."""
    unit, conv = block.rg_lru, block.conv1d
    x, gate = one_token.linear(x, [block.linear_x, block.linear_y], norm)
    dtype = block.compute_dtype
    y, window, hidden = rg_lru_step(
        *(x, gate, state["conv1d"]["inputs"], state["rg_lru"]["hidden"]),
        conv_kernel=conv.kernel,
        conv_bias=conv.bias,
        kernel_a=ops.cast(unit.recurrence_gate.kernel, dtype),
        bias_a=ops.squeeze(ops.cast(unit.recurrence_gate.bias, dtype), 1),
        kernel_x=ops.cast(unit.input_gate.kernel, dtype),
        bias_x=ops.squeeze(ops.cast(unit.input_gate.bias, dtype), 1),
        a_logit=unit.a_logit,
        token_kind=one_token.kinds(tokens),
    )
    return y, {"conv1d": {"inputs": window}, "rg_lru": {"hidden": hidden}}


def _attention_step(layer, q, k, v, tokens, state):
    """What a `LocalAttention` makes of a token before its last map, and its state."""
    q, k, v = (
        ops.cast(ops.reshape(x, (x.shape[0], -1, layer.head_dim)), layer.compute_dtype)
        for x in (q, k, v)
    )
    o, key, value = local_attention_step(
        *(q, k, v, state["key"], state["value"], tokens.position[:, 0]),
        frequencies=frequencies(layer.rotary_dim, layer.rope_max_wavelength, layer.state_dtype),
        sliding_window=layer.sliding_window,
        token_kind=one_token.kinds(tokens),
    )
    return ops.reshape(o, (o.shape[0], -1)), {"key": key, "value": value}


def _because_of_recurrence(block):
    """Why the fused step does not compute what is between the maps of a `RecurrentBlock`."""
    unit = block.unit
    if type(unit) is not RGLRU:
        return f"`{unit.name}` is a {type(unit).__name__}, no RGLRU"
    if unit.scale_first_input:
        return f"`{unit.name}` scales a document's first input"
    gates = unit.recurrence_gate, unit.input_gate
    return one_token.first(
        [
            *(one_token.because_of_map(gate, keras.layers.EinsumDense) for gate in gates),
            *map(one_token.because_of_call, (unit, block.conv1d)),
        ]
    )
