"""Root mean square normalization."""

import keras
from keras import ops

from keras_recurrent.checks.arguments import (
    check_boolean,
    check_divides,
    check_number,
    check_positive_integer,
    check_width_known,
)
from keras_recurrent.checks.shapes import reshape
from keras_recurrent.layers.base import RecomputableLayer, cast
from keras_recurrent.ops.rms_norm import rms_norm


@keras.saving.register_keras_serializable(package="keras_recurrent")
class SimpleRMSNorm(RecomputableLayer):
    """Root mean square normalization without a weight, as in TransNormerLLM.

    ```
    y = x / sqrt(mean(x^2) + ε)
    ```

    Qin et al. 2023 (arXiv:2307.14995, SRMSNorm), where ε is not printed; the published models have
    1e-6. The mean is over the last axis; the layer computes in float32 (float64 for float64
    inputs). `keras.layers.RMSNormalization` always has a weight, which these checkpoints lack.

    Args:
        epsilon: float, ε.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[..., D]`.

    Returns:
        `[..., D]` in the compute dtype.

    Raises:
        ValueError: `epsilon` is not a finite number of at least 0.

    Example:

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import SimpleRMSNorm

    layer = SimpleRMSNorm()
    y = keras.ops.convert_to_numpy(layer(np.array([[3.0, 4.0]])))
    np.testing.assert_allclose((y**2).mean(), 1, rtol=1e-5)
    assert not layer.weights
    ```
    """

    def __init__(self, *, epsilon=1e-6, **kwargs):
        super().__init__(**kwargs)
        check_number("epsilon", epsilon)
        self.epsilon = epsilon
        self.supports_masking = True

    def call(self, inputs):
        return rms_norm(cast(inputs, self.compute_dtype), epsilon=self.epsilon)

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)


@keras.saving.register_keras_serializable(package="keras_recurrent")
class RMSNorm(SimpleRMSNorm):
    """Root mean square normalization, with a weight that is centered at 0 or 1.

    ```
    y = x / sqrt(mean(x^2) + ε) * (1 + scale)      zero_centered=True
    y = x / sqrt(mean(x^2) + ε) * scale            zero_centered=False
    ```

    Zhang and Sennrich 2019 (arXiv:1910.07467). RecurrentGemma's released code has the first form,
    in which weight decay pulls the factor towards 1, not towards 0. HGRN2's code and
    `keras.layers.RMSNormalization` have the second. The mean is over the last axis; the layer
    computes in float32 (float64 for float64 inputs).

    Args:
        zero_centered: boolean, whether the weight is stored as its difference from 1.
        num_groups: integer, the number of equal groups of consecutive channels, each with its own
            mean, as in Mamba-2. Must divide the width of the inputs.

    Raises:
        ValueError: the width of the inputs is unknown or not a multiple of `num_groups`, or
            `zero_centered` is not a boolean.

    Example:

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import RMSNorm

    y = keras.ops.convert_to_numpy(RMSNorm()(np.array([[3.0, 4.0]])))
    np.testing.assert_allclose((y**2).mean(), 1, rtol=1e-5)
    ```
    """

    def __init__(self, *, epsilon=1e-6, zero_centered=True, num_groups=1, **kwargs):
        super().__init__(epsilon=epsilon, **kwargs)
        check_boolean("zero_centered", zero_centered)
        check_positive_integer("num_groups", num_groups)
        self.zero_centered = zero_centered
        self.num_groups = num_groups

    def build(self, input_shape):
        check_width_known(self, input_shape)
        check_divides("num_groups", self.num_groups, "the width of the inputs", input_shape[-1])
        self.scale = self.add_weight(
            name="scale",
            shape=(input_shape[-1],),
            initializer="zeros" if self.zero_centered else "ones",
            autocast=False,
        )

    def call(self, inputs):
        inputs = cast(inputs, self.compute_dtype)
        if self.num_groups == 1:
            return rms_norm(inputs, self.factor(), epsilon=self.epsilon)
        shape = ops.shape(inputs)
        groups = (*shape[:-1], self.num_groups, inputs.shape[-1] // self.num_groups)
        x = rms_norm(ops.cast(reshape(inputs, groups), self.state_dtype), epsilon=self.epsilon)
        return cast(reshape(x, shape) * self.factor(), self.compute_dtype)

    def factor(self):
        """Returns the factor of the normalized inputs, [D]."""
        scale = ops.convert_to_tensor(self.scale)
        if self.zero_centered:
            # In 16 bits, 1 + scale would lose small values of scale.
            scale = 1 + ops.cast(scale, self.state_dtype)
        return scale
