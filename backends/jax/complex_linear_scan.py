"""`linear_scan` of complex numbers; `backends/reference/complex_linear_scan.py` has equations."""

import jax

from ._scan import recurrence

complex_linear_scan = recurrence(
    "complex_linear_scan",
    lambda _, x, log_a, phase: (jax.lax.complex(log_a, phase), x),
    is_complex=True,
    dropped=(0,),
)
