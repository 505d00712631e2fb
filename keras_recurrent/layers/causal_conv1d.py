"""Causal depthwise convolution over time."""

import keras

from keras_recurrent.checks.arguments import check_boolean, check_positive_integer
from keras_recurrent.layers.streaming import StreamingLayer
from keras_recurrent.ops.causal_conv1d import causal_conv1d, check_activation


@keras.saving.register_keras_serializable(package="keras_recurrent")
class CausalConv1D(StreamingLayer):
    """Causal depthwise convolution over time, with a state for streaming.

    ```
    z_t = b + sum_j kernel[j] * x_{t-W+1+j},   j = 0 … W-1
    y_t = z_t, or silu(z_t)
    ```

    The temporal convolution of the recurrent block of De et al. 2024 (arXiv:2402.19427, section
    2.3). `kernel[W-1]` multiplies the current token. Unlike `keras.layers.DepthwiseConv1D`, the
    layer carries a state, skips padding and does not read across documents: the filter sees the
    last W real tokens of the document, and zeros before them.

    Args:
        kernel_size: integer, W, at least 1.
        use_bias: boolean.
        activation: None, or `"silu"`, fused with the convolution.
        kernel_initializer: initializer of the kernel, whose fan-in is W.
        bias_initializer: initializer of the bias.

    Returns:
        y as `[B, T, D]` in the compute dtype; sums are float32 (float64 under a float64 policy).
        With `return_state` also the state: `{"inputs": [B, W - 1, D] float32, the last W - 1 real
        inputs, the most recent one last, "segment": [B] int32}`.

    Weights: `kernel` `[W, D]` and `bias` `[D]`, float32 even under a 16-bit policy.

    Raises:
        ValueError: `kernel_size` is below 1, or `activation` is unsupported.

    Example:

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import CausalConv1D

    layer = CausalConv1D(kernel_size=3, kernel_initializer="ones")
    x = np.array([[[1], [2], [3], [4]]], "float32")
    assert keras.ops.convert_to_numpy(layer(x)).ravel().tolist() == [1, 3, 6, 9]
    ```
    """

    def __init__(
        self,
        kernel_size=4,
        *,
        use_bias=True,
        activation=None,
        kernel_initializer="lecun_normal",
        bias_initializer="zeros",
        return_state=False,
        **kwargs,
    ):
        super().__init__(return_state=return_state, **kwargs)
        check_positive_integer("kernel_size", kernel_size)
        check_boolean("use_bias", use_bias)
        check_activation("CausalConv1D", activation)
        self.store_arguments(CausalConv1D, locals())

    def build(self, input_shape):
        super().build(input_shape)
        shape = (self.kernel_size, self.width)
        self.kernel = self.add_state_weight("kernel", shape, self.kernel_initializer)
        self.bias = None
        if self.use_bias:
            self.bias = self.add_state_weight("bias", (self.width,), self.bias_initializer)

    def stream(self, inputs, tokens, state):
        output, window = causal_conv1d(
            inputs,
            self.kernel,
            self.bias,
            activation=self.activation,
            initial_state=state.get("inputs"),
            token_kind=tokens.kind,
        )
        return output, {"inputs": window}

    def own_state_spec(self, batch_size=None):
        self._check_built()
        return {"inputs": self.array_spec(batch_size, self.kernel_size - 1, self.width)}
