"""Code that kernels of decoding steps share."""
