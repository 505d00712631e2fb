"""Runs the experiment of a script in this folder: missing results, tables, figure.

    python guides/papers/run.py NAME            # miniature: minutes on two CPU cores
    python guides/papers/run.py NAME --full     # one GPU

A script is a module with:

    SIZES                           {name: (miniature, full)}; each is an argument of this command
    SEEDS                           number of seeds, miniature and full; optional, 3 by default.
                                    None if the runs have no seed
    prepare(size, text)             data of all runs; optional. text: the file of `--text`
    runs(size, results)             yields the keys of all runs, dicts
    measure(key, seeds, size, data) returns a dict of results for each of the seeds
    panels(results, size)           returns a list of `runs.Panel`
"""

import argparse
import collections
import functools
import importlib
import os
import pathlib
import sys
import time

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

# Before KerasHub, whose import of TensorFlow disables the Triton kernels on JAX.
import keras_recurrent  # noqa: F401

# isort: split
from runs import Results, machine


def parse(module, arguments):
    """Returns the parsed arguments and the sizes that they select."""
    about = module.__doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(f"run.py {module.__name__}", description=about)
    parser.add_argument("--full", action="store_true", help="the sizes for one GPU")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds of the runs, such as 0 1 2")
    parser.add_argument(
        "--only", nargs="*", help="runs with one of these models, tasks or variants; none if empty"
    )
    parser.add_argument(
        "--text", type=pathlib.Path, help="a text file; the default depends on the script"
    )
    parser.add_argument(
        "--measure", action="store_true", help="only add results, without tables and figure"
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("build/papers"),
        help="a folder, build/papers by default: runs in its .jsonl are skipped",
    )
    for name, values in module.SIZES.items():
        several = isinstance(values[0], tuple)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(values[0][0] if several else values[0]),
            nargs="+" if several else None,
            help=f"{values[0]}; with --full {values[1]}",
        )
    given = parser.parse_args(arguments)
    size = {name: values[given.full] for name, values in module.SIZES.items()}
    chosen = {name: getattr(given, name) for name in size if getattr(given, name) is not None}
    size |= {k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()}
    numbers = getattr(module, "SEEDS", (3, 3))
    given.seeds = given.seeds or (list(range(numbers[given.full])) if numbers else [None])
    return given, collections.namedtuple("Size", size)(**size)


def main(name, arguments=None):
    module = importlib.import_module(name)
    arguments, size = parse(module, arguments)
    results = Results(arguments.output / f"{name}.jsonl")
    prepare = functools.cache(getattr(module, "prepare", lambda size, text: None))
    known = set()
    for key in module.runs(size, results):
        values = set(map(str, key.values()))
        known |= values
        if arguments.only is not None and not values & set(arguments.only):
            continue
        seeds = results.missing(arguments.seeds, **key)
        data = prepare(size, arguments.text) if seeds else None
        start = time.perf_counter()
        lines = module.measure(key, seeds, size, data) if seeds else ()
        for seed, line in zip(seeds, lines, strict=True):
            seconds = round(time.perf_counter() - start, 1)
            line = {**key, "seed": seed, **line, "seconds_of_all_seeds": seconds}
            results.append(**line, machine=machine())
            print(*(f"{k} {v}" for k, v in results.lines[-1].items()), sep=", ", flush=True)
    if unknown := set(arguments.only or ()) - known:
        raise SystemExit(
            f"No run has {sorted(unknown)}, the value of --only; runs have {sorted(known)}."
        )
    if arguments.measure:
        return
    import matplotlib.figure

    panels = module.panels(results, size)
    figure = matplotlib.figure.Figure((4.5 * len(panels), 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel.draw(axes)
    figure.savefig(arguments.output / f"{name}{'_full' if arguments.full else ''}.png", dpi=120)
    print(*(panel.table() for panel in panels), sep="\n\n")


if __name__ == "__main__":
    folder = pathlib.Path(__file__).parent
    names = sorted(p.stem for p in folder.glob("*.py") if "\ndef panels(" in p.read_text())
    command = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    command.add_argument("name", choices=names, help="`run.py NAME --help` shows its arguments")
    main(command.parse_args(sys.argv[1:2]).name, sys.argv[2:])
