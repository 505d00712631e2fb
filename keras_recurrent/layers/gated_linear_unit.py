"""Multilayer perceptrons of two linear layers, or of three with a gate."""

import keras
from keras import ops

from keras_recurrent.checks.arguments import (
    check_number,
    check_positive_integer,
    check_width_known,
)
from keras_recurrent.layers import decoding
from keras_recurrent.layers.base import RecomputableLayer, cast
from keras_recurrent.ops.gated_linear_unit import gated_linear_unit


class GatedLinearUnit(RecomputableLayer):
    """Base class of gated multilayer perceptrons: `W_down gated(W_gate x, W_up x)`.

    Shazeer 2020 (arXiv:2002.05202). Subclasses set the attributes:

    - `use_bias`: boolean, whether the sublayers have biases;
    - `gate_activation`: the activation of the gate, "gelu", "silu" or None;
    - `projections`: names of the linear layers whose outputs `gated` takes.

    Args:
        intermediate_dim: integer, the inner width.
        kernel_initializer: initializer of the three kernels.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[B, ..., D]`, with at least two axes.

    Returns:
        `[B, ..., D]` in the compute dtype.

    Sublayers: `gate_proj`, `up_proj`, `down_proj`, all `Dense`.

    Raises:
        ValueError: `intermediate_dim` is below 1, or the inputs have fewer than two axes or an
            unknown width.
    """

    use_bias: bool
    gate_activation: str | None
    projections: tuple[str, ...] = ("gate_proj", "up_proj")
    gate_scale: float | None = None
    gate_proj: keras.layers.Dense
    up_proj: keras.layers.Dense

    def __init__(self, intermediate_dim, *, kernel_initializer="lecun_normal", **kwargs):
        super().__init__(**kwargs)
        check_positive_integer("intermediate_dim", intermediate_dim)
        self.intermediate_dim = intermediate_dim
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.supports_masking = True

    def gated(self, gate, x):
        """Computes activation(gate) * x."""
        if self.gate_scale is not None:
            gate = gate * self.gate_scale
        if self.gate_activation is None:
            return ops.multiply(gate, x)
        return gated_linear_unit(gate, x, activation=self.gate_activation)

    def build(self, input_shape):
        if len(input_shape) < 2:
            raise ValueError(
                f"`{type(self).__name__}` needs inputs of shape [batch, ..., width], with at least "
                f"two axes; got the shape {tuple(input_shape)}."
            )
        check_width_known(self, input_shape)
        for name in self.projections:
            units = self.intermediate_dim
            setattr(self, name, self.make_dense(units, name, self.use_bias, input_shape))
        inner_shape = (*input_shape[:-1], self.intermediate_dim)
        self.down_proj = self.make_dense(input_shape[-1], "down_proj", self.use_bias, inner_shape)

    def call(self, inputs):
        projected = [self.inner(getattr(self, name), inputs) for name in self.projections]
        y = self.inner(self.down_proj, self.gated(*projected))
        return cast(y, self.compute_dtype)  # Keras on torch multiplies float64 as float32

    def unfused_reason(self):
        """Reason why `fused_step` cannot compute a decoding step of this layer, or None."""
        if self.gate_activation is None:
            return f"`{self.name}` has no fused step"
        for name in ("call", "gated"):
            is_base = getattr(type(self), name) is getattr(GatedLinearUnit, name)
            if name in vars(self) or not is_base:
                return f"`{self.name}` has a custom `{name}`"
        return decoding.denses_reason([self.gate_proj, self.up_proj], [self.down_proj])

    def fused_step(self, x, norm, **ends):
        """Computes x + r layer(norm(x)) for a `decoding.Stream` x.

        ends: `output_scale`, r, and `next_norm` of `decoding.linear`.
        """
        layers = [self.gate_proj, self.up_proj, self.down_proj]
        if self.gate_scale is not None:
            y = self.gated(*decoding.linear(x, layers[:2], norm))
            return decoding.add_linear(x, y, layers[2:], **ends)
        if all(dense.quantization_mode is None for dense in layers):
            return decoding.add_linear(x, x, layers, norm, gate=self.gate_activation, **ends)
        (y,) = decoding.linear(x, layers[:2], norm, gate=self.gate_activation)
        return decoding.add_linear(x, y, layers[2:], **ends)

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class GatedMLP(GatedLinearUnit):
    """Gated multilayer perceptron (GeGLU) of Griffin and Hawk.

    ```
    y = W_down (gelu(W_gate x + b_gate) * (W_up x + b_up)) + b_down
    ```

    De et al. 2024 (arXiv:2402.19427, section 2.2), with the tanh-approximated gelu.

    Args:
        intermediate_dim: integer, the inner width; three times that of the inputs in the paper.
        bias_initializer: initializer of the three biases.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import GatedMLP

    assert GatedMLP(24)(np.ones((2, 5, 8))).shape == (2, 5, 8)
    ```
    """

    use_bias = True
    gate_activation = "gelu"

    def __init__(
        self,
        intermediate_dim,
        *,
        kernel_initializer="lecun_normal",
        bias_initializer="zeros",
        **kwargs,
    ):
        super().__init__(intermediate_dim, kernel_initializer=kernel_initializer, **kwargs)
        self.bias_initializer = keras.initializers.get(bias_initializer)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class SwiGLU(GatedLinearUnit):
    """Gated multilayer perceptron (SwiGLU), the channel-mixing layer of HGRN2.

    ```
    y = W_down (silu(W_gate x) * W_up x)
    ```

    Shazeer 2020 (arXiv:2002.05202), without biases.

    Args:
        intermediate_dim: integer, the inner width; about 8/3 of that of the inputs in HGRN2.
        gate_scale: number, the factor of W_gate x inside silu, as in Falcon-H1. None: 1.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import SwiGLU

    assert SwiGLU(24)(np.ones((2, 5, 8))).shape == (2, 5, 8)
    ```
    """

    use_bias = False
    gate_activation = "silu"

    def __init__(
        self, intermediate_dim, *, kernel_initializer="lecun_normal", gate_scale=None, **kwargs
    ):
        super().__init__(intermediate_dim, kernel_initializer=kernel_initializer, **kwargs)
        check_number("gate_scale", gate_scale, or_none=True)
        self.gate_scale = gate_scale


