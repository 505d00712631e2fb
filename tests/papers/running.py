"""Guides of papers are run as from a shell, at toy size."""

import json
import sys

from tests.processes import ROOT

PAPERS = ROOT / "guides/papers"
TOY = {
    "--width": [16],
    "--lru-width": [16],
    "--num-layers": [3],
    "--lengths": [8, 16],
    "--tokens": [32],
    "--steps": [3],
    "--longest": [64],
    "--windows": [16],
}


def words_of(toy):
    return [word for name, values in toy.items() for word in (name, *values)]


def call(guide, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [guide.__name__, *map(str, arguments)])
    guide.main()


def run_twice(guide, module, monkeypatch, capsys, folder, toy):
    """Runs a guide at toy size, deletes its last result, and runs it again.

    Returns the lines of results, and the output of the second run.
    """
    words = [*words_of(toy), "--output", folder, "--seeds", 0]
    call(module, monkeypatch, *words)
    path = folder / f"{module.__name__}.jsonl"
    *kept, lost = path.read_text().splitlines()
    path.write_text("\n".join([*kept, ""]))
    capsys.readouterr()
    call(module, monkeypatch, *words)
    assert path.read_text().splitlines()[:-1] == kept
    assert (folder / f"{module.__name__}.png").stat().st_size > 0
    lines = guide("runs").Results(path).lines
    assert lines[-1].keys() == json.loads(lost).keys()
    return lines, capsys.readouterr().out
