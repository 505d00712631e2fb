"""Product of a gated linear unit."""

from keras_recurrent.ops.operation import Operation


class GatedLinearUnitOperation(Operation):
    function = "gated_linear_unit"
    options = {"activation": None}

    @classmethod
    def check(cls, tensors, context, options):
        activation = options["activation"]
        if activation not in ("silu", "gelu"):
            raise ValueError(
                f"`{cls.function}`: `activation` must be 'silu' or 'gelu'; got {activation!r}. "
                "Apply any other activation to the gate, and multiply."
            )
        return super().check(tensors, context, options)


@GatedLinearUnitOperation.public_function
def gated_linear_unit(gate, x, *, activation, implementation=None):
    """Computes `activation(gate) * x`, the product of a gated linear unit.

    ```
    y = activation(gate) * x
    silu(z) = z σ(z)
    gelu(z) = z (1 + tanh(sqrt(2 / π) (z + 0.044715 z^3))) / 2
    ```

    The operation between the linear layers of SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202),
    with the tanh-approximated gelu of Griffin (De et al. 2024, arXiv:2402.19427). Only the
    arguments are saved for the gradient.

    A NaN or an infinity, in an argument or in the incoming gradient, reaches only the same element
    of y and of the gradients.

    Args:
        gate: a tensor of any shape, float16, bfloat16, float32 or float64.
        x: a tensor of the same shape.
        activation: `"silu"` or `"gelu"`.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        y with the shape and dtype of `x`, computed in float32, or float64 if a tensor is, and
        rounded once.

    Raises:
        ValueError: a shape or dtype does not fit, or the activation or the implementation is
            unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: a closed, a half-open and an open gate.

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import gated_linear_unit
    >>> gate, x = np.array([-9, 1, 9], "float32"), np.ones(3, "float32")
    >>> y = gated_linear_unit(gate, x, activation="silu")
    >>> keras.ops.convert_to_numpy(y).round(2)
    array([-0.  ,  0.73,  9.  ], dtype=float32)
    """
