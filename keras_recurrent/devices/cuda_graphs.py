"""Capture of CUDA graphs on torch."""

import contextlib
import gc
import threading

import torch

from keras_recurrent.compat import _cuda_endAllocateToPool, _cuda_releasePool

_capturing = threading.Lock()  # torch aborts if two threads capture at once
_MODE = "thread_local"  # other threads may use the device during a capture


def capture(function, device, pool=None):
    """Captures a function of tensors at fixed addresses as a CUDA graph, after running it once.

    Returns the graph, and the result of the function, which each replay overwrites. `pool` is the
    memory pool of another graph, which never runs at the same time, or None.
    """
    pool = pool or torch.cuda.graph_pool_handle()
    # A failed capture leaves its own stream current; `stream` restores the stream of the caller.
    stream = torch.cuda.stream(torch.cuda.current_stream(device))
    with _capturing, torch.cuda.device(device), torch.no_grad():
        function()  # compiles and loads kernels, which is not allowed during a capture
        graph = torch.cuda.CUDAGraph()
        context = torch.cuda.graph(graph, pool=pool, capture_error_mode=_MODE)
        try:
            with stream, _no_garbage_collection(), context:
                return graph, function()
        except RuntimeError:
            _end_failed_capture(device, pool)
            raise


def _end_failed_capture(device, pool):
    """Frees the memory pool and enables random numbers after a capture that torch could not end."""
    with contextlib.suppress(RuntimeError):  # raised if torch has ended the capture
        _cuda_endAllocateToPool(device.index, pool)
        _cuda_releasePool(device.index, pool)
    # torch cannot draw random numbers until another capture ends, so an empty one follows.
    context = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=_MODE)
    with _no_garbage_collection(), context:
        torch.zeros(1, device=device)


@contextlib.contextmanager
def _no_garbage_collection():
    """Disables garbage collection, which could destroy another graph and so break a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
