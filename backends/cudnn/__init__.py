"""Softmax attention with NVIDIA's cuDNN, on torch and JAX, without an initial state.

On torch, it supports sequences no longer than the window, without documents or padding. On JAX,
batches with packed documents are computed by Triton kernels: the choice is made at run time.
"""

import os

from .. import host

if host.framework == "jax":
    from .. import triton
else:
    import torch


def unavailable():
    """Reason cuDNN cannot run, or None."""
    if host.framework == "jax":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return "Triton's interpreter runs programs on the CPU"
        return triton.unavailable()
    if torch.version.cuda is None or not torch.backends.cudnn.is_available():
        return "this torch was built without cuDNN"
    return None
