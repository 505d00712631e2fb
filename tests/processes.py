"""Tests that need a process of their own."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def fresh_process(*command, **environment):
    """The JSON that a fresh process of Python prints last. A variable that is None is not set."""
    environment = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
