"""The configuration that a kernel is launched with: its default, or the fastest of a few.

Beside each kernel's launch stand `candidates`, tiles and options with which it is right for any
arguments; the first is the default. Inside `autotune` the first call of a new key times them all,
on the arguments at hand, and the fastest serves that key from then on. `launch` makes what a
configuration needs, such as the room between the tiles of a chain, anew each time: a kernel may
consume it, and making it takes time, too.

All of this is of the process, not of a thread: autograd runs the backward in one of its own.
"""

import contextlib
import threading
from typing import NamedTuple

import torch
import triton

from keras_recurrent.backends.triton._common import INTERPRETED

# Sizes that are no constants of a kernel: a winner serves all up to the next power of two.
_ROUNDED = ("batch", "length", "places", "window")
# Milliseconds, of which `do_bench` makes as many calls as fit.
_WARMUP, _REPETITION = 10, 50
# What Triton raises where a device has no room for a configuration.
_NO_ROOM = (
    triton.runtime.errors.OutOfResources,
    triton.runtime.errors.PTXASError,
    triton.compiler.errors.CompileTimeAssertionFailure,
)

_reports: list = []  # of the `autotune` blocks that are open
_kept: dict = {}  # {key: configuration}
_lock = threading.Lock()  # two searches at once would time each other


class Timing(NamedTuple):
    """What a configuration takes; None where the device has no room for it."""

    configuration: dict
    milliseconds: float | None

    def __str__(self):
        time = "no room" if self.milliseconds is None else f"{self.milliseconds:.4f} ms"
        given = {name: value for name, value in self.configuration.items() if value is not None}
        return f"{time:>11}  {' '.join(f'{name}={value}' for name, value in given.items())}"


class Search(NamedTuple):
    """What was timed for a kernel at some sizes, its default first."""

    kernel: str
    device: str
    sizes: dict
    dtypes: tuple
    timings: list

    @property
    def fastest(self):
        return min(
            (t for t in self.timings if t.milliseconds is not None), key=lambda t: t.milliseconds
        )

    def __str__(self):
        sizes = ", ".join(
            f"{name} {'<= ' if name in _ROUNDED else ''}{size}" for name, size in self.sizes.items()
        )
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        fastest = self.fastest
        lines = (f"{'*' if t is fastest else ' '} {t}" for t in self.timings)
        return "\n".join([f"{self.kernel} on {self.device}: {sizes} ({dtypes})", *lines])


def unavailable() -> str | None:
    """Why nothing can be timed; None if it can."""
    if INTERPRETED:
        return "TRITON_INTERPRET=1 runs the Triton kernels in NumPy"
    return None if torch.cuda.is_available() else "torch finds no NVIDIA GPU"


@contextlib.contextmanager
def autotune():
    """Yields a list that fills with a `Search` for each new key."""
    report: list[Search] = []
    _reports.append(report)
    try:
        yield report
    finally:
        # By identity: an empty list equals any other.
        _reports[:] = [other for other in _reports if other is not report]


def run(kernel, candidates, launch, tensors, sizes):
    """What `launch` returns, given one of the candidates; kernel: its name in reports.

    tensors (or Nones), sizes (a dict or named tuple): what decides which candidate is the fastest.
    """
    if len(candidates) == 1 or not (_kept or _reports):
        return launch(candidates[0])
    sizes = sizes if isinstance(sizes, dict) else sizes._asdict()
    sizes = {n: triton.next_power_of_2(s) if n in _ROUNDED else s for n, s in sizes.items()}
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    device = tensors[0].device
    key = kernel, candidates, device, dtypes, *sizes.values()
    if _reports and key not in _kept:
        with _lock:
            if key not in _kept:  # no other thread was faster
                name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
                times = timed(launch, candidates)
                timings = [Timing(c._asdict(), t) for c, t in zip(candidates, times, strict=True)]
                found = Search(kernel, name, sizes, dtypes, timings)
                _kept[key] = candidates[timings.index(found.fastest)]
                for report in _reports:
                    report.append(found)
    return launch(_kept.get(key, candidates[0]))


def timed(launch, candidates):
    """The milliseconds of each candidate, None where there is no room for it."""
    times = []
    reason = None
    for candidate in candidates:
        try:
            times.append(milliseconds(lambda candidate=candidate: launch(candidate)))
        except _NO_ROOM as error:
            times.append(None)
            reason = error
    if reason is not None and all(t is None for t in times):
        raise reason
    return times


def milliseconds(call):
    """The median on the device; its L2 cache holds nothing of the arguments before a call."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "`autotune` cannot time kernels while a CUDA graph is captured. Call the model once at "
            "this batch size and length inside `autotune` before the capture."
        )
    return triton.testing.do_bench(call, _WARMUP, _REPETITION, return_mode="median")
