"""Bidirectional HGRN2, for non-causal inputs such as images."""

import keras
from keras import ops

from keras_recurrent.layers.base import RecomputableLayer
from keras_recurrent.layers.gru_arguments import ALTERNATIVES, BIDIRECTIONAL_ALTERNATIVES
from keras_recurrent.layers.hgrn2 import HGRN2
from keras_recurrent.layers.lower_bounds import check_lower_bound
from keras_recurrent.ops import gated_linear_attention


@keras.saving.register_keras_serializable(package="keras_recurrent")
class BidirectionalHGRN2(RecomputableLayer):
    """HGRN2 in both directions of time, with shared gates.

    ```
    R_t = diag(f_t) R_{t+1} + (1 - f_t) v_t^T        the state of the reverse direction
    o_t = (S_t^T q_t + R_t^T q_t) K^(-1/2)           S_t runs forward
    y_t = W_o RMSNorm(o_t)
    ```

    Every token sees all others, as the patches of an image should (Qin et al. 2024,
    arXiv:2404.07904, section 4). Queries, gates and values are those of
    `keras_recurrent.layers.HGRN2`, computed once for both directions. The layer has no state.

    Args:
        expand_ratio, gate_activation, input_activation, f_bias_initializer, kernel_initializer: as
            in `keras_recurrent.layers.HGRN2`.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[B, T, D]`.
        lower_bound: `[2, D]`, as in `keras_recurrent.layers.HGRN2`; None: β is 0.
        mask: boolean `[B, T]`, or integers, False or 0 at padding, which does not affect other
            tokens.

    Returns:
        y as `[B, T, D]` in the compute dtype.

    Sublayers: `hgrn2`, an `HGRN2`. Its sublayers are called, the layer itself is not.

    Raises:
        ValueError: as in `keras_recurrent.layers.HGRN2`.

    Example: reversing the tokens reverses the outputs.

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import BidirectionalHGRN2

    layer = BidirectionalHGRN2(expand_ratio=4)
    x = np.random.normal(size=(2, 10, 8)).astype("float32")
    y, y_reversed = (keras.ops.convert_to_numpy(layer(x)) for x in (x, x[:, ::-1]))
    np.testing.assert_allclose(y, y_reversed[:, ::-1], rtol=1e-4, atol=1e-5)
    ```
    """

    gru_alternatives = ALTERNATIVES | BIDIRECTIONAL_ALTERNATIVES

    def __init__(
        self,
        *,
        expand_ratio=None,
        gate_activation="silu",
        input_activation="linear",
        f_bias_initializer=None,
        kernel_initializer="lecun_normal",
        **kwargs,
    ):
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.store_arguments(BidirectionalHGRN2, locals())
        self.hgrn2 = HGRN2(**self._arguments, dtype=self.dtype_policy, name="hgrn2")

    def build(self, input_shape):
        self.hgrn2.build(input_shape)

    def call(self, inputs, lower_bound=None, mask=None):
        check_lower_bound(lower_bound, inputs.shape[-1])
        layer = self.hgrn2
        inputs = ops.cast(inputs, self.compute_dtype)
        q, f, i = (self.project(x, inputs) for x in (layer.q_proj, layer.f_proj, layer.i_proj))
        q, v, log_f = layer.gates(q, f, i, lower_bound)
        forward, backward = (
            gated_linear_attention(q, None, v, log_f, mask=mask, reverse=reverse)[0]
            for reverse in (False, True)
        )
        y = layer.output_of(forward + backward)
        return ops.cast(y, self.compute_dtype)  # Keras on torch multiplies float64 as float32

    def compute_output_spec(self, inputs, lower_bound=None, mask=None):
        check_lower_bound(lower_bound, inputs.shape[-1])
        return keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
