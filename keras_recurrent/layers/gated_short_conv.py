"""Gated short convolution, which mixes tokens in LFM2, in addition to attention."""

import keras
from keras import ops

from keras_recurrent.checks.arguments import check_boolean, check_positive_integer
from keras_recurrent.layers import decoding
from keras_recurrent.layers.causal_conv1d import CausalConv1D
from keras_recurrent.layers.streaming import StreamingLayer
from keras_recurrent.ops.causal_conv1d import causal_conv1d


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GatedShortConv(StreamingLayer):
    """Gated short convolution of LFM2: a causal convolution between two gates.

    ```
    b_t, c_t, u_t = W_b x_t, W_c x_t, W_u x_t
    z_t = sum_j kernel[j] * b_{t-W+1+j} * u_{t-W+1+j},   j = 0 … W-1
    y_t = W_o (c_t * z_t)
    ```

    Liquid AI 2025 (arXiv:2511.23404). The gates are linear in the input, and the convolution is
    depthwise, without an activation. Its input is the product b * u, and the state has this
    product for the last W - 1 real tokens. Padding and other documents never affect the output,
    even with biases.

    Args:
        kernel_size: integer, W, the number of taps of the convolution.
        use_bias: boolean, whether the four linear layers and the convolution have biases.
        kernel_initializer: initializer of the kernels.
        bias_initializer: initializer of the biases.

    Returns:
        y as `[B, T, D]` in the compute dtype. With `return_state` also the state:
        `{"conv1d": {"inputs": [B, W - 1, D] float32}, "segment": [B] int32}`.

    Sublayers: `b_proj`, `c_proj`, `u_proj`, `o_proj`, all `Dense`, and `conv1d`, a `CausalConv1D`.
    The inputs of the linear layers are all tokens of the batch, `[B * T, D]`; hooks and activity
    regularizers receive this shape.

    Raises:
        ValueError: `kernel_size` is below 1, or `use_bias` is not a boolean.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import GatedShortConv

    y, state = GatedShortConv(return_state=True)(np.ones((2, 5, 8), "float32"))
    assert y.shape == (2, 5, 8) and state["conv1d"]["inputs"].shape == (2, 2, 8)
    ```
    """

    def __init__(
        self,
        kernel_size=3,
        *,
        use_bias=False,
        kernel_initializer="lecun_normal",
        bias_initializer="zeros",
        return_state=False,
        **kwargs,
    ):
        super().__init__(return_state=return_state, **kwargs)
        check_positive_integer("kernel_size", kernel_size)
        check_boolean("use_bias", use_bias)
        self.store_arguments(GatedShortConv, locals())
        self.conv1d = self.make_sublayer(
            CausalConv1D,
            kernel_size,
            use_bias=use_bias,
            kernel_initializer=self.kernel_initializer,
            bias_initializer=self.bias_initializer,
            name="conv1d",
        )

    def build(self, input_shape):
        super().build(input_shape)
        self.conv1d.build(input_shape)
        for name in ("b_proj", "c_proj", "u_proj", "o_proj"):
            setattr(self, name, self.make_dense(self.width, name, self.use_bias, input_shape))

    def streaming_sublayers(self):
        return {"conv1d": self.conv1d}

    def stream(self, inputs, tokens, state):
        b, u = (self.project(layer, inputs) for layer in (self.b_proj, self.u_proj))
        further = {"initial_state": state.get("conv1d"), "return_state": True}
        z, after = self.inner(self.conv1d, ops.multiply(b, u), tokens=tokens, **further)
        return z, {"conv1d": after}

    def finish(self, output, inputs):
        c = self.project(self.c_proj, inputs)
        return self.project(self.o_proj, ops.multiply(c, output))

    def unfused_reason(self):
        return decoding.first_reason(
            decoding.class_reason(self, GatedShortConv),
            decoding.class_reason(self.conv1d, CausalConv1D),
            decoding.denses_reason([self.b_proj, self.c_proj, self.u_proj], [self.o_proj]),
        )

    def fused_step(self, x, norm, tokens, state, **ends):
        b, c, u = decoding.linear(x, [self.b_proj, self.c_proj, self.u_proj], norm)
        # Inside `devices.jax_steps.run`, the values of weights are the device's part.
        weights = [ops.convert_to_tensor(weight) for weight in self.conv1d.weights]
        z, window = causal_conv1d(
            ops.multiply(b, u)[:, None],
            *weights,
            initial_state=state["conv1d"]["inputs"],
            token_kind=tokens.kind,
        )
        x = decoding.add_linear(x, ops.multiply(c, z[:, 0]), [self.o_proj], **ends)
        return x, {"conv1d": {"inputs": window}}
