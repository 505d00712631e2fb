"""Which tests CI runs for a change: `python3 tests/selection.py` prints the words for `make`.

The change is what differs from the commit that the variable `CI_BASE` names, or else from where
this branch left `origin/main`. Where neither is known, or nothing differs, everything runs.
`impact.toml` says what a changed file may break.

`python3 tests/selection.py --lost` reads the failures of the last `make test-nightly` from pytest's
cache, and fails if the table would have left out one of them since `CI_BASE`, the last commit that
passed every night's tests: a row is missing there.
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
ALWAYS = ["lint"], ["docs"]  # before and after the tests
GOALS = [*(f"test-export-{backend}" for backend in BACKENDS), "test-harness"]


class Selection:
    """Test paths and nightly test paths of each backend, and goals of the Makefile."""

    def __init__(self):
        self.tests = {backend: set() for backend in BACKENDS}
        self.nightly = {backend: set() for backend in BACKENDS}
        self.goals = set()

    def add(self, row):
        for backend in BACKENDS:
            self.tests[backend].update(row.get(backend, ()), row.get("all", ()))
            self.nightly[backend].update(row.get("nightly", {}).get(backend, ()))
        for goal in row.get("make", ()):
            self.goals.update(goal_names(goal))
        if row.get("everything"):
            self.add_everything()

    def add_everything(self):
        self.goals.update(GOALS)
        for paths in self.tests.values():
            paths.add("tests")

    def words(self):
        """Goals and variables for `make`, in the order in which they run."""
        words = list(ALWAYS[0])
        for backend in BACKENDS:
            tests = self.tests[backend] | self.nightly[backend]
            if tests:
                words.append(f"test-{backend}")
                words.append(f"TESTS_{backend}={' '.join(outermost(tests))}")
                words.append(f"NIGHTLY_{backend}={','.join(outermost(self.nightly[backend]))}")
        return words + [goal for goal in GOALS if goal in self.goals] + ALWAYS[1]

    def has(self, backend, test, nightly):
        paths = self.nightly[backend] if nightly else self.tests[backend] | self.nightly[backend]
        return any(is_inside(test, path) for path in paths)


def goal_names(goal):
    return [f"{goal}-{backend}" for backend in BACKENDS] if goal == "test-export" else [goal]


def is_inside(path, folder):
    return path == folder or path.startswith(f"{folder}/")


def outermost(paths):
    """The paths that are not inside others of them, sorted."""
    return [p for p in sorted(paths) if not any(p != q and is_inside(p, q) for q in paths)]


def changed_files(base):
    """Files that differ between `base` and the working tree; None where `base` is not known."""

    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    base = git("merge-base", base or "origin/main", "HEAD")
    if base is None:
        return None
    changed = git("diff", "--name-only", "--no-renames", base)
    untracked = git("ls-files", "--others", "--exclude-standard")
    return sorted({*changed.splitlines(), *untracked.splitlines()})


def select(files):
    """The selection for changed files; everything where they are not known, or there are none."""
    rows = tomllib.loads(TABLE.read_text())["impact"]
    selection = Selection()
    for file in files or ():
        matching = [row for row in rows if any(fnmatch.fnmatch(file, f) for f in row["files"])]
        for row in matching:
            selection.add(row)
        if fnmatch.fnmatch(file, "tests/*test_*.py") and (ROOT / file).exists():
            selection.add({"all": [file], "nightly": {backend: [file] for backend in BACKENDS}})
        elif not matching:
            selection.add_everything()
    if not files:
        selection.add_everything()
    return selection


def lost(files):
    """Failures of the nightly run, as `backend: test`, that these files do not select."""
    selection, found = select(files), []
    for backend in BACKENDS:
        failed = ROOT / ".pytest_cache" / f"failed_{backend}.json"
        for test, nightly in json.loads(failed.read_text()).items() if failed.exists() else ():
            if not selection.has(backend, test.partition("::")[0], nightly):
                found.append(f"{backend}: {test}")
    return found


def main(arguments):
    files = changed_files(os.environ.get("CI_BASE"))
    if arguments == ["--lost"]:
        tests = lost(files)
        for test in tests:
            print(f"tests/impact.toml would have left out a test that fails: {test}")
        return bool(tests)
    if arguments:
        raise SystemExit(f"usage: {__doc__}")
    words = select(files).words()
    print(f"{len(files or ())} changed files: make {' '.join(words)}", file=sys.stderr)
    print(*words, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
