"""log f = log(β + (1 - β) σ(logits))."""

from keras import ops

from keras_recurrent.portable._common import log1p, softplus, sum_dtype


def log_forget_gate(logits, lower_bound=None):
    """logits: [..., D]; lower_bound: [2, D], log β and log(1 - β), or None, β = 0."""
    dtype = sum_dtype(logits, lower_bound)
    logits = ops.cast(logits, dtype)
    log_s = -softplus(-logits)
    if lower_bound is None:
        return log_s
    log_bound, log_rest = (ops.cast(lower_bound[i], dtype) for i in range(2))
    log_sum = _logaddexp(log_bound, log_rest + log_s)
    forgotten = ops.exp(log_rest) * ops.sigmoid(-logits)
    near_1 = ops.minimum(forgotten, 0.5)
    return ops.where(forgotten <= 0.5, -log1p(near_1 / (1.0 - near_1)), log_sum)


def _logaddexp(x, y):
    """Computes log(exp(x) + exp(y)), also for x of -inf, the logarithm of a lower bound of 0."""
    largest = ops.maximum(x, y)
    return largest + log1p(ops.exp(ops.minimum(x, y) - largest))
