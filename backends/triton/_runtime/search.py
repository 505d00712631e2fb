"""Chooses the configuration of a kernel's launch: its default, or the fastest of its candidates.

Each kernel has `candidates`, tiles and launch options that are correct for any arguments; the first
is the default. Inside `autotune`, the first call with a new key (kernel, device, dtypes, sizes)
times all of them on its arguments; after that, this key uses the fastest. `launch` allocates
scratch memory in each call: a kernel may overwrite it, and the time of the allocation counts.

Results are stored per process, not per thread, because autograd runs the backward in another
thread.
"""

import contextlib
import functools
import threading
from typing import NamedTuple

import triton

from .framework import framework
from .launch import next_power_of_2

# Sizes that are not compiled into kernels: keys round them up to the next power of two.
_ROUNDED = ("batch", "length", "positions", "window")
# Milliseconds of warm-up and measurement, which `do_bench` fills with calls.
_WARMUP, _REPETITION = 10, 50
# Errors of Triton if a configuration exceeds the device's registers or shared memory.
_OUT_OF_RESOURCES = (
    triton.runtime.errors.OutOfResources,
    triton.runtime.errors.PTXASError,
    triton.compiler.errors.CompileTimeAssertionFailure,
)

_open_reports: list = []  # one for each `autotune` block that is running
_fastest: dict = {}  # {key: configuration}
_lock = threading.Lock()  # two searches at once would slow each other down


class Timing(NamedTuple):
    """The time of a configuration; None if the device lacks resources for it."""

    configuration: dict
    milliseconds: float | None

    def __str__(self):
        time = "no room" if self.milliseconds is None else f"{self.milliseconds:.4f} ms"
        options = {name: value for name, value in self.configuration.items() if value is not None}
        return f"{time:>11}  {' '.join(f'{name}={value}' for name, value in options.items())}"


class Search(NamedTuple):
    """The times of a kernel's candidates for some sizes, the default first."""

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


def unavailable_reason() -> str | None:
    """Reason why kernels cannot be timed here, or None."""
    return framework.tuning_unavailable_reason()


@contextlib.contextmanager
def autotune():
    """Yields a list that fills with a `Search` for each new key."""
    report: list[Search] = []
    _open_reports.append(report)
    try:
        yield report
    finally:
        # Compared by identity, since equal lists (such as empty ones) may belong to other blocks.
        _open_reports[:] = [other for other in _open_reports if other is not report]


def run(kernel, candidates, launch, tensors, sizes):
    """Returns `launch(candidate)` for the fastest candidate known for these sizes, or the default.

    kernel: its name in reports. tensors (or Nones): their device and dtypes are part of the key.
    sizes: a dict or named tuple, the rest of the key.
    """
    if len(candidates) == 1 or not (_fastest or _open_reports):
        return launch(candidates[0])
    sizes = sizes if isinstance(sizes, dict) else sizes._asdict()
    sizes = {n: next_power_of_2(s) if n in _ROUNDED else s for n, s in sizes.items()}
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    device = tensors[0].device
    key = kernel, candidates, device, dtypes, *sizes.values()
    if _open_reports and key not in _fastest:
        with _lock:
            if key not in _fastest:  # another thread may have searched in the meantime
                name = framework.device_name(device)
                times = timed(launch, candidates)
                timings = [Timing(c._asdict(), t) for c, t in zip(candidates, times, strict=True)]
                search = Search(kernel, name, sizes, dtypes, timings)
                _fastest[key] = candidates[timings.index(search.fastest)]
                for report in _open_reports:
                    report.append(search)
    return launch(_fastest.get(key, candidates[0]))


def timed(launch, candidates):
    """The milliseconds of each candidate, None if the device lacks resources for it."""
    times = []
    reason = None
    for candidate in candidates:
        try:
            times.append(milliseconds(functools.partial(launch, candidate)))
        except _OUT_OF_RESOURCES as error:
            times.append(None)
            reason = error
    if reason is not None and all(t is None for t in times):
        raise reason
    return times


def milliseconds(call):
    """The median time of a call on the device, with the L2 cache cleared before each call."""
    return framework.milliseconds(call, _WARMUP, _REPETITION)
