"""Root mean square normalization, with a weight around 1."""

import keras
from keras import ops

from keras_recurrent.layers.checks import check_width_known


@keras.saving.register_keras_serializable(package="keras_recurrent")
class RMSNorm(keras.layers.Layer):
    """Root mean square normalization with a weight that is stored as its distance from 1.

    ```
    y = x / sqrt(mean(x^2) + ε) * (1 + scale)
    ```

    Zhang and Sennrich 2019 (arXiv:1910.07467), in the form of RecurrentGemma's released code:
    weight decay pulls towards the plain norm, not towards 0. `keras.layers.RMSNormalization`
    multiplies by its weight alone. The mean runs over the last axis; all is computed in float32
    (float64 for float64 inputs).

    Args:
        epsilon: float, ε.
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

    def __init__(self, epsilon=1e-6, **kwargs):
        super().__init__(**kwargs)
        if epsilon < 0:
            raise ValueError(f"`epsilon` must not be below 0; got {epsilon}.")
        self.epsilon = epsilon
        self.supports_masking = True

    def build(self, input_shape):
        check_width_known(self, input_shape)
        self.scale = self.add_weight(
            name="scale", shape=(input_shape[-1],), initializer="zeros", autocast=False
        )

    def call(self, inputs):
        dtype = "float64" if self.compute_dtype == "float64" else "float32"
        x = ops.cast(inputs, dtype)
        # Not `ops.mean`, which takes float64 through float32.
        mean_square = ops.sum(ops.square(x), axis=-1, keepdims=True) / x.shape[-1]
        x = x * ops.rsqrt(mean_square + self.epsilon)
        return ops.cast(x * (1 + ops.cast(self.scale, dtype)), self.compute_dtype)

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)

    def get_config(self):
        return {**super().get_config(), "epsilon": self.epsilon}
