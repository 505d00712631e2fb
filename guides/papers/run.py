"""Runs the experiment of a script in this folder: missing results, tables, figure.

    python guides/papers/run.py NAME            # miniature: minutes on two CPU cores
    python guides/papers/run.py NAME --full     # one GPU

A script is a module with:

    SIZES                           {name: (miniature, full)}; each is an argument of this command
    SEEDS                           number of seeds, miniature and full; None: three
    prepare(size, text)             data of all runs; optional. text: the file of `--text`
    runs(size, results)             yields the keys of all runs, dicts
    measure(key, seeds, size, data) returns a dict of results for each of the seeds
    tables(results, size)           formats Markdown tables
    draw(figure, results, size)     draws; the figure has 4 inches per panel
"""

import argparse
import functools
import importlib
import os
import pathlib
import time
import types

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

# Before KerasHub, whose import of TensorFlow disables the Triton kernels on JAX.
import keras_recurrent  # noqa: F401

# isort: split
from runs import Results, machine


def parse(module, arguments):
    """Returns the parsed arguments and the sizes that they select."""
    parser = argparse.ArgumentParser(description=module.__doc__.partition("\n")[0])
    parser.add_argument("--full", action="store_true", help="the sizes for one GPU")
    parser.add_argument("--seeds", type=int, nargs="+", help="0 1 2; other numbers, other seeds")
    parser.add_argument(
        "--only", nargs="+", help="runs with one of these models, tasks or variants"
    )
    parser.add_argument("--text", type=pathlib.Path, help="a file; else Python's documentation")
    parser.add_argument("--measure", action="store_true", help="without tables and figure")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("build/papers"),
        help="a folder, build/papers: runs already in its .jsonl are skipped",
    )
    for name, values in module.SIZES.items():
        small, large = map(_shown, values)
        several = isinstance(values[0], tuple)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(values[0][0] if several else values[0]),
            nargs="+" if several else None,
            help=small if small == large else f"{small}; with --full {large}",
        )
    given = parser.parse_args(arguments)
    size = {name: values[given.full] for name, values in module.SIZES.items()}
    size |= {name: value for name in size if (value := getattr(given, name)) is not None}
    given.seeds = given.seeds or list(range(getattr(module, "SEEDS", (3, 3))[given.full]))
    return given, Size(**size)


class Size(types.SimpleNamespace):
    """The sizes of an experiment as attributes."""

    __hash__ = object.__hash__


def _shown(value):
    """Formats a default as a command-line argument."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def main(name, arguments=None):
    module = importlib.import_module(name)
    arguments, size = parse(module, arguments)
    results = Results(arguments.output / f"{name}.jsonl")
    prepare = functools.cache(getattr(module, "prepare", lambda size, text: None))
    for key in module.runs(size, results):
        if arguments.only and not set(arguments.only) & set(map(str, key.values())):
            continue
        seeds = results.missing(arguments.seeds, **key)
        data = prepare(size, arguments.text) if seeds else None
        start = time.perf_counter()
        lines = module.measure(key, seeds, size, data) if seeds else ()
        seconds = round(time.perf_counter() - start, 1)
        for seed, line in zip(seeds, lines, strict=True):
            common = {"seconds_of_all_seeds": seconds, "machine": machine()}
            results.append(**key, seed=seed, **line, **common)
            print(*(f"{k} {v}" for k, v in results.lines[-1].items()), sep=", ", flush=True)
    if arguments.measure:
        return
    import matplotlib.figure

    figure = matplotlib.figure.Figure(layout="constrained")
    module.draw(figure, results, size)
    figure.set_size_inches(4.5 * len(figure.axes), 4)
    figure.savefig(arguments.output / f"{name}{'_full' if arguments.full else ''}.png", dpi=120)
    print(module.tables(results, size))


if __name__ == "__main__":
    command = argparse.ArgumentParser(description=__doc__.partition("\n")[0], add_help=False)
    command.add_argument("name", help="a script of this folder, without .py")
    named, others = command.parse_known_args()
    main(named.name, others)
