"""Root mean square normalization."""

from keras_recurrent.checks.arguments import is_finite_number
from keras_recurrent.ops.operation import Operation


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


@RMSNormOperation.public_function
def rms_norm(x, scale=None, *, epsilon, implementation=None):
    """Computes root mean square normalization over the last axis.

    ```
    y = x / sqrt(mean(x^2) + ε) * scale
    ```

    Zhang and Sennrich 2019 (arXiv:1910.07467). Only the arguments are saved for the gradient.

    Non-finite numbers propagate as follows; a row is a vector `[D]`.

    - A NaN in a row of `x`, or in its incoming gradient, makes the row of y and of the gradient of
      `x` NaN, and no other row.
    - An infinity in `x` makes the row of the gradient NaN; the other elements of y in its row
      are 0.
    - The gradient of `scale` sums over all rows: a NaN in `x` reaches all of it; an infinity, or a
      non-finite incoming gradient, reaches only its channel.
    - A non-finite number in `scale` reaches its channel of y in every row, and all of the gradient
      of `x`.

    Args:
        x: `[..., D]`, float16, bfloat16, float32 or float64.
        scale: `[D]`, of any of these dtypes, often float32 if `x` has 16 bits; None: ones.
        epsilon: number, ε, at least 0 and finite.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        y as `[..., D]` in the dtype of `x`, computed in float32, or float64 if a tensor is, and
        rounded once. If the mean of the squares of a row exceeds the range of that dtype, or if it
        and ε are 0, y and the gradient of `x` are 0.

    Raises:
        ValueError: a shape or dtype does not fit, `epsilon` is not a finite number of at least 0,
            or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import rms_norm
    >>> x = np.array([[3, 4], [-30, 40]], "float32")
    >>> y = rms_norm(x, np.array([1, 2], "float32"), epsilon=0)
    >>> keras.ops.convert_to_numpy(y).round(4)
    array([[ 0.8485,  2.2627],
           [-0.8485,  2.2627]], dtype=float32)
    """
