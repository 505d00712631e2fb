"""Measures TransNormerLLM on a CPU.

    python benchmarks/transnormer.py

The training speed of TransNormerLLM by sequence length, and its attention compared with
`keras.layers.MultiHeadAttention`; runs each backend in a separate process and prints Markdown. It
takes 20 minutes and 10 GiB of memory on an otherwise idle machine.
"""

import argparse
import itertools
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.cpu import BACKENDS, machine, run, table

TOKENS = 16_384
FLAT = 0.15  # maximum difference between the fastest and the slowest length


def step_table(results):
    rows = []
    for backend, result in results.items():
        speeds = [TOKENS / seconds for _, seconds in result["steps"]]
        slowest = 1 - min(speeds) / max(speeds)
        rows.append(
            [backend, *(f"{speed:,.0f}" for speed in speeds), f"{slowest:.0%} (target {FLAT:.0%})"]
        )
    lengths = [f"{length:,}" for length, _ in next(iter(results.values()))["steps"]]
    return "\n".join(
        [
            "## Tokens a second of a training step, by tokens a row\n",
            f"TransNormerLLM with two blocks of width 256, {TOKENS:,} tokens a step, float32: "
            "forward, backward and update by\n`train_on_batch` after a plain `compile`; median. "
            "The last column is how far the slowest is below the fastest.\n",
            table(["backend", *lengths, "spread"], rows),
        ]
    )


def layer_table(results):
    rows, crossings = [], []
    for backend, result in results.items():
        for row in result["layers"]:
            ours, theirs = row["lightning"], row["softmax"]
            rows.append(
                [
                    backend,
                    f"{row['length']:,}",
                    f"{1000 * ours:.0f}",
                    f"{1000 * theirs:.0f}",
                    f"{theirs / ours:.2f}×",
                ]
            )
        crossings.append(f"{backend}: {crossing(result['layers'])}.")
    return "\n".join(
        [
            "## Lightning Attention compared with softmax attention\n",
            "A training step of one layer of width 256 with two heads, "
            f"{TOKENS:,} tokens, beside a causal\n`keras.layers.MultiHeadAttention` of the same "
            "width, float32; they take turns, median, milliseconds.\nThe length from which "
            "Lightning Attention is faster: " + " ".join(crossings) + "\n",
            table(["backend", "tokens a row", "lightning", "softmax", "ratio"], rows),
        ]
    )


def crossing(rows):
    """Returns the length at which the ratio of times passes 1, interpolated logarithmically."""
    points = [(row["length"], math.log(row["softmax"] / row["lightning"])) for row in rows]
    if points[0][1] > 0:
        return f"{points[0][0]:,} and below"
    for (before, low), (after, high) in itertools.pairwise(points):
        if high > 0:
            return f"about {before * (after / before) ** (low / (low - high)):,.0f}"
    return f"above {points[-1][0]:,}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    backends = parser.parse_args().backends
    print(f"# TransNormerLLM on the CPU\n\n{machine()}\n", flush=True)
    results = {backend: run("transnormer_times", backend) for backend in backends}
    print(step_table(results), end="\n\n")
    print(layer_table(results))


if __name__ == "__main__":
    main()
