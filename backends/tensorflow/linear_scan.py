"""h_t = exp(log_a_t) * h_{t-1} + x_t.  De et al. 2024, arXiv:2402.19427, section 2.4."""

from ._scan import recurrence


def linear_scan(x, log_a, initial_state=None, token_kind=None):
    """x, log_a: [B, T, D], log_a <= 0."""
    return recurrence(lambda x, log_a: (log_a, x), (x, log_a), initial_state, token_kind)
