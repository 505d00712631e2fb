"""Scripts of the repository outside the package, imported as modules."""

import importlib.util

from tests.processes import ROOT


def load(path):
    """Imports a script, such as `guides/quickstart.py`, anew."""
    path = ROOT / path
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
