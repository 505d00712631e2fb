"""Autotuning of kernels on the current device."""

import contextlib
import importlib

from keras_recurrent import dispatch


@contextlib.contextmanager
def autotune():
    """Autotunes the Triton kernels called inside a `with` block, on torch and an NVIDIA GPU.

    The default tiles of the kernels in `backends/triton` were chosen for the GPU and the shapes of
    our benchmarks. Inside this block, the first call of a kernel with new sizes times up to five
    configurations on its arguments, in forward and backward passes. The fastest is used for these
    sizes until the process ends, in every thread and also after the block. Batch sizes, lengths and
    windows share results up to the next power of two; other sizes, dtypes and devices are tuned
    separately. JAX lowers programs before anything can be timed and uses the defaults.

    Tuning compiles each configuration, about a second each, and takes 256 MB of GPU memory.
    Configurations differ in the order of sums: results may change in their last digits, and tuning
    again may choose another one. Configurations that exceed the resources of the GPU are skipped.

    A compiled model calls the kernels, too: enter the block around its calls, not inside the
    compiled function, and before CUDA graphs are captured.

    Returns:
        A context manager whose value is a list of results: `kernel` and `device`, strings; `sizes`,
        a dict; `dtypes` of the tensors, None for an absent one; `timings`, each with a
        `configuration`, a dict, and `milliseconds`, the median on the device or None if it was
        skipped, with the default first; and `fastest`, one of them. Each prints as a small table.
        Please report them, so that defaults can improve.

    Raises:
        NotImplementedError: Keras runs on another backend than torch, or Triton or an NVIDIA GPU is
            missing.
        RuntimeError: a kernel with new sizes is called while a CUDA graph is captured.

    Example:

    ```python
    with keras_recurrent.autotune() as found:
        model.fit(x, y, epochs=1)
    print(*found, sep="\\n")
    model.fit(x, y, epochs=10)  # uses the results, without further tuning
    ```
    """
    with _search().autotune() as found:
        yield found


def _search():
    """Returns the module of the search."""
    reason: str | None = f"Keras runs on {dispatch.BACKEND!r}, which has none"
    if "triton" in dispatch.BACKEND_PREFERENCE:
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
