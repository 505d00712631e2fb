"""Root mean square normalization."""

import keras

from keras_recurrent.checks.arguments import is_finite_number
from keras_recurrent.ops.operation import Operation


@keras.saving.register_keras_serializable(package="keras_recurrent")
class RMSNormOperation(Operation):
    function = "rms_norm"
    options = {"epsilon": None}

    @classmethod
    def check(cls, tensors, context, options):
        epsilon = options["epsilon"]
        if not is_finite_number(epsilon) or epsilon < 0:
            raise ValueError(
                f"`{cls.function}`: `epsilon` must be a finite number, at least 0; got {epsilon!r}."
            )
        return super().check(tensors, context, options)


def rms_norm(x, scale=None, *, epsilon, implementation=None):
    """Root mean square normalization over the last axis.

    ```
    y = x / sqrt(mean(x^2) + ε) * scale
    ```

    Zhang and Sennrich 2019 (arXiv:1910.07467). Only the arguments are kept for the gradient.

    A NaN in a row of `x`, or in the gradient that arrives at it, makes the whole row NaN, in y and
    in the gradient of `x`, and reaches no other row. An infinity in `x` does the same to the
    gradient, but leaves y at 0 beside itself. The gradient of `scale` sums over all rows: a NaN in
    `x` reaches all of it, an infinity or what arrives its own channel. A number of `scale` that is
    not finite reaches its channel of y in every row, and all of the gradient of `x`.

    Args:
        x: `[..., D]`, float16, bfloat16, float32 or float64.
        scale: `[D]`, of any of these dtypes, often float32 beside tensors of 16 bits; None: ones.
        epsilon: number, ε, at least 0 and finite.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        y as `[..., D]` in the dtype of `x`. All is computed in float32, or float64 if a tensor is,
        and rounded once. Where the mean of the squares of a row leaves the range of that dtype, or
        is 0 and ε is 0, too, y and the gradient of x are 0.

    Raises:
        ValueError: a shape or dtype does not fit, `epsilon` is no finite number from 0 on, or the
            implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example:

    >>> import numpy as np
    >>> from keras_recurrent.ops import rms_norm
    >>> x = np.array([[3, 4], [-30, 40]], "float32")
    >>> np.array(rms_norm(x, np.array([1, 2], "float32"), epsilon=0)).round(4)
    array([[ 0.8485,  2.2627],
           [-0.8485,  2.2627]], dtype=float32)
    """
    return RMSNormOperation.apply({"x": x, "scale": scale}, implementation, {"epsilon": epsilon})
