"""Times each operation on a CUDA GPU.

    python -m benchmarks.gpu                                # all operations, 18 minutes
    python -m benchmarks.gpu rg_lru --seconds 300           # some; starts nothing after 300 s

Compares each operation of `backends/triton` with `backends/torch` and, if installed,
flash-linear-attention (`pip install flash-linear-attention`), and softmax attention with torch's,
in bfloat16; `gpu_work.py` lists the operations. The floor is the time of the same GPU, in the same
run, to copy what must be read and written once or, if longer, for a matrix product with the
operations of attention. If JAX is installed for CUDA, a separate process times the operations on
JAX too.

Before it is timed, each implementation is compared with the plain version in float64, in memory
full of NaN (`gpu_checks.py`). "Error" is the largest error relative to the tolerance of the tests,
which baselines may exceed; baselines with a large overall error are not timed.
"""

import argparse
import datetime
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("KERAS_BACKEND", "torch")

import torch

from benchmarks import peers
from benchmarks.gpu_checks import FAR_OFF, Judge
from benchmarks.gpu_jax import OnJax
from benchmarks.gpu_timing import (
    Times,
    bytes_a_second,
    device_ms,
    flops_a_second,
    line,
    peak_mib,
    wall_ms,
)
from benchmarks.gpu_work import TOKEN_WISE, WORK
from keras_recurrent import dispatch


class Figures(NamedTuple):
    """Measurements of one implementation."""

    error: float
    forward: Times
    both: Times
    wall: Times
    peak: float
    first: float


def measure(function, tensors, d_output, judge):
    """Returns the `Figures` of a function of the tensors, or the reason for having none."""
    first, error, far = judge.check(function)
    if far > FAR_OFF:
        return f"wrong by {far:.1%} of the results' size"
    tensors = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    leaves = [t for t in tensors if t.requires_grad]

    def forward():
        with torch.no_grad():
            return function(*tensors)

    def both():
        # Some baselines ignore the decays, which then have no gradient.
        return torch.autograd.grad(function(*tensors), leaves, d_output, allow_unused=True)

    return Figures(error, device_ms(forward), device_ms(both), wall_ms(both), peak_mib(both), first)


def output_of(work, implementation) -> Callable:
    kernel = getattr(dispatch.IMPLEMENTATIONS[work.operation][implementation], work.operation)

    def output(*tensors):
        if work.tied:
            tensors = (tensors[0], None, *tensors[1:])
        results = kernel(*tensors, **work.options)
        return results[0] if isinstance(results, tuple) else results  # without the final state

    return output


def is_ours(name):
    """Returns True for this package's kernels, whose results must be within tolerance."""
    return name.startswith("triton") or name == "cudnn"


def takes(implementation, work, tensors):
    module = dispatch.IMPLEMENTATIONS[work.operation][implementation]
    return not isinstance(module, str) and not module.unsupported(*tensors, **work.options)


def floors(work, shape, bytes_rate, flops_rate):
    """Returns the floor in milliseconds: forward, and forward and backward."""
    moved, multiplied = work.bytes(*shape), work.flops(*shape)
    forward, backward = (
        1000 * max(m / bytes_rate, f / flops_rate) for m, f in zip(moved, multiplied, strict=True)
    )
    return forward, forward + backward


def measure_all(work, shape, on_jax):
    """Returns {name: its `Figures`, or the reason for having none}; the Triton kernel is first."""
    torch.manual_seed(0)
    tensors, plain = work.tensors(*shape), output_of(work, "torch")
    with torch.no_grad():
        d_output = torch.randn_like(plain(*tensors))
    judge = Judge(plain, tensors, d_output, own_units=work.operation in TOKEN_WISE)
    functions = {"triton": output_of(work, "triton")}
    if takes("cudnn", work, tensors):
        functions["cudnn"] = output_of(work, "cudnn")
    functions |= work.peers(*shape)
    if shape == work.shapes[0] and work.on_jax:
        functions["torch"] = plain
    figures = {}
    for name, function in functions.items():
        try:
            figures[name] = measure(function, tensors, d_output, judge)
        except Exception as reason:  # a baseline may raise anything
            if is_ours(name):
                raise
            figures[name] = (
                f"{type(reason).__name__}: {(str(reason).strip() or '?').splitlines()[0]}"
            )
        torch.cuda.empty_cache()
    if work.on_jax:
        for name, (samples, of) in on_jax.measure(work, tensors, d_output).items():
            error, far = judge.judgement_of_samples(samples)
            wrong = f"wrong by {far:.1%} of the results' size"
            figures[name] = wrong if far > FAR_OFF else Figures(error, **of)
    return figures


