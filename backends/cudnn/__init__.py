"""Attention of NVIDIA's cuDNN, by way of torch, for rows that it knows how to compute."""

import torch


def unavailable():
    """Why nothing in this folder can run; None if it can."""
    if torch.version.cuda is None or not torch.backends.cudnn.is_available():
        return "this torch was built without cuDNN"
    return None
