"""Forget gates with a lower bound, as logarithms."""

import keras

from keras_recurrent.ops.operation import Operation


@keras.saving.register_keras_serializable(package="keras_recurrent")
class LogForgetGateOperation(Operation):
    function = "log_forget_gate"


def log_forget_gate(logits, lower_bound=None, *, implementation=None):
    """The logarithm of forget gates that stay above a bound.

    ```
    log f = log(β + (1 - β) σ(logits))
    ```

    The forget gate of HGRN (Qin et al. 2023, arXiv:2311.04823, section 3.2) and HGRN2 (Qin et al.
    2024, arXiv:2404.07904), as `keras_recurrent.ops.gated_linear_attention` and `linear_scan` take
    it. Neither gates near 0 nor those near 1 lose their digits: where a gate forgets at most half,
    log f is log(1 - w), of what is forgotten, w = (1 - β) σ(-logits), for which log(1 - β) alone is
    used. The gradient of `lower_bound` is everywhere that of the formula above with log β and
    log(1 - β) as two variables, `[β, (1 - β) σ(logits)] / f`.

    Infinite logits are gates that are shut or open. A NaN among them, or in the gradient that
    arrives, reaches its own place in log f and in the gradient of `logits`, and no other, but the
    gradient of `lower_bound` sums over all rows: there it reaches its channel. A NaN in
    `lower_bound` reaches its channel of every row.

    Args:
        logits: `[..., D]`, float16, bfloat16, float32 or float64.
        lower_bound: `[2, D]`, log β, which may be -inf, and log(1 - β), a row of what
            `keras_recurrent.layers.LowerBounds` returns; None: β is 0.
        implementation: as in `keras_recurrent.ops.linear_scan`.

    Returns:
        log f as `[..., D]`, at most 0, in float32, or float64 if a tensor is. Where log β and a
        logit are both -inf it is -inf, and has no gradient (NaN).

    Raises:
        ValueError: a shape or dtype does not fit, or the implementation is unknown.
        NotImplementedError: no implementation accepts the arguments; says why for each.

    Example: gates that are closed, half open and open, with a bound of 1/2.

    >>> import numpy as np
    >>> from keras_recurrent.ops import log_forget_gate
    >>> logits = np.array([[-100], [0], [100]], "float32")
    >>> bound = np.log([[0.5], [0.5]]).astype("float32")
    >>> np.exp(np.array(log_forget_gate(logits, bound)).ravel()).round(4)
    array([0.5 , 0.75, 1.  ], dtype=float32)
    """
    return LogForgetGateOperation.apply(
        {"logits": logits, "lower_bound": lower_bound}, implementation
    )
