"""Base class of residual blocks, which mix tokens and channels."""

import keras

from keras_recurrent.checks.arguments import check_factors
from keras_recurrent.checks.dtypes import dtype_of, weights_scope
from keras_recurrent.devices import jax_steps
from keras_recurrent.devices.jax_layouts import apply_layout
from keras_recurrent.dispatch import BACKEND
from keras_recurrent.layers import RMSNorm, StreamingLayer, SwiGLU, decoding
from keras_recurrent.layers.base import in_order
from keras_recurrent.layers.gated_linear_unit import GatedLinearUnit
from keras_recurrent.layers.remat import no_further_remat

if BACKEND == "torch":
    from keras_recurrent.layers.torch_calls import is_plain


class ResidualBlock(StreamingLayer):
    """Base class of residual blocks, which mix tokens and then channels, each after a norm.

    ```
    x = x + r temporal_block(norm(x))
    x = x + r mlp(norm(x))
    ```

    A family registers its class with Keras, and defines `make_norm` and `make_mlp` where its norms
    are not RMSNorms or its channels are not mixed by a SwiGLU. Further call arguments (see
    `StreamingLayer.check_arguments`) are passed to the layer that mixes tokens.

    A family may omit one of the two layers, together with its norm.

    Args:
        temporal_block: the layer that mixes tokens: any `StreamingLayer` whose output has the
            shape of its input. None: tokens are not mixed.
        intermediate_dim: integer, the width inside the layer that mixes channels. None: channels
            are not mixed.
        layer_norm_epsilon: float, ε of the norms.
        residual_scale: number r, the factor of the outputs of both layers. None: 1.

    Made inside a `keras.RematScope`, the block saves only its inputs for the backward pass and
    recomputes the rest. Its sublayers are not rematerialized separately.

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

    def __init__(
        self,
        temporal_block,
        intermediate_dim,
        *,
        layer_norm_epsilon=1e-6,
        residual_scale=None,
        return_state=False,
        **kwargs,
    ):
        super().__init__(return_state=return_state, **kwargs)
        check_factors(residual_scale=residual_scale)
        self.temporal_block = temporal_block
        self.intermediate_dim = intermediate_dim
        self.layer_norm_epsilon = layer_norm_epsilon
        self.residual_scale = residual_scale

    def make_norm(self, name):
        """Returns one of the two norms."""
        return RMSNorm(
            epsilon=self.layer_norm_epsilon, zero_centered=False, dtype=self.dtype_policy, name=name
        )

    def make_mlp(self, name):
        """Returns the layer that mixes channels."""
        return SwiGLU(self.intermediate_dim, dtype=self.dtype_policy, name=name)

    def build(self, input_shape):
        super().build(input_shape)
        with no_further_remat():
            if self.temporal_block is not None:
                self.temporal_norm = self.make_norm("temporal_norm")
            if self.intermediate_dim is not None:
                self.channel_norm = self.make_norm("channel_norm")
                self.mlp = self.make_mlp("mlp")
            for norm, layer, _ in self.parts():
                for part in (norm, layer):
                    if not part.built:
                        part.build(input_shape)

    def parts(self):
        """Returns `[(norm, layer, r)]` of the layers that mix tokens or channels, in order."""
        parts = []
        if self.temporal_block is not None:
            parts.append((self.temporal_norm, self.temporal_block, self.residual_scale))
        if self.intermediate_dim is not None:
            parts.append((self.channel_norm, self.mlp, self.residual_scale))
        return parts

    def streaming_sublayers(self):
        return {} if self.temporal_block is None else {"temporal_block": self.temporal_block}

    def unfused_reason(self):
        mlp = self.mlp if self.intermediate_dim is not None else None
        if mlp is not None and not isinstance(mlp, GatedLinearUnit):
            return f"`{mlp.name}` is a {type(mlp).__name__}, not a gated linear unit"
        norms, layers, _ = zip(*self.parts(), strict=True)
        return decoding.first_reason(
            *(layer.unfused_reason() for layer in layers),
            *map(decoding.norm_reason, norms),
            jax_steps.unsupported_reason(self),
        )

    def step(self, x, tokens, state, next_norm=None, **kwargs):
        """Computes a decoding step with fused operations.

        Args:
            x: a `decoding.Stream`, one token of each sequence.
            tokens, **kwargs: as in `stream`.
            state: that of the layer that mixes tokens.
            next_norm: the `RMSNorm` that follows the block, or None.

        Returns:
            `(the next Stream, next state)`.
        """
        parts = self.parts()
        norms = [*(norm for norm, *_ in parts[1:]), next_norm]
        for (norm, layer, scale), following in zip(parts, norms, strict=True):
            ends = {"output_scale": scale, "next_norm": following}
            if layer is self.temporal_block:
                x, state = layer.fused_step(x, norm, tokens, state, **ends, **kwargs)
            else:
                x = layer.fused_step(x, norm, **ends)
        return x, state

    def array_step(self, x, tokens, state, **kwargs):
        """Computes `step` for x [B, D], without anything for the next block."""
        stream, state = self.step(decoding.Stream(x), tokens, state, **kwargs)
        return stream.x, state

    def stream(self, inputs, tokens, state, **kwargs):
        before, after = state.get("temporal_block"), {}
        continues = before or self.temporal_block is None
        if continues and decoding.can_fuse(inputs) and self.unfused_reason() is None:
            x, step_state = jax_steps.run(self, inputs[:, 0], tokens, before or {}, **kwargs)
            return x[:, None], {"temporal_block": step_state} if before else {}
        x = inputs
        for norm, layer, scale in self.parts():
            y = self.inner(norm, x)
            if layer is self.temporal_block:
                kwargs |= {"tokens": tokens, "initial_state": before, "return_state": True}
                y, after["temporal_block"] = self.inner(layer, y, **kwargs)
            else:
                y = self.inner(layer, y)
            y = y if scale is None else y * scale
            x = apply_layout(x + y, "hidden_states")
        return x, after

    @classmethod
    def from_config(cls, config):
        temporal_block = config["temporal_block"]
        if temporal_block is not None:
            temporal_block = keras.layers.deserialize(temporal_block)
        return super().from_config({**config, "temporal_block": temporal_block})


def can_chain_steps(outer, x):
    """Returns True if `chain_steps` may compute the blocks of a backbone for x [B, T, D]."""
    return decoding.can_fuse(x) and all(
        block.unfused_reason() is None and _steps_directly(outer, block, x)
        for block in outer.transformer_layers
    )


def _steps_directly(outer, block, x):
    """Returns True if `block.step` is equivalent to calling the block through Keras."""
    if "call" in vars(block):
        return False
    if BACKEND == "torch":
        return is_plain(outer, block, x)
    return (
        type(block).__module__.startswith("keras_recurrent.")
        and dtype_of(x) == block.compute_dtype  # Keras would cast x
        and block.quantization_mode is None
        and keras.distribution.distribution() is None  # see `jax_steps.run`
    )


def chain_steps(blocks, x, tokens, states, arguments):
    """Computes a decoding step of all blocks, each of which also prepares the norm of the next.

    x: `[B, 1, D]`. states, arguments: for each block, its state and further arguments of its step.
    Returns `(output [B, 1, D], next states)`.
    """
    stream, after = decoding.Stream(x[:, 0]), []
    norms = [*(block.parts()[0][0] for block in blocks[1:]), None]
    for block, state, norm, further in zip(blocks, states, norms, arguments, strict=True):
        before = state.get("temporal_block")
        with weights_scope(block):
            stream, before = block.step(stream, tokens, before, next_norm=norm, **further)
        after.append(in_order({"temporal_block": before}) if state else {})
    return stream.x[:, None], after
