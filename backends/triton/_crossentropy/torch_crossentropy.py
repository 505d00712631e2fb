"""`linear_crossentropy` on torch: plain torch's loop, with a kernel for each chunk of logits."""

import torch

from ...kernel import Kernel
from ...torch.linear_crossentropy import operation
from .._runtime import torch_operators
from .._runtime.launch import Launch
from .crossentropy_kernel import chunk_kernel, options, output_arrays

unsupported_reason = torch_operators.token_wise_unsupported_reason


def chunk_losses(z, weights, tokens, cap, dtype, d_z):
    """The kernel's version of `chunk_losses` in `backends/torch/linear_crossentropy.py`."""
    rows, vocabulary = z.shape
    constants = options(vocabulary, cap > 0, dtype == torch.float32)
    inputs = z, tokens, weights, d_z
    with torch_operators.device_guard(z):
        losses, factors, best = torch_operators.run(
            Launch(chunk_kernel, rows, inputs, output_arrays(rows), (cap,), constants)
        )
    return losses, best, factors


linear_crossentropy = Kernel(operation("triton_linear_crossentropy", chunk_losses))
