"""Planted faults (mutation tests): each is applied to a copy of the tree; its test must fail.

    python -m tests.faults                        # all faults, on all backends
    python -m tests.faults rg_window ...          # selected faults
    KERAS_BACKEND=torch python -m tests.faults    # one backend
    python -m tests.faults --smoke                # run the tests without planting faults

`faults.txt` lists the faults. The tests must first pass on the clean copy. A fault is missed if its
test passes or does not exist, or if it breaks the collection of tests; then the exit status is 1.
"""

import argparse
import multiprocessing
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import pytest

from tests.selection import BACKENDS, ROOT

TABLE = pathlib.Path(__file__).with_name("faults.txt")
TIME_LIMIT = 300  # seconds for one run of pytest
ENVIRONMENT = {
    # Without GPUs, Triton's kernels run in its interpreter on torch, on every machine.
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    # Stale bytecode could survive a fault: modification times are compared in whole seconds.
    "PYTHONDONTWRITEBYTECODE": "1",
}
FORKSERVER = multiprocessing.get_context("forkserver")


class Fault(NamedTuple):
    """A replacement of text in one file, and the node id of its test on each backend."""

    name: str
    path: str
    old: str
    new: str
    tests: dict[str, str]

    def replace(self, source):
        """Returns the source with this fault. Raises ValueError unless `old` occurs once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the text occurs {count} times in {self.path}, not once")
        return source.replace(self.old, self.new)


def read_faults():
    faults = []
    for entry in re.split(r"\n(?=\w)", TABLE.read_text())[1:]:
        head, *lines = entry.rstrip("\n").split("\n")
        old, new = (
            "\n".join(x[4:] for x in lines if x.startswith(sign)) for sign in ("  -", "  +")
        )
        tests = {}
        for line in lines:
            if line[2] not in "-+":
                backends, _, test = line.strip().partition(": ")
                tests |= dict.fromkeys(backends.split(), f"tests/{test}")
        faults.append(Fault(*head.split(": "), old, new, tests))
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="names of faults; default: all")
    parser.add_argument("--smoke", action="store_true", help="run the tests, plant no faults")
    arguments = parser.parse_args()
    faults = read_faults()
    if unknown := set(arguments.names) - {fault.name for fault in faults}:
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}")
    if "KERAS_BACKEND" not in os.environ:
        command = [sys.executable, "-m", "tests.faults", *sys.argv[1:]]
        runs = [{**os.environ, "KERAS_BACKEND": backend} for backend in BACKENDS]
        children = [subprocess.Popen(command, env=environment) for environment in runs]
        sys.exit(max(child.wait() for child in children))
    os.environ.update(ENVIRONMENT)
    backend = os.environ["KERAS_BACKEND"]
    faults = [fault for fault in faults if backend in fault.tests]
    faults = [fault for fault in faults if fault.name in arguments.names or not arguments.names]
    nodes = list(dict.fromkeys(fault.tests[backend] for fault in faults))
    if arguments.smoke:
        sys.exit(subprocess.run([sys.executable, "-m", "pytest", "-q", *nodes]).returncode)
    if faults:
        sys.exit(plant(faults, nodes, backend))
    print(f"{backend}: these faults have no test")


def plant(faults, nodes, backend):
    """Plant the faults one at a time, and report which are caught. Returns 1 if one is missed."""
    if backend == "torch":  # whose tests are quick: imports dominate the time
        os.environ["TRITON_INTERPRET"] = "1"
        FORKSERVER.set_forkserver_preload(["keras_hub"])
    num_missed = 0
    with tempfile.TemporaryDirectory() as directory:
        tree = pathlib.Path(directory, "tree")
        copy_tree(tree)
        code, output = run_pytest(tree, nodes)
        if code:
            print(output, f"{backend}: the tests do not pass without faults", sep="\n")
            return 1
        for fault in faults:
            begin = time.monotonic()
            source = (tree / fault.path).read_text()
            (tree / fault.path).write_text(fault.replace(source))
            code, output = run_pytest(tree, [fault.tests[backend]])
            (tree / fault.path).write_text(source)
            is_caught = code == pytest.ExitCode.TESTS_FAILED
            num_missed += not is_caught
            result = "caught" if is_caught else f"pytest exited with {code}: missed"
            print(result, f"{fault.name} ({backend}) {time.monotonic() - begin:.1f} s", flush=True)
            print("" if is_caught else output, end="", flush=True)
    print(f"{backend}: {len(faults) - num_missed} caught, {num_missed} missed")
    return int(num_missed > 0)


def copy_tree(tree):
    """Copy the files that git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in files.strip("\0").split("\0"):
        if os.path.lexists(ROOT / name):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)


def run_pytest(tree, nodes):
    """Run tests of a tree in a child process. Returns the exit code and the output."""
    # Inductor's cache key ignores operator code; JAX's includes the program.
    shutil.rmtree(tree / ".pytest_cache" / "torchinductor", ignore_errors=True)
    log = tree.with_name("log")
    child = FORKSERVER.Process(target=_run_in_this_process, args=(tree, nodes, log))
    child.start()
    child.join(TIME_LIMIT)
    child.kill()
    child.join()
    return child.exitcode, log.read_text()


def _run_in_this_process(tree, nodes, log):
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    code = pytest.main(["-q", "--tb=short", "-p", "no:cacheprovider", *nodes])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads


if __name__ == "__main__":
    main()
