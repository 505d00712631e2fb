"""Root mean square normalization."""

import keras
from keras import ops

from keras_recurrent.layers.checks import check_width_known


@keras.saving.register_keras_serializable(package="keras_recurrent")
class RMSNorm(keras.layers.Layer):
    """Root mean square normalization, with a weight stored as its distance from 1, or as it is.

    ```
    y = x / sqrt(mean(x^2) + ε) * (1 + scale)      zero_centered=True
    y = x / sqrt(mean(x^2) + ε) * scale            zero_centered=False
    ```

    Zhang and Sennrich 2019 (arXiv:1910.07467). The first form is that of RecurrentGemma's released
    code: weight decay pulls towards the plain norm, not towards 0. The second is that of HGRN2's,
    and of `keras.layers.RMSNormalization`. The mean runs over the last axis; all is computed in
    float32 (float64 for float64 inputs).

    Args:
        epsilon: float, ε.
        zero_centered: boolean, whether the weight is stored as its distance from 1.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[..., D]`.

    Returns:
        `[..., D]` in the compute dtype.

    Raises:
        ValueError: inputs whose width is not known, or an `epsilon` below 0.

    Example:

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import RMSNorm

    y = keras.ops.convert_to_numpy(RMSNorm()(np.array([[3.0, 4.0]])))
    np.testing.assert_allclose((y**2).mean(), 1, rtol=1e-5)
    ```
    """

    def __init__(self, epsilon=1e-6, zero_centered=True, **kwargs):
        super().__init__(**kwargs)
        if epsilon < 0:
            raise ValueError(f"`epsilon` must not be below 0; got {epsilon}.")
        self.epsilon = epsilon
        self.zero_centered = zero_centered
        self.supports_masking = True

    def build(self, input_shape):
        check_width_known(self, input_shape)
        self.scale = self.add_weight(
            name="scale",
            shape=(input_shape[-1],),
            initializer="zeros" if self.zero_centered else "ones",
            autocast=False,
        )

    def call(self, inputs):
        x = normalize(inputs, self.epsilon, self.compute_dtype)
        scale = ops.cast(self.scale, x.dtype)
        return ops.cast(x * (1 + scale if self.zero_centered else scale), self.compute_dtype)

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "epsilon": self.epsilon,
            "zero_centered": self.zero_centered,
        }


def normalize(x, epsilon, compute_dtype):
    """x / sqrt(mean(x^2) + ε) over the last axis, in float32, or float64 if that is computed in."""
    x = ops.cast(x, "float64" if compute_dtype == "float64" else "float32")
    # Not `ops.mean`, which takes float64 through float32.
    mean_square = ops.sum(ops.square(x), axis=-1, keepdims=True) / x.shape[-1]
    return x * ops.rsqrt(mean_square + epsilon)
