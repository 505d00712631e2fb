"""h_t = exp(log_a_t) * h_{t-1} + x_t.  De et al. 2024, arXiv:2402.19427, section 2.4."""

from ._scan import recurrence

linear_scan = recurrence("linear_scan", lambda _, x, log_a: (log_a, x), dropped=(0,))
