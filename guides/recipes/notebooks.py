"""Generates the notebooks of the recipes from their scripts.

    python guides/recipes/notebooks.py     # or: make notebooks

Scripts are in the percent format: the docstring is the first cell, `# %%` begins a code cell, and
`# %% [markdown]` a cell of prose, written as comments. Notebooks have no outputs and depend only on
the script.
"""

import ast
import json
import pathlib

FOLDER = pathlib.Path(__file__).parent
NAMES = ("fine_tuning", "from_files", "classifier", "tpu_report")
CODE, PROSE = "# %%", "# %% [markdown]"


def notebook(script):
    """Converts a script to the JSON text of a notebook.

    Args:
        script: string, the text of a script that begins with a docstring.

    Raises:
        ValueError: if the docstring is missing, if there is code between it and the first cell, or
            if a line of prose is not a comment.
    """
    docstring = ast.get_docstring(ast.parse(script))
    if docstring is None:
        raise ValueError(
            "`script` must begin with a docstring, which is the notebook's first cell."
        )
    first = ast.parse(script).body[0].end_lineno or 0
    cells = [("markdown", docstring.splitlines())]
    for line in script.splitlines()[first:]:
        if line in (CODE, PROSE):
            cells.append(("markdown" if line == PROSE else "code", []))
        elif cells[-1][0] == "code":
            cells[-1][1].append(line)
        elif line.startswith("#") and len(cells) > 1:
            cells[-1][1].append(line[1:].removeprefix(" "))
        elif line:
            raise ValueError(f"A cell of prose has comments alone; got the line {line!r}.")
    content = {
        "cells": [_cell(i, kind, lines) for i, (kind, lines) in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _cell(number, kind, lines):
    source = "\n".join(lines).strip("\n").splitlines(keepends=True)
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def main():
    for name in NAMES:
        script = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        path = FOLDER / f"{name}.ipynb"
        path.write_text(notebook(script), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