def rows(label, work, shape, rates, on_jax):
    """Yields lists of cells, or (name, reason) for an implementation that is not timed."""
    floor = floors(work, shape, *rates)
    figures = measure_all(work, shape, on_jax)
    ours = figures["triton"]
    for name, of in figures.items():
        if isinstance(of, str):
            yield name, of
            print(f"not timed: {label}, {shape}, {name}: {of}", file=sys.stderr, flush=True)
            continue
        cells = [label, "×".join(map(str, shape)), name]
        for passes, least in zip(("forward", "both"), floor, strict=True):
            took = getattr(of, passes)
            by_ours = (
                "" if isinstance(ours, str) else f"{took.median / getattr(ours, passes).median:.2f}"
            )
            cells += [took, f"{took.median / least:.2f}", by_ours]
        cells += [f"{of.wall.median:.3f}", f"{of.peak:.0f}", f"{of.first:.1f}", f"{of.error:.2f}"]
        yield cells


HEADER = ["operation", "B×T×D, B×T×H×K or tokens×D", "by", "forward ms", "× floor", "× ours"]
HEADER += [
    "forward + backward ms",
    "× floor",
    "× ours",
    "wall ms",
    "peak MiB",
    "first call s",
    "error",
]


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("operations", nargs="*")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--no-jax", action="store_true")
    return parser.parse_args()


def main(operations, seconds, no_jax):
    work = {n: w for n, w in WORK.items() if not operations or w.operation in operations}
    unknown = set(operations) - {w.operation for w in work.values()}
    if unknown:
        sys.exit(f"no such operation: {', '.join(sorted(unknown))}")
    end = time.monotonic() + seconds
    print(f"# GPU\n\n{torch.cuda.get_device_name()}, {datetime.date.today().isoformat()}.")
    packages = ("torch", "triton", "jax", "flash-linear-attention", "keras")
    installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    versions = [f"{p} {importlib.metadata.version(p)}" for p in packages if p in installed]
    peers.compile_side_by_side()
    rates = bytes_a_second(), flops_a_second()
    print(f"{', '.join(versions)}.\nA copy in device memory moves {rates[0] / 1e12:.2f} TB/s,")
    print(f"a product of matrices of bfloat16 takes {rates[1] / 1e12:.0f} TFLOP/s.\n")
    on_jax = OnJax(wanted=not no_jax)
    print(line(HEADER))
    print(line(["---"] * 3 + ["---:"] * (len(HEADER) - 3)), flush=True)
    first, too_wrong, later = 0.0, [], []
    for name, of in work.items():
        for shape in of.shapes:
            if time.monotonic() > end:
                later.append(f"{name} {shape}")
                continue
            for row in rows(name, of, shape, rates, on_jax):
                if isinstance(row, tuple):
                    by, reason = row
                    if is_ours(by):
                        too_wrong.append(f"{name} {shape} {by}, {reason}")
                    continue
                print(line(row), flush=True)
                if is_ours(row[2]) and float(row[-1]) > 1:
                    too_wrong.append(" ".join(row[:3]))
                if row[2] == "triton":
                    first += float(row[-2])
    print(f"\nFirst calls of the Triton kernels on torch together: {first:.0f} s.")
    if later:
        print(f"Not begun within {seconds:.0f} s: {', '.join(later)}.")
    if too_wrong:
        sys.exit(f"more wrong than the tests allow: {', '.join(too_wrong)}")


if __name__ == "__main__":
    given = arguments()
    main(given.operations, given.seconds, given.no_jax)
