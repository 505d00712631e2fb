"""Statements and examples of the README hold."""

import pathlib
import re

import pytest

from keras_recurrent.models import GriffinCausalLM, HGRN2CausalLM, TransNormerCausalLM

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def rows(first_header):
    """The cells of a table's rows, its header first."""
    _, _, table = README.partition(f"\n| {first_header} |")
    lines = f"| {first_header} |{table}".partition("\n\n")[0].splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return [cells[0], *cells[2:]]


@pytest.mark.once
def test_support_matrix():
    (_, *implementations), *operations = rows("operation")
    said = {
        (implementation, operation)
        for operation, *marks in operations
        for implementation, mark in zip(implementations, marks, strict=True)
        if mark == "✓"
    }
    files = (ROOT / "backends").glob("*/[!_]*.py")
    assert said == {(file.parent.name, file.stem) for file in files}


@pytest.mark.once
@pytest.mark.parametrize(
    ("table", "cls"),
    [
        ("preset", GriffinCausalLM),
        ("HGRN2 preset", HGRN2CausalLM),
        ("TransNormerLLM preset", TransNormerCausalLM),
    ],
)
def test_presets(table, cls):
    said = {name: int(parameters.replace(",", "")) for name, *_, parameters in rows(table)[1:]}
    assert said == {name: row["metadata"]["params"] for name, row in cls.presets.items()}


def examples():
    """XLA takes long to compile training, and tests of models train on every backend."""
    for example in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        yield pytest.param(example, marks=pytest.mark.once) if ".fit(" in example else example


@pytest.mark.parametrize("example", list(examples()))
def test_examples(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    exec(example, {})


@pytest.mark.once
def test_links():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
