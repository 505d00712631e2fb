"""log f = log(β + (1 - β) σ(logits)).  Qin et al. 2023, arXiv:2311.04823, section 3.2.

The lower bound comes as log β and log(1 - β), two numbers: rounding may take their sum above 1, and
log f above 0, where it is cut off. The gradient knows nothing of that.
"""

import numpy as np

from keras_recurrent.backends.reference._common import prepare, sigmoid


def log_forget_gate(logits, lower_bound=None, dtype=np.float64):
    """logits: [..., D]; lower_bound: [2, D] or None, β = 0. Returns [..., D]."""
    (logits,) = prepare(dtype, logits)
    log_s = -np.logaddexp(0, -logits)
    if lower_bound is None:
        return log_s
    log_bound, log_rest = prepare(dtype, lower_bound)[0]
    return np.minimum(np.logaddexp(log_bound, log_rest + log_s), 0)


def log_forget_gate_gradient(d_output, logits, lower_bound=None, dtype=np.float64):
    """Returns the gradients of logits and lower_bound."""
    logits, d_output = prepare(dtype, logits, d_output)
    if lower_bound is None:
        return d_output * sigmoid(-logits), None
    log_bound, log_rest = prepare(dtype, lower_bound)[0]
    above = sigmoid(log_rest - np.logaddexp(0, -logits) - log_bound)  # of f, what the gate adds
    below = sigmoid(log_bound - log_rest + np.logaddexp(0, -logits))
    d_bound = [
        np.sum((d_output * part).reshape(-1, logits.shape[-1]), axis=0) for part in (below, above)
    ]
    return d_output * above * sigmoid(-logits), np.stack(d_bound)
