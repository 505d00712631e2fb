"""Capture of CUDA graphs on torch."""

import contextlib
import gc
import threading

import torch

_capturing = threading.Lock()  # torch aborts if two threads capture at once


def capture(function, device, pool=None):
    """Captures a function without arguments as a CUDA graph, after running it once.

    Args:
        function: a function of tensors at fixed addresses.
        device: their `torch.device`.
        pool: the memory pool of another graph, which never runs at the same time, or None.

    Returns:
        The graph, and the result of the function, which each replay overwrites.
    """
    # A failed capture leaves its own stream current.
    stream = torch.cuda.stream(torch.cuda.current_stream(device))
    with _capturing, torch.cuda.device(device), stream, torch.no_grad():
        function()  # compiles and loads kernels, which cannot be captured
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during the capture.
        mode = "thread_local"
        context = torch.cuda.graph(graph, pool=pool, capture_error_mode=mode)
        with _no_garbage_collection(), context:
            return graph, function()


@contextlib.contextmanager
def _no_garbage_collection():
    """Context manager during which no other graph is destroyed, which would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
