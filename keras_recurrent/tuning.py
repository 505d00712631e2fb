"""A search for the fastest configurations of kernels, on the device at hand."""

import contextlib
import importlib

from keras_recurrent import dispatch


@contextlib.contextmanager
def autotune():
    """Time the configurations of the Triton kernels at hand, and keep the fastest.

    The kernels of `backends/triton` for NVIDIA GPUs come with tiles that were chosen for the
    GPU and the shapes of our benchmarks. On torch they can be searched; programs of JAX are
    lowered before there is anything to time, and take the defaults. Inside this block, the
    first call of a kernel at new sizes times up to five configurations of it on its own
    arguments, forwards as backwards, and the fastest serves these sizes from then on: in every
    thread, also after the block, until the process ends. Batch sizes, lengths and windows share
    what was found up to the next power of two; all other sizes, dtypes and devices are searched
    each for themselves.

    A search compiles each configuration, a second or so, and takes 256 MB of the GPU's memory
    while it measures. Configurations differ in the order of sums: what is found may change results
    in their last digits, and another search may find another. A configuration for which the GPU
    has no room is left out.

    A compiled model calls the kernels as well: enter the block around its calls, not inside of
    what is compiled, and before CUDA graphs are captured.

    Returns:
        A context manager whose value is a list. It fills with what was searched: `kernel` and
        `device`, strings; `sizes`, a dict; `dtypes`, those of the tensors, None for one that is
        absent; `timings`, of which each has a `configuration`, a dict, and `milliseconds`, the
        median on the device or None if there was no room, the default first; and `fastest`, one
        of them. Printed, each is a small table, to be reported to us: then defaults can improve.

    Raises:
        NotImplementedError: there is nothing to search: Keras runs on another backend than torch,
            or Triton or an NVIDIA GPU is missing.
        RuntimeError: a kernel with new sizes is called while a CUDA graph is captured.

    Example:

    ```python
    with keras_recurrent.autotune() as found:
        model.fit(x, y, epochs=1)
    print(*found, sep="\\n")
    model.fit(x, y, epochs=10)  # as fast, and nothing more is searched
    ```
    """
    with _search().autotune() as found:
        yield found


def _search():
    """The module that searches."""
    reason: str | None = f"Keras runs on {dispatch.BACKEND!r}, which has none"
    if "triton" in dispatch.serving():
        row = dispatch.IMPLEMENTATIONS["linear_scan"]["triton"]
        reason = row if isinstance(row, str) else None
    if reason is None:
        search = importlib.import_module("keras_recurrent.backends.triton._runtime.search")
        reason = search.unavailable_reason()
    if reason is not None:
        raise NotImplementedError(
            f"`autotune` times Triton kernels on torch and an NVIDIA GPU; here {reason}."
        )
    return search
