"""Runs scripts of this folder on one or two checkouts in turns; prints medians and their ratio.

Arguments: works, each of them a backend, a script of this folder and its arguments. Scripts are
those of this checkout, and the package is that of a tree. In each turn, every work is measured once
on every tree. All processes compile in parallel; then one after the other is measured.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
ORIGIN = "import importlib.util as u; print(u.find_spec('keras_recurrent').origin)"


def answer_turns(measure):
    """Prints a measurement, a dictionary, for each line of the standard input."""
    print("{}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


def link_tree(tree):
    """Returns a new folder with links to a checkout and to the scripts of this one."""
    folder = pathlib.Path(tempfile.mkdtemp()).resolve()
    for path in pathlib.Path(tree).resolve().iterdir():
        is_script = path.name in ("benchmarks", "guides")
        (folder / path.name).symlink_to(ROOT / path.name if is_script else path)
    origin = subprocess.check_output([sys.executable, "-c", ORIGIN], cwd=folder, text=True)
    if not origin.startswith(f"{folder}/"):
        raise SystemExit(f"{tree} has no package: {origin.strip()} would be measured.")
    return folder


def start(folder, work, *options):
    """Starts the process of a work in a linked tree; its log is in the same folder."""
    backend, script, *arguments = work.split()
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments, *options]
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, "KERAS_BACKEND": backend}
    pipes: dict = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (folder / f"{work}.log".replace(" ", "-")).open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stderr=log, **pipes)


def read(process):
    """Returns the next dictionary that a process prints, or None if it has ended."""
    line = next((line for line in process.stdout if line.startswith("{")), None)
    if line is None:
        print(f"{process.args} failed", file=sys.stderr, flush=True)
    return line and json.loads(line)


def measurements(arguments):
    """Yields `{"work", "tree", values}`, turn by turn."""
    folders = {tree: link_tree(tree) for tree in arguments.trees}
    print("Logs are in", *folders.values(), file=sys.stderr, flush=True)
    pairs = [(work, tree) for work in arguments.works for tree in folders]
    processes = {}
    if not arguments.fresh:
        processes = {pair: start(folders[pair[1]], pair[0], "--turns") for pair in pairs}
        pairs = [pair for pair in pairs if read(processes[pair]) is not None]
    for _ in range(arguments.runs):
        for work, tree in pairs:
            process = start(folders[tree], work) if arguments.fresh else processes[work, tree]
            with contextlib.suppress(BrokenPipeError):
                print(file=process.stdin, flush=True)
            if (values := read(process)) is not None:
                yield {"work": work, "tree": tree, **values}
            if arguments.fresh:
                process.communicate()
    for process in processes.values():
        process.communicate()


def print_table(lines, trees):
    """Prints the median of each tree, and the ratio of the last tree to the first."""
    found: dict = collections.defaultdict(lambda: {tree: [] for tree in trees})
    for line in lines:
        for name, value in line.items():
            if isinstance(value, int | float):
                found[line["work"], name][line["tree"]].append(value)
    print("| work | measured |", *(f"{tree} |" for tree in trees), "ratio |")
    print("| --- | --- |", "---: |" * (len(trees) + 1))
    for names, values in found.items():
        medians = [statistics.median(v) if v else float("nan") for v in values.values()]
        numbers = (f"{number:.4g} |" for number in (*medians, medians[-1] / medians[0]))
        print("|", " | ".join(names), "|", *numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("works", nargs="+", metavar='"BACKEND SCRIPT ARGUMENTS"')
    parser.add_argument("--trees", nargs="+", default=["."], help="checkouts, the older one first")
    parser.add_argument("--runs", type=int, default=5, help="number of turns")
    parser.add_argument("--fresh", action="store_true", help="a new process for each measurement")
    parser.add_argument("--results", metavar="FILE", help="append to it, and print all its results")
    arguments = parser.parse_args()
    results = pathlib.Path(arguments.results or tempfile.mkstemp(".jsonl")[1])
    for line in measurements(arguments):
        with results.open("a") as file:
            print(json.dumps(line), file=file)
    print_table(map(json.loads, results.read_text().splitlines()), arguments.trees)


if __name__ == "__main__":
    main()
