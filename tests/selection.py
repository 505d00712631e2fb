"""Selects the tests that CI runs for a change, and prints arguments for `make`.

The change is the difference from the commit in `CI_BASE`, or from the merge base with
`origin/main`. If neither commit is known, or nothing differs, the full suite runs: the tests of all
backends without nightly ones, all export formats and lm-evaluation-harness. `impact.toml` maps
changed files to tests.

`python3 tests/selection.py --unselected` reads the failures of the last `make test-nightly`, and
exits with 1 if the table would not have selected one of them for the changes since `CI_BASE`, the
last commit that passed the nightly run. Add the missing row to `impact.toml`.
"""

import fnmatch
import json
import os
import pathlib
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = pathlib.Path(__file__).with_name("impact.toml")
BACKENDS = ("jax", "torch", "tensorflow")
ALWAYS = ["lint"], ["docs"]  # targets that run before and after the tests
TARGETS = [*(f"test-export-{backend}" for backend in BACKENDS), "test-harness"]


class Selection:
    """Test paths and nightly test paths of each backend, and further targets of the Makefile."""

    def __init__(self):
        self.tests = {backend: set() for backend in BACKENDS}
        self.nightly = {backend: set() for backend in BACKENDS}
        self.targets = set()

    def add(self, row):
        for backend in BACKENDS:
            self.tests[backend].update(row.get(backend, ()), row.get("all", ()))
            self.nightly[backend].update(row.get("nightly", {}).get(backend, ()))
        for target in row.get("make", ()):
            self.targets.update(target_names(target))
        if row.get("everything"):
            self.add_everything()

    def add_everything(self):
        self.targets.update(TARGETS)
        for paths in self.tests.values():
            paths.add("tests")

    def make_arguments(self):
        """Targets and variables for `make`, in execution order."""
        arguments = list(ALWAYS[0])
        for backend in BACKENDS:
            tests = self.tests[backend] | self.nightly[backend]
            if tests:
                arguments.append(f"test-{backend}")
                arguments.append(f"TESTS_{backend}={' '.join(outermost(tests))}")
                arguments.append(f"NIGHTLY_{backend}={','.join(outermost(self.nightly[backend]))}")
        return arguments + [t for t in TARGETS if t in self.targets] + ALWAYS[1]

    def selects(self, backend, test, nightly):
        paths = self.nightly[backend] if nightly else self.tests[backend] | self.nightly[backend]
        return any(is_inside(test, path) for path in paths)


def target_names(target):
    return [f"{target}-{b}" for b in BACKENDS] if target == "test-export" else [target]


def is_inside(path, folder):
    return path == folder or path.startswith(f"{folder}/")


def is_test(file):
    """True for a test file that exists and that make can name: without a space or a comma."""
    name = file.rpartition("/")[2]
    is_test = file.startswith("tests/") and name.startswith("test_") and name.endswith(".py")
    return is_test and not {" ", ","} & {*file} and (ROOT / file).exists()


def outermost(paths):
    """Paths not contained in any other path, sorted."""
    return [p for p in sorted(paths) if not any(p != q and is_inside(p, q) for q in paths)]


def changed_files(base):
    """Files that differ between `base` and the working tree; None where `base` is not known."""

    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else None

    base = git("merge-base", base or "origin/main", "HEAD")
    if base is None:
        return None
    changed = git("diff", "--name-only", "--no-renames", "-z", base.strip())
    untracked = git("ls-files", "--others", "--exclude-standard", "-z")
    return sorted({*changed.split("\0"), *untracked.split("\0")} - {""})


def select(files):
    """Selects tests for changed files; the full suite if `files` is None or empty."""
    rows = tomllib.loads(TABLE.read_text())["impact"]
    selection = Selection()
    for file in files or ():
        matching = [row for row in rows if any(fnmatch.fnmatch(file, f) for f in row["files"])]
        for row in matching:
            selection.add(row)
        if is_test(file):
            selection.add({"all": [file], "nightly": {backend: [file] for backend in BACKENDS}})
        elif all(row.get("also") for row in matching):
            selection.add_everything()
    if not files:
        selection.add_everything()
    return selection


def unselected_failures(files):
    """Failures of the nightly run, as `backend: test`, that these files do not select."""
    selection, found = select(files), []
    for backend in BACKENDS:
        failed = ROOT / ".pytest_cache" / f"failed_{backend}.json"
        for test, nightly in json.loads(failed.read_text()).items() if failed.exists() else ():
            if not selection.selects(backend, test.partition("::")[0], nightly):
                found.append(f"{backend}: {test}")
    return found


def main(arguments):
    files = changed_files(os.environ.get("CI_BASE"))
    if arguments == ["--unselected"] and files is None:
        print("The commit of CI_BASE is not known: nothing to compare with.")
        return 0
    if arguments == ["--unselected"]:
        tests = unselected_failures(files)
        for test in tests:
            print(f"failing, but not selected by tests/impact.toml: {test}")
        return bool(tests)
    if arguments:
        raise SystemExit("usage: selection.py [--unselected]")
    targets = select(files).make_arguments()
    print(f"{len(files or ())} changed files: make {' '.join(targets)}", file=sys.stderr)
    print(*targets, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
