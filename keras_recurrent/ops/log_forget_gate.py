"""Forget gates with a lower bound, as logarithms."""

from keras_recurrent.ops.operation import Operation


class LogForgetGateOperation(Operation):
    function = "log_forget_gate"


@LogForgetGateOperation.public_function
def log_forget_gate(logits, lower_bound=None, *, implementation=None):
    """Computes the logarithm of forget gates with a lower bound.

    ```
    log f = log(β + (1 - β) σ(logits))
    ```

    The forget gate of HGRN (Qin et al. 2023, arXiv:2311.04823, section 3.2) and HGRN2 (Qin et al.
    2024, arXiv:2404.07904), in the form that `keras_recurrent.ops.gated_linear_attention` and
    `linear_scan` take. The result is accurate for gates near 0 and near 1: for w at most 1/2, where
    w = (1 - β) σ(-logits) = 1 - f, log f is computed as log(1 - w), which uses only log(1 - β). The
    gradient of `lower_bound` is always that of the formula above with log β and log(1 - β) as two
    variables, `[β, (1 - β) σ(logits)] / f`.

    Infinite logits are closed or open gates. A NaN in `logits` or in the incoming gradient reaches
    only the same element of log f and of the gradient of `logits`, and its channel of the gradient
    of `lower_bound`, which sums over all tokens. A NaN in `lower_bound` reaches its channel of all
    tokens.

    Args:
        logits: `[..., D]`, float16, bfloat16, float32 or float64.
        lower_bound: `[2, D]`, log β, which may be -inf, and log(1 - β), one entry of the output of
            `keras_recurrent.layers.LowerBounds`; None: β is 0.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        log f as `[..., D]`, at most 0, in float32, or float64 if a tensor is. If log β and a logit
        are both -inf, it is -inf and its gradient is NaN.

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: closed, half-open and open gates with a bound of 1/2.

    >>> import keras
    >>> import numpy as np
    >>> from keras_recurrent.ops import log_forget_gate
    >>> logits = np.array([[-100], [0], [100]], "float32")
    >>> bound = np.log([[0.5], [0.5]]).astype("float32")
    >>> log_f = keras.ops.convert_to_numpy(log_forget_gate(logits, bound))
    >>> np.exp(log_f).ravel().round(4)
    array([0.5 , 0.75, 1.  ], dtype=float32)
    """
