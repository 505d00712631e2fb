"""Processes of Python for tests that need a new one."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def fresh_process(*command, **environment):
    """Returns the JSON that a process prints last. An environment variable of None is not set."""
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
