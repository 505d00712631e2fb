"""What the README says is so."""

import pathlib
import re

import pytest

from keras_recurrent.models import GriffinCausalLM

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
def test_presets():
    said = {name: int(parameters.replace(",", "")) for name, *_, parameters in rows("preset")[1:]}
    presets = GriffinCausalLM.presets
    assert said == {name: preset["metadata"]["params"] for name, preset in presets.items()}


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_examples(example):
    exec(example, {})


@pytest.mark.once
def test_links():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
