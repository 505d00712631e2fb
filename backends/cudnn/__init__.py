"""Softmax attention of NVIDIA's cuDNN, by way of torch.

For rows that a window holds whole, without a state before them, documents or padding.
"""

import torch


def unavailable():
    """Why nothing in this folder can run; None if it can."""
    if torch.version.cuda is None or not torch.backends.cudnn.is_available():
        return "this torch was built without cuDNN"
    return None
