"""What the real-gated and the complex-gated linear recurrent units have in common."""

from keras import ops

from keras_recurrent.backends.constants import DECAY_EXPONENT, MAX_SQRT_GRADIENT


def log_decay(a_logit, recurrence_gate):
    """log |a_t| = -8 softplus(-Λ) r_t."""
    return -DECAY_EXPONENT * ops.softplus(-a_logit) * recurrence_gate


def input_multiplier(log_a):
    """sqrt(1 - a^2), exactly, with its derivative held below MAX_SQRT_GRADIENT."""
    z = -ops.expm1(2 * log_a)
    derivative = ops.rsqrt(ops.maximum(4 * z, 1 / MAX_SQRT_GRADIENT**2))
    # z - stop_gradient(z) is 0: the value stays, and the gradient is the bounded derivative.
    return ops.stop_gradient(ops.sqrt(z)) + ops.stop_gradient(derivative) * (
        z - ops.stop_gradient(z)
    )
