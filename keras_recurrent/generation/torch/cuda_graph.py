"""CUDA graphs, by which the host launches all kernels of a step at once.

A graph uses fixed addresses. The decoder that captures it therefore owns its tensors, to which each
call of `generate` copies its initial values, and it serves one call at a time.
"""

import collections
import contextlib
import gc
import queue
import threading

import torch

_capturing = threading.Lock()  # torch aborts if two threads capture at once

# The tensors of unused decoders take at most 1 / POOL_DIVISOR of the device memory. The most
# recent shapes are always kept, and temporary memory of a step is not counted.
POOL_DIVISOR = 16


def capture(function, device, pool=None):
    """Captures a function without arguments as a CUDA graph, after running it once.

    Args:
        function: a function of tensors at fixed addresses.
        device: their `torch.device`.
        pool: the memory pool of another graph, which never runs at the same time, or None.

    Returns:
        The graph, and the result of the function, which each replay overwrites.
    """
    with _capturing, torch.cuda.device(device), torch.no_grad():
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


def overwrite(tensors, after):
    """Overwrites tensors with new values, which may be views of the tensors."""
    addresses = {t.untyped_storage().data_ptr() for t in tensors}
    targets, values = [], []
    for t, new in zip(tensors, after, strict=True):
        # A tensor that the step has overwritten in place is its own new value. Other views of the
        # tensors are copied before any of these is overwritten.
        if new is not t:
            is_view = new.untyped_storage().data_ptr() in addresses
            targets.append(t)
            values.append(new.clone() if is_view else new)
    copy_all(targets, values)


def copy_all(targets, values):
    """Copies tensors to others by one launch for each dtype."""
    by_dtype: dict = {}
    for target, value in zip(targets, values, strict=True):
        pair = by_dtype.setdefault(value.dtype, ([], []))
        pair[0].append(target)
        pair[1].append(value)
    for pair in by_dtype.values():
        torch._foreach_copy_(*pair)


def clone_all(tensors):
    """Returns contiguous copies of tensors, as `copy_all`."""
    copies = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    copy_all(copies, tensors)
    return copies


def clone_state(tensors):
    """Returns copies of tensors by one launch for each shape and dtype.

    Copies of one shape share an allocation, so that some begin at unaligned addresses. Kernels of a
    `CapturedDecoder` require aligned addresses: use `clone_all` for them.
    """
    groups: dict = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.shape, tensor.dtype), []).append(index)
    copies = list(tensors)
    for indices in groups.values():
        stacked = torch.stack([tensors[index] for index in indices])
        for index, copy in zip(indices, stacked, strict=True):
            copies[index] = copy
    return copies


def slot_of(tensors, index):
    """Returns views of one sequence, of batch size 1."""
    return [t[index : index + 1] for t in tensors]


class DecoderPool:
    """Unused captured decoders of a model.

    A call acquires a decoder and releases it at its end. A decoder that another thread uses, or
    whose call raised an exception, is not in the pool: two calls never share tensors.
    """

    def __init__(self):
        self._unused: collections.OrderedDict = collections.OrderedDict()
        self._lock = threading.Lock()
        # Garbage collection of a stream releases its decoder at any moment, even while this thread
        # holds the lock, so released decoders are put in a queue first.
        self._released: queue.SimpleQueue = queue.SimpleQueue()

    def acquire(self, key):
        """Returns a decoder that was captured for this key, or None."""
        with self._lock:
            self._store_released()
            decoders = self._unused.get(key)
            return decoders.pop() if decoders else None

    def drop(self, step):
        """Deletes the decoders whose keys begin with `step`."""
        with self._lock:
            self._store_released()
            for key in [key for key in self._unused if key[0] is step]:
                del self._unused[key]

    def release(self, decoder):
        """Returns a decoder to the pool."""
        self._released.put(decoder)
        if self._lock.acquire(blocking=False):
            try:
                self._store_released()
            finally:
                self._lock.release()

    def _store_released(self):
        while not self._released.empty():
            decoder = self._released.get()
            device = torch.cuda.get_device_properties(decoder.tensors["token"].device)
            self._unused.setdefault(decoder.key, []).append(decoder)
            self._unused.move_to_end(decoder.key)
            while self._bytes() > device.total_memory // POOL_DIVISOR and len(self._unused) > 1:
                self._unused.popitem(last=False)

    def _bytes(self):
        return sum(d.bytes for decoders in self._unused.values() for d in decoders)
