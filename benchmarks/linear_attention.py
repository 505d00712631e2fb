"""Measures linear attention on a CPU.

    python benchmarks/linear_attention.py

Compares gated linear attention and lightning attention with a loop over tokens on the same backend,
and times them by sequence length; runs each backend in a separate process and prints Markdown. It
takes 15 minutes on an otherwise idle machine.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.cpu import BACKENDS, machine, run, table

TARGETS = {  # minimum speedup over the loop, by batch, tokens, heads, K = V
    "jax": {
        "gated": {(4, 2048, 4, 64): 5, (1, 2048, 4, 64): 8, (1, 2048, 4, 128): 15},
        "lightning": {(4, 2048, 4, 64): 5, (1, 2048, 4, 64): 5, (1, 2048, 4, 128): 10},
    },
}
TARGET = 10  # elsewhere


def against_loops(results):
    rows = []
    for backend, result in results.items():
        for row in result["ratios"]:
            shape = tuple(row["shape"])
            target = TARGETS.get(backend, {}).get(row["operation"], {}).get(shape, TARGET)
            rows.append(
                [
                    backend + row["mode"],
                    row["operation"],
                    "×".join(map(str, shape)),
                    f"{1000 * row['ours']:.1f}",
                    f"{1000 * row['loop']:.0f}",
                    f"{row['loop'] / row['ours']:.1f}× (target {target}×)",
                ]
            )
    return "\n".join(
        [
            "## Against a loop over tokens\n",
            "Forward and backward, float32, median, milliseconds; the sizes are batch × tokens × "
            "heads × K, and V = K.\nBoth are compiled alike: `jax.jit`, `tf.function` (with XLA "
            "where it says so), nothing on torch.\n",
            table(["backend", "operation", "B×T×H×K", "ours", "loop", "ratio"], rows),
        ]
    )


def lengths_table(results):
    rows = [
        [
            backend,
            row["operation"],
            row["length"],
            f"{1000 * row['seconds']:.1f}",
            f"{1e6 * row['seconds'] / row['length']:.2f}",
            f"{row['bytes'] / 2**20:.0f}",
            f"{row['bytes'] / 2**10 / row['length']:.1f}",
        ]
        for backend, result in results.items()
        for row in result["lengths"]
    ]
    header = ["backend", "operation", "T", "ms", "µs a token", "peak MiB", "KiB a token"]
    return "\n".join(
        [
            "## As the sequence grows, 1×T×4×64\n",
            "Forward and backward, float32, with XLA on TensorFlow. Peak memory of the process "
            "above what it held before,\nthe arguments and their gradients included: 8 KiB a "
            "token (gated) or 6 already.\n",
            table(header, rows),
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    backends = parser.parse_args().backends
    print(f"# Linear attention on a CPU\n\n{machine()}\n", flush=True)
    results = {backend: run("linear_attention_times", backend) for backend in backends}
    print(against_loops(results), lengths_table(results), sep="\n\n")


if __name__ == "__main__":
    main()
