"""Tests and times the Pallas kernels on a TPU, and writes one Markdown file to send back.

    make tpu-report                             # installs, and runs this script
    python -m benchmarks.tpu_report --toy       # on a CPU: tries the script itself

Each step is a process, because a TPU belongs to one process at a time: this one does not import
JAX. The file is written after each step, so it is of use if the run is interrupted.
"""

import argparse
import datetime
import itertools
import os
import pathlib
import shlex
import subprocess
import sys
import threading
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
DEVICES = "-c 'import jax; print(*jax.devices(), jax.devices()[0].device_kind)'"
NIGHTLY = "tests/pallas,tests/ops"
TIMES = "-m benchmarks.operations --backend jax --first"


class Step(NamedTuple):
    """A process of Python and section of the report; it is stopped after `minutes`."""

    title: str
    minutes: float
    arguments: str
    sizes: str = ""  # further arguments
    toy_sizes: str = ""  # further arguments in a trial


STEPS = (
    Step("Devices", 2, DEVICES),
    Step(
        *("Tests", 30, f"-m pytest -q -rfE --tb=short --nightly={NIGHTLY}"),
        *(
            "tests/pallas tests/ops -k pallas",
            "tests/ops/test_kernels.py -k linear_scan-pallas-one",
        ),
    ),
    Step(
        *("Recurrences", 10, f"{TIMES} linear_scan rg_lru --shapes"),
        *("8x2048x1024 8x4096x1024 8x8192x1024", "1x40x8"),
    ),
    Step(
        *("Linear attention", 10, f"{TIMES} gated_linear_attention lightning_attention --shapes"),
        *("1x2048x16x128 8x2048x16x128", "1x40x2x8"),
    ),
    Step("Convolution", 5, f"{TIMES} causal_conv1d --shapes", "8x8192x1024", "1x40x8"),
    Step(
        *("Softmax attention", 5, f"{TIMES} sliding_window_attention --shapes"),
        *("2x4096x10x256", "1x40x2x8"),
    ),
)


def run(step, is_toy):
    """Runs a step and prints its output. Returns its exit status and section of the report."""
    sizes = step.toy_sizes if is_toy else step.sizes
    # With "tpu" in the list, JAX raises an error if it finds no TPU. The tests set flags for XLA on
    # CPUs if XLA_FLAGS is not set.
    device = {"JAX_PLATFORMS": "cpu"} if is_toy else {"JAX_PLATFORMS": "tpu,cpu", "XLA_FLAGS": ""}
    start, lines = time.monotonic(), []
    with subprocess.Popen(
        [sys.executable, *shlex.split(f"{step.arguments} {sizes}")],
        cwd=ROOT,
        env=os.environ | device | {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "2"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        timer = threading.Timer(60 * step.minutes, process.kill)
        timer.start()
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    timer.cancel()
    outcome = f"exit status {process.returncode}, {time.monotonic() - start:.0f} s"
    return process.returncode, f"## {step.title}: {outcome}\n\n{to_markdown(lines)}\n"


def to_markdown(lines):
    """Formats output: tables as they are, other lines as code."""
    blocks = []
    for is_table, block in itertools.groupby(lines, lambda line: line.startswith("| ")):
        if text := "".join(block).strip("\n"):
            blocks.append(text if is_table else f"```\n{text}\n```")
    return "\n\n".join(blocks)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--toy", action="store_true", help="a trial at tiny sizes, on a CPU")
    parser.add_argument("--file", type=pathlib.Path, default=ROOT / "build/tpu_report.md")
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, text=True, capture_output=True).stdout.strip()
    title = (
        "Trial on a CPU, without times of kernels" if arguments.toy else "Pallas kernels on a TPU"
    )
    report = f"# {title}\n\n{datetime.date.today()}, commit {commit or 'unknown'}\n"
    failed = []
    for step in STEPS:
        print(f"\n{step.title}, at most {step.minutes} minutes", flush=True)
        status, section = run(step, arguments.toy)
        report += f"\n{section}"
        failed += [step.title] if status else []
        if failed == ["Devices"]:  # an earlier report stays
            raise SystemExit("JAX finds no TPU: see the error above. --toy tries this on a CPU.")
        arguments.file.write_text(report, encoding="utf-8")
    print(f"\nPlease send back {arguments.file}. Steps that failed: {', '.join(failed) or 'none'}")


if __name__ == "__main__":
    main()
