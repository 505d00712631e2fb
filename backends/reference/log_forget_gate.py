"""log f = log(β + (1 - β) σ(logits)).  Qin et al. 2023, arXiv:2311.04823, section 3.2.

The lower bound β is given as log β and log(1 - β). Rounded, they represent numbers whose sum
is not exactly 1, and where f is near 1, log f would consist of that difference. Where the gate
forgets at most half, log f is therefore log(1 - w), with the forgotten share w = (1 - β)
σ(-logits), for which log(1 - β) suffices. The gradients are everywhere those of the formula above,
with log β and log(1 - β) as two variables.
"""

import numpy as np

from ._common import cast, sigmoid


def log_forget_gate(logits, lower_bound=None, dtype=np.float64):
    """logits: [..., D]; lower_bound: [2, D] or None, β = 0. Returns [..., D]."""
    (logits,) = cast(dtype, logits)
    log_s = -np.logaddexp(0, -logits)
    if lower_bound is None:
        return log_s
    log_bound, log_rest = cast(dtype, lower_bound)[0]
    log_sum = np.logaddexp(log_bound, log_rest + log_s)
    forgotten = np.exp(log_rest) * sigmoid(-logits)
    near_1 = (forgotten <= 0.5) & ~np.isnan(log_sum)  # log β may be NaN
    return np.where(near_1, np.log1p(-np.minimum(forgotten, 0.5)), log_sum)


def log_forget_gate_gradient(d_output, logits, lower_bound=None, dtype=np.float64):
    """Returns the gradients of logits and lower_bound."""
    logits, d_output = cast(dtype, logits, d_output)
    if lower_bound is None:
        return d_output * sigmoid(-logits), None
    log_bound, log_rest = cast(dtype, lower_bound)[0]
    # The shares of f that come from the gate, (1 - β) σ(logits), and from the bound, β.
    of_gate = sigmoid(log_rest - np.logaddexp(0, -logits) - log_bound)
    of_bound = sigmoid(log_bound - log_rest + np.logaddexp(0, -logits))
    d_bound = [
        np.sum((d_output * share).reshape(-1, logits.shape[-1]), axis=0)
        for share in (of_bound, of_gate)
    ]
    return d_output * of_gate * sigmoid(-logits), np.stack(d_bound)
