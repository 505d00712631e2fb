"""The guide to uptraining at a tiny size."""

import importlib
import pathlib
import re
import sys

import pytest

GUIDES = pathlib.Path(__file__).parents[2] / "guides"


@pytest.mark.once
def test_guide_prints_losses_and_memory_and_plots_the_loss(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(GUIDES)  # the guide imports another guide
    guide = importlib.import_module("gqa_uptraining")
    monkeypatch.setattr(guide, "VALIDATION_ROWS", 32)
    sizes = {"seeds": 1, "steps": 8, "width": 16, "layers": 1, "topics": 4, "groups": 2}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    monkeypatch.setattr(sys, "argv", ["gqa_uptraining", *arguments, "--output", str(tmp_path)])
    guide.main()
    output = capsys.readouterr().out
    rows = re.findall(r"\| 2 \| (\w+) \| [\d.]+ ± 0.000 \| [\d.]+ ± 0.000 \|", output)
    assert rows == ["mean", "first", "random"]
    assert "| key-value bytes a token | 2,048 | 512 | 0.250 |" in output
    assert (tmp_path / "loss.png").stat().st_size > 0
