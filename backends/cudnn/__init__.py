"""Softmax attention with NVIDIA's cuDNN, on torch, for one document without an initial state.

On JAX, a training step of RecurrentGemma 2B with cuDNN was 1 to 2 % faster than with the Triton
kernel (H200, 4×2048), and XLA failed to run the backward pass of some padded batches.
"""

import torch


def unavailable():
    """Reason cuDNN cannot run, or None."""
    if torch.version.cuda is None or not torch.backends.cudnn.is_available():
        return "this torch was built without cuDNN"
    return None
