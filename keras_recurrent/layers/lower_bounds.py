"""Lower bounds of forget gates: one learned table for all layers of a network."""

import keras
from keras import ops

from keras_recurrent.checks.arguments import check_positive_integer, check_tensor, check_width_known
from keras_recurrent.layers.base import RecomputableLayer, cast
from keras_recurrent.layers.streaming import StreamingLayer
from keras_recurrent.ops.log_forget_gate import log_forget_gate


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LowerBounds(RecomputableLayer):
    """Learned lower bounds of the forget gates of HGRN and HGRN2, which increase with the layer.

    ```
    β = cumsum(softmax(P, axis=0), axis=0) - its first row      P, β: [L, D]
    ```

    Qin et al. 2023 (arXiv:2311.04823, section 3.2) and 2024 (arXiv:2404.07904). β of a layer is at
    least that of the layer below; β of the first layer is 0 and is omitted.

    The outputs do not depend on the values of the inputs. Call the layer on the embeddings, so that
    its weight becomes part of a Keras model.

    Args:
        num_layers: integer, L, at least 2, because the first layer has no bound.
        **kwargs: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: `[..., D]`.

    Returns:
        `[L - 1, 2, D]` in float32 (float64 under a float64 policy) for any compute dtype:
        log β and log(1 - β) of the second layer, the third and so on, each from a sum of
        exponentials, so that both are accurate near 0. One entry `[2, D]` is the `lower_bound` of
        an `HGRN2` or `HGRN`.

    Weights: `logits`, P, `[L, D]`, initialized with zeros, for which β increases evenly.

    Raises:
        ValueError: `num_layers` is below 2, or the width of the inputs is unknown.

    Example: three layers.

    ```python
    import keras
    import numpy as np
    from keras_recurrent.layers import HGRN2, LowerBounds

    x = keras.random.normal((2, 10, 8))
    bounds = LowerBounds(num_layers=3)(x)
    beta = np.exp(keras.ops.convert_to_numpy(bounds)[:, 0, 0])
    np.testing.assert_allclose(beta, [1 / 3, 2 / 3], rtol=1e-5)

    x = x + HGRN2(expand_ratio=4)(x)
    x = x + HGRN2(expand_ratio=4)(x, lower_bound=bounds[0])
    x = x + HGRN2(expand_ratio=4)(x, lower_bound=bounds[1])
    ```
    """

    def __init__(self, num_layers, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True  # inputs may have a mask, outputs have none
        check_positive_integer("num_layers", num_layers)
        if num_layers < 2:
            raise ValueError(
                "`num_layers` must be at least 2; got 1. The first layer's bound is 0: call it "
                "without a `lower_bound`."
            )
        self.num_layers = num_layers

    def build(self, input_shape):
        check_width_known(self, input_shape)
        self.width = input_shape[-1]
        shape = (self.num_layers, self.width)
        self.logits = self.add_state_weight("logits", shape, "zeros", weight_decay=False)

    def call(self, inputs):
        # β of layer i is the sum of the softmax over rows 1 to i, 1 - β the sum of all other rows.
        layer = ops.arange(1, self.num_layers)[:, None, None]
        share = ops.arange(0, self.num_layers)[None, :, None]
        inside = ops.logical_and(share >= 1, share <= layer)
        logits = ops.convert_to_tensor(self.logits)
        total = ops.logsumexp(logits, axis=0)
        parts = [
            ops.logsumexp(logits + ops.log(ops.cast(part, logits.dtype)), axis=1)
            for part in (inside, ops.logical_not(inside))
        ]
        return ops.stack(parts, axis=1) - total

    def compute_mask(self, inputs, previous_mask):
        return None

    def compute_output_spec(self, inputs):
        check_width_known(self, inputs.shape)
        shape = (self.num_layers - 1, 2, inputs.shape[-1])
        return keras.KerasTensor(shape, dtype=self.state_dtype)


class BoundedLayer(StreamingLayer):
    """Base class of streaming layers whose forget gates have a lower bound.

    Call arguments:
        lower_bound: `[2, D]`, log β and log(1 - β), one entry of the output of
            `keras_recurrent.layers.LowerBounds`; None: β is 0.

    Raises:
        ValueError: the lower bound has another shape than `[2, D]`.
    """

    def check_arguments(self, inputs, lower_bound=None, **kwargs):
        super().check_arguments(inputs, **kwargs)
        check_lower_bound(lower_bound, inputs.shape[-1])


class ForgetGateLayer(BoundedLayer):
    """Base class of `HGRN` and `HGRN2`, whose forget gates may have a bias, `f_bias`.

    Args:
        f_bias_initializer: initializer of the bias, as in `keras_recurrent.layers.HGRN2`. None: no
            bias.
    """

    def __init__(self, *, f_bias_initializer=None, **kwargs):
        super().__init__(**kwargs)
        self.f_bias_initializer = keras.initializers.get(f_bias_initializer)
        self.f_bias = None

    def build(self, input_shape):
        super().build(input_shape)
        if self.f_bias_initializer is not None:
            self.f_bias = self.add_state_weight(
                "f_bias", (self.width,), self.f_bias_initializer, weight_decay=False
            )

    def log_forget_gate(self, logits, lower_bound):
        """Returns log f, with f = β + (1 - β) σ(logits + b_f), in the dtype of states."""
        if lower_bound is not None:
            lower_bound = cast(lower_bound, self.state_dtype)
        logits = cast(logits, self.compute_dtype)
        if self.f_bias is not None:
            logits = cast(logits, self.state_dtype) + self.f_bias
        return log_forget_gate(logits, lower_bound)


def check_lower_bound(lower_bound, width):
    if lower_bound is None:
        return
    check_tensor("lower_bound", lower_bound)
    if tuple(lower_bound.shape) != (2, width):
        raise ValueError(
            f"`lower_bound` must have the shape (2, {width}), log β and log(1 - β) of the layer's "
            f"channels; got {tuple(lower_bound.shape)}. Pass one entry of the output of "
            "`keras_recurrent.layers.LowerBounds`, `bounds[i]`."
        )
