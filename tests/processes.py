"""Processes of Python for tests that need a new one."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def run_python(*command, cwd=ROOT, **environment):
    """Returns the completed process. An environment variable of None is not set."""
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=900,
    )


def printed(*command, **options):
    """Returns what a process prints that must succeed."""
    done = run_python(*command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fresh_process(*command, **environment):
    """Returns the JSON that a process prints last."""
    return json.loads(printed(*command, **environment).splitlines()[-1])
