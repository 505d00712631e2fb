"""Measures layers on a CPU.

    python benchmarks/cpu.py

Compares training steps of recurrent layers with GRU and LSTM, and times `linear_scan` by sequence
length; runs each backend in a separate process and prints Markdown. It takes ten minutes on an
otherwise idle machine.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
BACKENDS = ("jax", "tensorflow", "torch")
# Minimum speedup over GRU, by shape.
TARGETS = {"jax": (1.7, 3), "tensorflow": (2, 10), "torch": (5, 30)}


def run(module, backend):
    print(f"benchmarks.{module} on {backend} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}"],
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": backend},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def table(header, rows):
    line = "| {} |".format
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(line(" | ".join(map(str, cells))) for cells in lines)


def machine():
    processor = platform.processor()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [row for row in cpuinfo.read_text().splitlines() if row.startswith("model name")]
        processor = names[0].partition(": ")[2] if names else processor
    packages = ("keras", "jax", "tensorflow", "torch", "keras-recurrent")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    today = datetime.date.today().isoformat()
    return f"{processor}, {os.cpu_count()} cores, {platform.system()}, {today}.\n{versions}."


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def training_steps(backends):
    results = {backend: run("training_step", backend) for backend in backends}
    rate = max(result["rate"] for result in results.values())
    rows = []
    for backend, result in results.items():
        for row, target in zip(result["rows"], TARGETS[backend], strict=True):
            ours, gru, lstm = row["RecurrentBlock"], row["GRU"], row["LSTM"]
            times = (row["operations"] / rate, ours, gru, lstm)
            rows.append(
                [
                    backend,
                    "×".join(map(str, row["shape"])),
                    *(f"{1000 * seconds:.1f}" for seconds in times),
                    f"{gru / ours:.1f}× (target {target}×)",
                    f"{lstm / ours:.1f}×",
                ]
            )
    return "\n".join(
        [
            "## A training step\n",
            "Forward, backward and update of a model of one layer, by `train_on_batch` after a "
            "plain `compile`:\n`jax.jit` on JAX, `tf.function` without XLA on TensorFlow, nothing "
            "compiled on torch. float32, median,\nmilliseconds. The floor is the matrix products "
            f"of the block alone, at this machine's {rate / 1e9:.0f} GFLOP/s\n(a 1024³ product "
            "in NumPy).\n",
            table(
                ["backend", "B×T×D", "floor", "RecurrentBlock(256)", "GRU(256)", "LSTM(256)"]
                + ["against GRU", "against LSTM"],
                rows,
            ),
        ]
    )


def small_training_steps(backends):
    names = ("RecurrentBlock", "RGLRU", "HGRN2", "GRU", "LSTM")
    rows = []
    for backend in backends:
        for row in run("small_training_step", backend)["rows"]:
            times = [f"{1000 * row[name]:.1f}" for name in names]
            ratios = [f"{row[name] / row['GRU']:.2f}" for name in names[:3]]
            rows.append([backend, row["length"], *times, *ratios])
    header = ["backend", "T", *names, *(f"{name} / GRU" for name in names[:3])]
    return "\n".join(
        [
            "## A training step of small layers by sequence length\n",
            "16×T×32, `RecurrentBlock(32)`, `RGLRU()`, `HGRN2(expand_ratio=8)`, `GRU(32)` and\n"
            "`LSTM(32)`; median, milliseconds.\n",
            table(header, rows),
        ]
    )


def scans(backends):
    results = [run("scan_scaling", backend) for backend in backends]
    rows = [
        [
            row["backend"],
            row["length"],
            f"{1000 * row['seconds']:.1f}",
            f"{1e6 * row['seconds'] / row['length']:.2f}",
            f"{row['bytes'] / 2**20:.0f}",
            f"{row['bytes'] / 2**10 / row['length']:.1f}",
        ]
        for result in results
        for row in result["rows"]
    ]
    shape = "×".join(map(str, results[0]["shape"]))
    return "\n".join(
        [
            f"## linear_scan, forward and backward, {shape}, float32\n",
            "Peak memory of the process above what it held before, the arguments and their "
            "gradients included:\nfour tensors of 4 KiB a token already.\n",
            table(["backend", "T", "ms", "µs a token", "peak MiB", "KiB a token"], rows),
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    backends = parser.parse_args().backends
    print(f"# CPU\n\n{machine()}\n")
    print(training_steps(backends), end="\n\n", flush=True)
    print(small_training_steps(backends), end="\n\n", flush=True)
    print(scans(backends))


if __name__ == "__main__":
    main()
