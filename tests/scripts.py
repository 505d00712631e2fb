"""Scripts of the repository outside the package, imported as modules."""

import importlib.util

import pytest

from tests.processes import ROOT


def load(path):
    """Imports a script, such as `guides/quickstart.py`, anew."""
    path = ROOT / path
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)  # where Python searches when it runs the script
        spec.loader.exec_module(module)
    return module
