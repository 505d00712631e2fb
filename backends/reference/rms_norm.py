"""y = x / sqrt(mean(x^2) + ε) * scale.  Zhang and Sennrich 2019, arXiv:1910.07467.

The mean runs over the last axis.
"""

import numpy as np

from ._common import cast


def rms_norm(x, scale=None, epsilon=0.0, dtype=np.float64):
    """x: [..., D]; scale: [D] or None. Returns [..., D]."""
    (x,) = cast(dtype, x)
    y = x * _inverse(x, epsilon)
    return y if scale is None else y * cast(dtype, scale)[0]


def rms_norm_gradient(d_output, x, scale=None, epsilon=0.0, dtype=np.float64):
    """Returns the gradients of x and scale."""
    x, d_output = cast(dtype, x, d_output)
    inverse = _inverse(x, epsilon)
    y, d_scale = x * inverse, None
    if scale is not None:
        d_scale = np.sum((d_output * y).reshape(-1, x.shape[-1]), axis=0)
        d_output = d_output * cast(dtype, scale)[0]
    d_x = inverse * (d_output - y * np.mean(d_output * y, axis=-1, keepdims=True))
    return d_x, d_scale


def _inverse(x, epsilon):
    return 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(epsilon))
