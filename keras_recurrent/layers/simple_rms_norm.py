"""Root mean square normalization without a weight."""

import keras

from keras_recurrent.checks.arguments import check_number
from keras_recurrent.checks.dtypes import cast
from keras_recurrent.layers.remat import RecomputableLayer
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
