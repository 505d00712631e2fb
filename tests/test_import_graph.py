"""The imports of the package have no circle, and no folder imports from one above it.

The graph is built from syntax trees: imports at the top of a file and inside functions, and names
of modules in strings, for `importlib` and a module's `__getattr__`.
"""

import ast
import graphlib
import pathlib
import re

import pytest

from keras_recurrent import compat, upstream

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "keras_recurrent"
# A folder or module imports from itself and from lines above its own, not from its neighbors in a
# line.
FLOORS = [
    "backends presets import_order atomic_files",
    "compat progress inherited_docstrings",
    "checks",
    "portable",
    "dispatch",
    "devices",
    "ops tuning",
    "layers tokenizers datasets",
    "training gqa export chat callbacks",
    "checkpoints",
    "generation",
    "models",
    "serving evaluation",
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}
TOP = len(FLOORS)  # other modules at the root of the package

# (file, module that is imported inside one of its functions, because a package may be missing)
INSIDE_FUNCTIONS = {
    ("keras_recurrent/datasets/__init__.py", "datasets.packed_text"),  # until its first use
    ("keras_recurrent/dispatch.py", "backends"),
    ("keras_recurrent/generation/torch/decoder.py", "backends.triton.argmax"),
    ("keras_recurrent/serving/__main__.py", "serving.server"),
    ("keras_recurrent/training/sources.py", "training.grain_loader"),
    ("keras_recurrent/tuning.py", "backends.triton._runtime.search"),
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
NAMES_MODULES = re.compile(rf'"{PACKAGE}\.[a-z]')  # in the source of a file


def _files():
    """`{name of a module: its file}`."""
    files = {}
    for folder in (PACKAGE, "backends", "presets"):
        for file in sorted((ROOT / folder).rglob("*.py")):  # does not follow links
            parts = file.relative_to(ROOT).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            files[".".join(parts if folder == PACKAGE else (PACKAGE, *parts))] = file
    return files


class Graph:
    """The imports of every module from modules of the package.

    Attributes:
        files: `{module: its file}`.
        imports: `{module: {(imported module, kind)}}`. The kind is "import" if the import of the
            module runs it, "function", "types" (for type checkers), or "string".
        hub_users: modules whose import imports KerasHub.
    """

    def __init__(self, sources):
        """sources: `{module: (its file, its source)}`."""
        self.files = {name: file for name, (file, _) in sources.items()}
        self.hub_users = set()
        self.imports = {
            name: self._imports(name, ast.parse(source), bool(NAMES_MODULES.search(source)))
            for name, (_, source) in sources.items()
        }

    def _imports(self, name, tree, with_strings):
        found = set()

        def visit(node, kind, imported):
            """imported: whether strings here name what is imported."""
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found.update((target, kind) for target in self._targets(name, node))
                if kind == "import" and imports_kerashub(node):
                    self.hub_users.add(name)
            elif isinstance(node, ast.Constant):
                if isinstance(node.value, str) and imported:
                    # A formatted string has the name before its first brace.
                    target = node.value.removesuffix(".")
                    string_kind = "string" if kind == "import" else kind
                    found.update({(target, string_kind)} if target in self.files else ())
                return
            elif isinstance(node, ast.expr) and not with_strings:
                return
            elif isinstance(node, FUNCTIONS):
                kind, imported = "function", False
            elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                kind = "types"
            elif isinstance(node, ast.Call) and kind == "function":
                imported = getattr(node.func, "attr", "") == "import_module"
            for child in ast.iter_child_nodes(node):
                visit(child, kind, imported)

        visit(tree, "import", True)
        return {(target, kind) for target, kind in found if target not in (name, PACKAGE)}

    def _targets(self, name, node):
        if isinstance(node, ast.Import):
            return {alias.name for alias in node.names} & self.files.keys()
        base = node.module
        if node.level:
            package = name.split(".")
            if self.files[name].name != "__init__.py":
                package.pop()
            package = package[: len(package) + 1 - node.level]
            base = ".".join([*package, *filter(None, [node.module])])
        names = {f"{base}.{alias.name}" for alias in node.names}
        return {target if target in self.files else base for target in names} & self.files.keys()

    def upward(self):
        """`(module, imported module)` of the imports that do not run downward."""
        return sorted(
            (name, target)
            for name, imports in self.imports.items()
            for target, _ in imports
            if floor(target) > floor(name)
            or (floor(target) == floor(name) < TOP and room(target) != room(name))
        )

    def circle(self):
        """Returns a list of modules that import each other, or an empty one."""
        targets = {name: {t for t, _ in imports} for name, imports in self.imports.items()}
        try:
            graphlib.TopologicalSorter(targets).prepare()
        except graphlib.CycleError as error:
            return error.args[1]
        return []

    def inside_functions(self):
        """`(file, imported module)` of the imports inside functions."""
        return {
            (self.files[name].relative_to(ROOT).as_posix(), target.removeprefix(f"{PACKAGE}."))
            for name, imports in self.imports.items()
            for target, kind in imports
            if kind == "function"
        }

    def imported_with(self, names):
        """Returns the modules that are imported with some modules, except those in `backends`."""
        found, pending = set(), list(names)
        while pending:
            name = pending.pop()
            if name and name not in found and not name.startswith(f"{PACKAGE}.backends"):
                found.add(name)
                pending += [name.rpartition(".")[0]]  # the package of a module
                pending += [target for target, kind in self.imports[name] if kind == "import"]
        return found


def room(name):
    """The part of a module's name after the package's; an empty string for the package itself."""
    return name.split(".")[1] if "." in name else ""


def floor(name):
    return FLOOR.get(room(name), TOP)


def imports_kerashub(node):
    """Returns True if an import statement imports KerasHub, also by a name of `compat`."""
    source = getattr(node, "module", None) or node.names[0].name
    names = [alias.name for alias in node.names] if source == f"{PACKAGE}.compat" else ()
    sources = [source, *(compat.SOURCE_NAMES.get(name, "") for name in names)]
    return any(name.startswith("keras_hub") for name in sources)


@pytest.fixture(scope="module")
def sources():
    return {name: (file, file.read_text()) for name, file in _files().items()}


@pytest.fixture(scope="module")
def graph(sources):
    return Graph(sources)


def test_imports_of_the_package_have_no_circle(graph):
    assert graph.circle() == []


def test_imports_of_the_package_run_downward(graph):
    assert graph.upward() == []


def test_import_of_the_package_and_layers_does_not_import_kerashub_or_gqa(graph):
    """Importing a layer imports KerasHub and TensorFlow, which takes seconds, or GQA code."""
    modules = graph.imported_with([f"{PACKAGE}.exporting", f"{PACKAGE}.serving.__main__"])
    assert modules & graph.hub_users == set()
    assert not [name for name in modules if name.startswith(f"{PACKAGE}.gqa")]
    assert {f"{PACKAGE}.layers.rg_lru", f"{PACKAGE}.upstream"} < modules
    assert graph.imported_with([f"{PACKAGE}.samplers"]) & graph.hub_users


def test_registered_classes_are_imported_for_saved_models(sources, graph):
    """A saved model does not load after `import keras_recurrent`."""
    modules = graph.imported_with([PACKAGE, *upstream.REGISTERING_MODULES])
    name = "register_keras_serializable"
    assert {module for module, (_, source) in sources.items() if name in source} <= modules


def test_imports_inside_functions_are_listed(graph):
    assert graph.inside_functions() == INSIDE_FUNCTIONS


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("compat", "from keras_recurrent.layers import remat"),
        ("compat", "def f():\n    from keras_recurrent.layers.base import RecomputableLayer"),
        ("compat", 'def f():\n    return importlib.import_module("keras_recurrent.layers.remat")'),
        ("compat", '_MODULES = {"remat": "keras_recurrent.layers.remat"}'),
        ("backends.torch._circular_buffer", "from ...layers import remat"),
    ],
    ids=["module", "function", "importlib", "table", "relative"],
)
def test_graph_finds_an_upward_import(sources, name, line):
    name = f"{PACKAGE}.{name}"
    planted = {n: (file, "") for n, (file, _) in sources.items()}
    planted[name] = sources[name][0], line
    assert [source for source, _ in Graph(planted).upward()] == [name]


def test_graph_finds_a_circle(sources):
    below, above = (f"{PACKAGE}.layers.{name}" for name in ("rms_norm", "hgrn2"))
    planted = {n: (file, "") for n, (file, _) in sources.items()} | {above: sources[above]}
    planted[below] = sources[below][0], f"def f():\n    from {above} import HGRN2"
    assert {*Graph(planted).circle()} == {above, below}
