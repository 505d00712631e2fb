"""Token-mixing layer of Mamba-2: linear attention with a decay per head and token."""

import keras
from keras import ops

from keras_recurrent.checks.arguments import (
    check_boolean,
    check_divides,
    check_number,
    check_positive_integers,
)
from keras_recurrent.checks.shapes import reshape
from keras_recurrent.devices.jax_layouts import apply_layout
from keras_recurrent.layers import decoding
from keras_recurrent.layers.base import cast, in_order
from keras_recurrent.layers.causal_conv1d import CausalConv1D
from keras_recurrent.layers.initializers import log_decay_rate, time_step_bias
from keras_recurrent.layers.rms_norm import RMSNorm
from keras_recurrent.layers.streaming import StreamingLayer
from keras_recurrent.ops import gated_linear_unit, scalar_decay_attention
from keras_recurrent.ops.decoding_steps import mamba2_step

NORM_POSITIONS = ("after_gate", "before_gate", None)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class Mamba2(StreamingLayer):
    """Mamba-2: linear attention whose decay depends on the token, with short convolutions.

    ```
    z, x, B, C = W_z u, W_x u, W_B u, W_C u;   dt = W_dt u                  for a token u
    x, B, C = silu(conv1d([x, B, C]))                                       depthwise, causal
    Δ_t = softplus(dt_t + dt_bias);   a_t = exp(-Δ_t exp(a_log))            in each head
    S_t = a_t S_{t-1} + B_t (Δ_t x_t)^T;   o_t = S_t^T C_t + skip x_t       in each head, N x P
    y_t = W_o RMSNorm(o_t * silu(z_t))
    ```

    Dao and Gu 2024 (arXiv:2405.21060), the layer of Mamba-2, Nemotron-H, Granite 4.0 H and
    Falcon-H1. Consecutive heads of x share the keys B and queries C of a group, and the norm is
    over the channels of each group. Time grows linearly with the sequence length. Δ has neither a
    lower nor an upper limit.

    Args:
        num_heads: integer, H, the number of heads of x.
        head_dim: integer, P, the size of a head of x. The inner width is H P.
        state_dim: integer, N, the size of B and C in a group.
        num_groups: integer, G, the number of groups; must divide `num_heads`.
        conv_size: integer, the number of taps of the convolutions.
        use_conv_bias: boolean, whether the convolutions have biases.
        norm_position: `"after_gate"`, as above; `"before_gate"`, y_t = W_o (RMSNorm(o_t) *
            silu(z_t)); or None, no norm.
        projection_scales: five numbers, factors of z, x, B, C and dt before the convolutions, as
            in Falcon-H1. None: 1.
        layer_norm_epsilon: float, ε of the norm.
        kernel_initializer: initializer of the kernels of linear layers and convolutions.

    Returns:
        y as `[B, T, D]` in the compute dtype. With `return_state` also the state: `{"memory": [B,
        H, N, P] float32, "segment": [B] int32}`, and, under the keys `"x_conv1d"`
        and `"bc_conv1d"`, the states of two `CausalConv1D`: `{"inputs": [B, conv_size - 1, H P]
        float32}` and `{"inputs": [B, conv_size - 1, 2 G N] float32}`.

    Sublayers: `z_proj`, `x_proj`, `bc_proj`, `dt_proj` and `o_proj`, all `Dense` without bias;
    `x_conv1d` and `bc_conv1d`; and `norm`. The outputs of `bc_proj` are B and C of the first group,
    then B and C of the next. The weights `a_log`, `dt_bias` and `skip`, `[H]`, Δ, decays and the
    memory are float32 even under a 16-bit policy. Initially, decay rates exp(a_log) are uniform in
    [1, 16), and softplus(dt_bias) is log-uniform in [0.001, 0.1), as in the authors' code.

    Raises:
        ValueError: a size is not an integer of at least 1, `num_groups` does not divide
            `num_heads`, `norm_position` is unknown, or `projection_scales` are not five numbers.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import Mamba2

    layer = Mamba2(4, head_dim=4, state_dim=6, return_state=True)
    y, state = layer(np.ones((2, 5, 8), "float32"))
    assert y.shape == (2, 5, 8) and state["memory"].shape == (2, 4, 6, 4)
    ```
    """

    def __init__(
        self,
        num_heads,
        *,
        head_dim=64,
        state_dim=128,
        num_groups=1,
        conv_size=4,
        use_conv_bias=True,
        norm_position="after_gate",
        projection_scales=None,
        layer_norm_epsilon=1e-5,
        kernel_initializer="lecun_normal",
        return_state=False,
        **kwargs,
    ):
        super().__init__(return_state=return_state, **kwargs)
        check_positive_integers(
            num_heads=num_heads,
            head_dim=head_dim,
            state_dim=state_dim,
            num_groups=num_groups,
            conv_size=conv_size,
        )
        check_divides("num_groups", num_groups, "`num_heads`", num_heads)
        check_boolean("use_conv_bias", use_conv_bias)
        check_number("layer_norm_epsilon", layer_norm_epsilon)
        if norm_position not in NORM_POSITIONS:
            known = '"after_gate", "before_gate" or None'
            raise ValueError(f"`norm_position` must be {known}; got {norm_position!r}.")
        projection_scales = _check_scales(projection_scales)
        self.store_arguments(Mamba2, locals())
        inner, shared = num_heads * head_dim, 2 * num_groups * state_dim
        self.z_proj = self.make_dense(inner, "z_proj")
        self.x_proj = self.make_dense(inner, "x_proj")
        self.bc_proj = self.make_dense(shared, "bc_proj")
        self.dt_proj = self.make_dense(num_heads, "dt_proj")
        convolution = {
            "use_bias": use_conv_bias,
            "activation": "silu",
            "kernel_initializer": self.kernel_initializer,
        }
        self.x_conv1d, self.bc_conv1d = (
            self.make_sublayer(CausalConv1D, conv_size, name=name, **convolution)
            for name in ("x_conv1d", "bc_conv1d")
        )
        self.norm = None
        if norm_position is not None:
            self.norm = self.make_sublayer(
                RMSNorm,
                epsilon=layer_norm_epsilon,
                zero_centered=False,
                num_groups=num_groups,
                name="norm",
            )

    def build(self, input_shape):
        super().build(input_shape)
        for projection in self.projections():
            projection.build(input_shape)
        inner_shape = (*input_shape[:2], self.num_heads * self.head_dim)
        self.x_conv1d.build(inner_shape)
        self.bc_conv1d.build((*input_shape[:2], 2 * self.num_groups * self.state_dim))
        if self.norm is not None:
            self.norm.build(inner_shape)
        shape, excluded = (self.num_heads,), {"weight_decay": False}
        self.a_log = self.add_state_weight("a_log", shape, log_decay_rate, **excluded)
        self.dt_bias = self.add_state_weight("dt_bias", shape, time_step_bias, **excluded)
        self.skip = self.add_state_weight("skip", shape, "ones", **excluded)
        self.o_proj = self.make_dense(self.width, "o_proj", input_shape=inner_shape)

    def streaming_sublayers(self):
        return {"x_conv1d": self.x_conv1d, "bc_conv1d": self.bc_conv1d}

    def stream(self, inputs, tokens, state):
        x, bc, dt = (self.project(layer, inputs) for layer in self.projections()[1:])
        _, x_scale, b_scale, c_scale, dt_scale = self.projection_scales or (None,) * 5
        time, convolved, after = ops.shape(inputs)[:2], {}, {}
        inputs = {"x_conv1d": _scaled(x, x_scale)}
        inputs["bc_conv1d"] = self._scale_groups(bc, b_scale, c_scale)
        for name, convolution in self.streaming_sublayers().items():
            further = {"tokens": tokens, "initial_state": state.get(name), "return_state": True}
            convolved[name], after[name] = self.inner(convolution, inputs[name], **further)
        x = reshape(convolved["x_conv1d"], (*time, self.num_heads, self.head_dim))
        x = ops.cast(x, self.state_dtype)
        bc = reshape(convolved["bc_conv1d"], (*time, self.num_groups, 2 * self.state_dim))
        bc = apply_layout(cast(bc, self.compute_dtype), "groups")
        dt = ops.cast(_scaled(dt, dt_scale), self.state_dtype)
        dt = ops.softplus(dt + ops.convert_to_tensor(self.dt_bias))
        o, after["memory"] = scalar_decay_attention(
            *(bc[..., self.state_dim :], bc[..., : self.state_dim]),
            cast(x * dt[..., None], self.compute_dtype),
            -dt * ops.exp(ops.convert_to_tensor(self.a_log)),
            initial_state=state.get("memory"),
            token_kind=tokens.kind,
        )
        o = ops.cast(o, self.state_dtype) + x * ops.convert_to_tensor(self.skip)[:, None]
        o = reshape(o, (*time, self.num_heads * self.head_dim))
        return cast(o, self.compute_dtype), after

    def projections(self):
        return [self.z_proj, self.x_proj, self.bc_proj, self.dt_proj]

    def _scale_groups(self, bc, b_scale, c_scale):
        """Returns B and C of all groups, multiplied by their factors."""
        if b_scale == c_scale:
            return _scaled(bc, b_scale)
        time = ops.shape(bc)[:2]
        groups = reshape(bc, (*time, self.num_groups, 2, self.state_dim))
        scaled = [groups[..., 0, :] * b_scale, groups[..., 1, :] * c_scale]
        return reshape(ops.stack(scaled, axis=-2), (*time, bc.shape[-1]))

    def finish(self, output, inputs):
        z = self.project(self.z_proj, inputs)
        z = _scaled(z, None if self.projection_scales is None else self.projection_scales[0])
        if self.norm_position == "before_gate":
            output = self.inner(self.norm, output)
        y = gated_linear_unit(cast(z, self.compute_dtype), output, activation="silu")
        y = self.inner(self.norm, y) if self.norm_position == "after_gate" else y
        return self.project(self.o_proj, y)

    def unfused_reason(self):
        if keras.distribution.distribution() is not None:
            return f"`{self.name}` is a Mamba2, and a `keras.distribution` is set"
        convolutions = self.streaming_sublayers().values()
        return decoding.first_reason(
            decoding.class_reason(self, Mamba2),
            *(decoding.class_reason(layer, CausalConv1D) for layer in convolutions),
            None if self.norm is None else decoding.class_reason(self.norm, RMSNorm),
            decoding.denses_reason(self.projections(), [self.o_proj]),
        )

    def fused_step(self, x, norm, tokens, state, **ends):
        z, inputs, bc, dt = decoding.linear(x, self.projections(), norm)
        z_scale, x_scale, b_scale, c_scale, dt_scale = self.projection_scales or (None,) * 5
        y, x_window, bc_window, memory = mamba2_step(
            z=_scaled(z, z_scale),
            x=_scaled(inputs, x_scale),
            bc=self._scale_groups(bc[:, None], b_scale, c_scale)[:, 0],
            dt=_scaled(dt, dt_scale),
            x_window=state["x_conv1d"]["inputs"],
            bc_window=state["bc_conv1d"]["inputs"],
            memory=state["memory"],
            x_kernel=self.x_conv1d.kernel,
            bc_kernel=self.bc_conv1d.kernel,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            skip=self.skip,
            x_bias=self.x_conv1d.bias,
            bc_bias=self.bc_conv1d.bias,
            norm_scale=None if self.norm is None else self.norm.factor(),
            token_kind=decoding.token_kinds(tokens),
            epsilon=self.layer_norm_epsilon,
            norm_after_gate=self.norm_position == "after_gate",
        )
        after = {"bc_conv1d": {"inputs": bc_window}, "memory": memory}
        after["x_conv1d"] = {"inputs": x_window}
        return decoding.add_linear(x, y, [self.o_proj], **ends), after

    def own_state_spec(self, batch_size=None):
        memory = self.array_spec(batch_size, self.num_heads, self.state_dim, self.head_dim)
        return in_order({"memory": memory, **super().own_state_spec(batch_size)})


def _scaled(x, scale):
    return x if scale is None else x * scale


def _check_scales(scales):
    """Returns five factors as a tuple of Python numbers, or None; otherwise raises an error."""
    if scales is None:
        return None
    if not isinstance(scales, (list, tuple)) or len(scales) != 5:
        raise ValueError(
            f"`projection_scales` must be five numbers, for z, x, B, C and dt; got {scales!r}."
        )
    scales = tuple(scales)
    for scale in scales:
        check_number("projection_scales", scale)
    return scales
