"""y = x / sqrt(mean(x²) + ε) * scale.  Zhang and Sennrich 2019, arXiv:1910.07467."""

from keras_recurrent.backends.torch._common import accumulation_dtype


def rms_norm(x, scale=None, epsilon=0.0):
    """x: [..., D]; scale: [D] or None. Returns [..., D] in x's dtype."""
    dtype = accumulation_dtype(x, scale)
    y = x.to(dtype)
    y = y * (y.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (y if scale is None else y * scale.to(dtype)).to(x.dtype)
