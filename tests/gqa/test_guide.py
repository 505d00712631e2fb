"""The guide runs, at a tiny size."""

import importlib
import pathlib
import re
import sys

import pytest

GUIDES = pathlib.Path(__file__).parents[2] / "guides"


@pytest.mark.once
def test_guide(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(GUIDES)  # it reads the text as another guide does
    guide = importlib.import_module("gqa_uptraining")
    monkeypatch.setattr(guide, "VALIDATION_ROWS", 32)
    sizes = {"seeds": 1, "steps": 8, "width": 16, "layers": 1, "topics": 4, "groups": 2}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    monkeypatch.setattr(sys, "argv", ["gqa_uptraining", *arguments, "--output", str(tmp_path)])
    guide.main()
    written = capsys.readouterr().out
    rows = re.findall(r"\| 2 \| (\w+) \| [\d.]+ ± 0.000 \| [\d.]+ ± 0.000 \|", written)
    assert rows == ["mean", "first", "random"]
    assert "| key-value bytes a token | 2,048 | 512 | 0.250 |" in written
    assert (tmp_path / "loss.png").stat().st_size > 0
