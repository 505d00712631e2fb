"""losses = log Σ_v exp(z_v) - z_token of the logits z = x E^T, perhaps capped, c tanh(x E^T / c).

The library multiplies matrices. Between its products, one kernel (`crossentropy_kernel.py`) reads
the logits of a chunk of tokens, in float32, once, and writes the gradient over them.
"""

from typing import Any

from .. import host
from ._runtime.launch import dtype_name

kernels: Any
if host.framework == "jax":
    from ._crossentropy import jax_crossentropy as kernels
else:
    from ._crossentropy import torch_crossentropy as kernels

linear_crossentropy, chunk_losses = kernels.linear_crossentropy, kernels.chunk_losses


def unsupported(
    x, embedding, tokens, sample_weight=None, soft_cap=None, reduction="sum"
) -> str | None:
    """Reason why this implementation cannot take these arguments, or None."""
    if dtype_name(x) != dtype_name(embedding):
        return (
            f"needs `x` and `embedding` of one dtype, got {dtype_name(x)} and "
            f"{dtype_name(embedding)}"
        )
    if dtype_name(x) == "float16":
        return (
            "takes float32 or bfloat16, got float16, whose range the unscaled gradient of logits "
            "exceeds"
        )
    return kernels.unsupported_reason(x, embedding, tokens, sample_weight)
