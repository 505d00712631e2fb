"""Softmax attention with NVIDIA's cuDNN, through torch.

It supports sequences no longer than the window, without a previous state, documents or padding.
"""

import torch


def unavailable():
    """Reason cuDNN cannot run, or None."""
    if torch.version.cuda is None or not torch.backends.cudnn.is_available():
        return "this torch was built without cuDNN"
    return None
