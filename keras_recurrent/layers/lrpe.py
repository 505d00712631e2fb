"""Position encoding of TransNormerLLM's first layer."""

import keras
import numpy as np
from keras import ops

from keras_recurrent.checks.shapes import check_per_token
from keras_recurrent.layers.base import RecomputableLayer

MAX_WAVELENGTH = 10_000


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LRPE(RecomputableLayer):
    """Linearized relative position encoding with learned frequencies; doubles the channels.

    ```
    y_t = [x_t cos(θ t), x_t sin(θ t)]
    ```

    for queries and keys, so that y_t · y_s is the sum of x_t x_s cos(θ (t - s)) over the channels,
    which depends only on the distance. Qin et al. 2023 (arXiv:2307.14995, section 3.1, LRPE);
    TransNormerLLM has it in its first layer only. The layer computes in float32 (float64 under a
    float64 policy), because 16 bits cannot represent the angles of late tokens.

    Args:
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[B, T, H, K]`, queries or keys by heads.
        positions: integers `[B, T]`, t: the position of each token in its document.

    Returns:
        `[B, T, H, 2 K]` in the compute dtype.

    Weights: `theta`, θ, `[H, K]`, at least float32, initialized with `10000^(-2 j / (H K))`, where
    j counts the channels of all heads.

    Raises:
        ValueError: the inputs are not `[B, T, H, K]` with known H and K, or the positions are not
            integers `[B, T]`.

    Example: two positions, with a frequency of 1.

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import LRPE

    x = np.ones((1, 2, 1, 1), "float32")
    y = keras.ops.convert_to_numpy(LRPE()(x, positions=np.array([[0, 1]])))
    np.testing.assert_allclose(y[0, :, 0], [[1, 0], [np.cos(1), np.sin(1)]], rtol=1e-6)
    ```
    """

    gru_alternatives = {"units": "The output is twice as wide as the input: leave it out."}

    def __init__(self, **kwargs):
        super().__init__(autocast=False, **kwargs)

    def build(self, input_shape):
        if len(input_shape) != 4 or None in input_shape[2:]:
            raise ValueError(
                "`LRPE` needs inputs of shape [batch, time, heads, head size] with known heads and "
                f"head size; got the shape {tuple(input_shape)}."
            )
        shape = input_shape[2:]
        self.theta = self.add_state_weight("theta", shape, _frequencies, weight_decay=False)

    def call(self, inputs, positions):
        check_per_token("LRPE", "positions", positions, inputs.shape[:2])
        x = ops.cast(inputs, self.state_dtype)
        angle = ops.cast(positions, self.state_dtype)[:, :, None, None] * self.theta
        rotated = ops.concatenate([x * ops.cos(angle), x * ops.sin(angle)], axis=-1)
        return ops.cast(rotated, self.compute_dtype)

    def compute_output_spec(self, inputs, positions):
        check_per_token("LRPE", "positions", positions, inputs.shape[:2])
        *shape, channels = inputs.shape
        return keras.KerasTensor((*shape, 2 * channels), dtype=self.compute_dtype)


def _frequencies(shape, dtype):
    count = np.prod(shape)
    exponents = -2 * np.arange(count) / count
    return ops.convert_to_tensor(np.power(MAX_WAVELENGTH, exponents).reshape(shape), dtype)
