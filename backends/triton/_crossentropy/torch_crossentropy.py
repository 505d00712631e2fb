"""`linear_crossentropy` on torch: plain torch's, with one kernel for a piece of logits."""

import torch

from ...torch.linear_crossentropy import operation
from .._runtime import torch_operators
from .._runtime.launch import Launch
from .crossentropy_kernel import options, piece_kernel, written

unsupported_reason = torch_operators.token_wise_unsupported_reason


def chunk_losses(z, weights, tokens, cap, dtype, d_z):
    """As `chunk_losses` of plain torch."""
    rows, vocabulary = z.shape
    constants = options(vocabulary, cap > 0, dtype == torch.float32)
    inputs = z, tokens, weights, d_z
    with torch_operators.on_device_of(z):
        losses, factors, best = torch_operators.run(
            Launch(piece_kernel, rows, inputs, written(rows), (cap,), constants)
        )
    return losses, best, factors


linear_crossentropy = operation("triton_linear_crossentropy", chunk_losses)
