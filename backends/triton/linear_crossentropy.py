"""losses = log Σ_v exp(z_v) - z_token of the logits z = x E^T, perhaps capped, c tanh(x E^T / c).

The library multiplies matrices. Between its products, one kernel (`_crossentropy_kernel.py`) reads
the logits of a piece of tokens, in float32, once, and writes the gradient over them.
"""

from ._framework import of_framework
from ._launch import dtype_name

_framework = of_framework("_crossentropy")

linear_crossentropy, piece = _framework.linear_crossentropy, _framework.piece


def unsupported(
    x, embedding, tokens, sample_weight=None, soft_cap=None, reduction="sum"
) -> str | None:
    """Why this implementation refuses these arguments; None if it accepts them."""
    if dtype_name(x) != dtype_name(embedding):
        return (
            f"needs `x` and `embedding` of one dtype, got {dtype_name(x)} and "
            f"{dtype_name(embedding)}"
        )
    if dtype_name(x) == "float16":
        return "the gradient of logits, without its factor, leaves the range of float16"
    return _framework.refusal(x, embedding, tokens, sample_weight)
