"""Selects the tests that CI runs for a change, and prints arguments for `make`.

The change is the difference from the commit in `CI_BASE`, or from the merge base with
`origin/main`. If neither commit is known, or nothing differs, the full suite runs: the tests of all
backends without nightly ones, all export formats and lm-evaluation-harness. `impact.toml` maps
changed files to tests. `python3 tests/selection.py FILES` prints the selection for other files.
"""

import fnmatch
import os
import pathlib
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = pathlib.Path(__file__).with_name("impact.toml")
BACKENDS = ("jax", "torch", "tensorflow")
EXPORTS = [f"test-export-{backend}" for backend in BACKENDS]
EVERYTHING = {"all": ["tests"], "make": [*EXPORTS, "test-harness"]}


def select(files):
    """Arguments for `make`, in execution order; the full suite if `files` is None or empty."""
    rows = matching_rows(files) if files else [EVERYTHING]
    rows += [EVERYTHING for row in rows if row.get("everything")]
    arguments = ["lint"]
    for backend in BACKENDS:
        nightly = union(row.get("nightly", {}).get(backend, ()) for row in rows)
        tests = union((*row.get("all", ()), *row.get(backend, ())) for row in rows)
        if tests or nightly:
            arguments.append(f"test-{backend}")
            arguments.append(f"TESTS_{backend}={' '.join(outermost(tests | nightly))}")
            arguments.append(f"NIGHTLY_{backend}={','.join(outermost(nightly))}")
    targets = union(row.get("make", ()) for row in rows)
    return [*arguments, *(name for name in EVERYTHING["make"] if name in targets), "docs"]


def matching_rows(files):
    """Rows of the table that match changed files, and one of each changed test."""
    table, rows = tomllib.loads(TABLE.read_text()), []
    for file in files:
        matching = [
            row
            for names, row in table.items()
            if any(fnmatch.fnmatch(file, n) for n in names.split())
        ]
        rows += matching
        if is_test(file):
            rows.append({"all": [file], "nightly": {key: [file] for key in BACKENDS}})
        elif all(row.get("also") for row in matching):
            rows.append(EVERYTHING)
    return rows


def is_test(file):
    """True for a test file that exists and that make can name: without a space or a comma."""
    is_test = fnmatch.fnmatch(file, "tests/*") and pathlib.Path(file).match("test_*.py")
    return is_test and not {" ", ","} & {*file} and (ROOT / file).exists()


def union(sets):
    return set().union(*sets)


def outermost(paths):
    """Paths not contained in any other path, sorted."""
    return [p for p in sorted(paths) if not any(p.startswith(f"{q}/") for q in paths)]


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


if __name__ == "__main__":
    changed = sys.argv[1:] or changed_files(os.environ.get("CI_BASE"))
    targets = select(changed)
    print(f"{len(changed or ())} changed files: make {' '.join(targets)}", file=sys.stderr)
    print(*targets, sep="\n")
