"""losses = log Σ_v exp(z_v) - z_token of logits z = x E^T, optionally capped, c tanh(x E^T / c).

The framework's library multiplies matrices. Between its products, one kernel
(`_crossentropy/crossentropy_kernel.py`) reads the float32 logits of a chunk of tokens once and
overwrites them with the gradient.
"""

from typing import Any

from .. import host
from ._runtime.launch import dtype_name

kernels: Any
if host.framework == "jax":
    from ._crossentropy import jax_crossentropy as kernels
else:
    from ._crossentropy import torch_crossentropy as kernels


def unsupported(
    x, embedding, tokens, sample_weight=None, soft_cap=None, reduction="sum"
) -> str | None:
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


linear_crossentropy = kernels.linear_crossentropy._replace(unsupported=unsupported)
