"""Measures times, memory and rates of a CUDA GPU, for the other scripts of this folder."""

import statistics
import time
from typing import NamedTuple

import torch

REPEATS = 7


class Times(NamedTuple):
    """Milliseconds of repeats: median and quartiles."""

    median: float
    lower: float
    upper: float

    def __str__(self):
        return f"{self.median:.3f} ({self.lower:.3f} to {self.upper:.3f})"


def times(milliseconds):
    lower, median, upper = statistics.quantiles(milliseconds, n=4, method="inclusive")
    return Times(median, lower, upper)


def device_ms(call, target_ms=30):
    """Returns the GPU's time for one call, without launches: calls are queued while it is busy."""
    call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    began = time.perf_counter()
    call()
    milliseconds = 1000 * (time.perf_counter() - began)  # launch time on the host
    stop.record()
    torch.cuda.synchronize()
    calls = max(1, min(20, int(target_ms / start.elapsed_time(stop))))
    found = []
    for _ in range(REPEATS):
        torch.cuda._sleep(int(2_000_000 * (1 + 1.5 * milliseconds) * calls))  # cycles, 2 GHz
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop) / calls)
    return times(found)


def wall_ms(call, target_ms=50):
    """Returns the wall time of one call: Python, launches and the GPU."""

    def seconds(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    calls = max(1, min(10, int(target_ms / (1000 * seconds(1)))))
    return times([1000 * seconds(calls) for _ in range(5)])


def peak_mib(call):
    """Returns the peak of memory allocated in a call, minus that allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def bytes_a_second():
    """Measures the bytes per second that a copy in device memory reads and writes."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (device_ms(lambda: target.copy_(source)).median / 1000)


def flops_a_second():
    """Measures the rate of a bfloat16 matrix product."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / (device_ms(lambda: a @ b).median / 1000)


def line(cells):
    return "| " + " | ".join(map(str, cells)) + " |"
