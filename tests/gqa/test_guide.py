"""The guide runs, at a tiny size."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.once
def test_guide(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = {"seeds": 1, "steps": 10, "width": 16, "layers": 1, "topics": 4, "groups": 2}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    done = subprocess.run(
        [sys.executable, ROOT / "guides/gqa_uptraining.py", *arguments, "--output", tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"\| 2 \| (\w+) \| [\d.]+ ± 0.000 \| [\d.]+ ± 0.000 \|", done.stdout)
    assert rows == ["mean", "first", "random"]
    assert "| key-value bytes a token | 2,048 | 512 | 0.250 |" in done.stdout
    assert (tmp_path / "loss.png").stat().st_size > 0