@keras.saving.register_keras_serializable(package="keras_recurrent")
class SGLU(GatedLinearUnit):
    """Simple gated linear unit, the channel-mixing layer of TransNormerLLM.

    ```
    y = W_down (W_gate x * W_up x)
    ```

    Qin et al. 2023 (arXiv:2307.14995, section 3.1). There is no activation, because the product is
    nonlinear, and there are no biases.

    Args:
        intermediate_dim: integer, the inner width; 2.75 times that of the inputs in the published
            models.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import SGLU

    assert SGLU(24)(np.ones((2, 5, 8))).shape == (2, 5, 8)
    ```
    """

    use_bias = False
    gate_activation = None


@keras.saving.register_keras_serializable(package="keras_recurrent")
class SquaredReLUMLP(GatedLinearUnit):
    """Multilayer perceptron with a squared ReLU and no gate, as in Nemotron-H.

    ```
    y = W_down max(W_up x, 0)^2
    ```

    So et al. 2021 (arXiv:2109.08668), without biases.

    Args:
        intermediate_dim: integer, the inner width; 3.5 to 5.25 times that of the inputs in
            Nemotron-H.
        kernel_initializer: initializer of both kernels.

    Sublayers: `up_proj` and `down_proj`, `Dense`.

    Example:

    ```python
    import numpy as np
    from keras_recurrent.layers import SquaredReLUMLP

    assert SquaredReLUMLP(24)(np.ones((2, 5, 8))).shape == (2, 5, 8)
    ```
    """

    use_bias = False
    projections = ("up_proj",)

    def gated(self, x):  # type: ignore[override]
        """Computes max(x, 0)^2."""
        return ops.square(ops.relu(x))

    def unfused_reason(self):
        return decoding.first_reason(
            decoding.class_reason(self, SquaredReLUMLP),
            decoding.denses_reason([self.up_proj], [self.down_proj]),
        )

    def fused_step(self, x, norm, **ends):
        is_quantized = self.up_proj.quantization_mode is not None
        activation = None if is_quantized else "squared_relu"
        (y,) = decoding.linear(x, [self.up_proj], norm, activation=activation)
        y = self.gated(y) if is_quantized else y
        return decoding.add_linear(x, y, [self.down_proj], **ends)
