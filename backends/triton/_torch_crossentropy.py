"""`linear_crossentropy` on torch: plain torch's, with one kernel for a piece of logits."""

import torch

from ..torch.linear_crossentropy import operation
from . import _torch
from ._crossentropy_kernel import options, piece_kernel, written
from ._launch import Launch

refusal = _torch.refusal_of_token_wise


def piece(z, weights, tokens, cap, dtype, d_z):
    """As `piece` of plain torch."""
    rows, vocabulary = z.shape
    constants = options(vocabulary, cap > 0, dtype == torch.float32)
    inputs = z, tokens, weights, d_z
    with _torch.on_device_of(z):
        losses, factors, best = _torch.run(
            Launch(piece_kernel, rows, inputs, written(rows), (cap,), constants)
        )
    return losses, best, factors


linear_crossentropy = operation("triton_linear_crossentropy", piece)
