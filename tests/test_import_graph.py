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
    "portable devices",
    "dispatch",
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

PACKAGE_MISSING = "imports a package that may be missing"
LAZY_NAME = "a public name that is imported when it is first used"
# {(file, module that is imported inside one of its functions): reason}
INSIDE_FUNCTIONS = {
    ("keras_recurrent/datasets/__init__.py", "datasets.packed_text"): LAZY_NAME,
    ("keras_recurrent/dispatch.py", "backends"): PACKAGE_MISSING,
    ("keras_recurrent/generation/torch/decoder.py", "backends.triton.argmax"): PACKAGE_MISSING,
    ("keras_recurrent/serving/__main__.py", "serving.server"): PACKAGE_MISSING,
    ("keras_recurrent/training/sources.py", "training.grain_loader"): PACKAGE_MISSING,
    ("keras_recurrent/tuning.py", "backends.triton._runtime.search"): PACKAGE_MISSING,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
NAMES_MODULES = re.compile(rf'"{PACKAGE}\.[a-z]')  # in the source of a file


def _files():
    """`{name of a module: its file}`; links to `backends` and `presets` are not followed."""
    files = {}
    for folder in (PACKAGE, "backends", "presets"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if parts[:2] in ((PACKAGE, "backends"), (PACKAGE, "presets")):
                continue
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            files[".".join(parts if folder == PACKAGE else (PACKAGE, *parts))] = file
    return files


class Graph:
    """The imports of every module from modules of the package.

    Attributes:
        files: `{module: its file}`.
        imports: `{module: {(imported module, whether a function imports it)}}`.
    """

    def __init__(self, sources):
        """sources: `{module: (its file, its source)}`."""
        self.files = {name: file for name, (file, _) in sources.items()}
        self.imports = {
            name: self._imports(name, ast.parse(source), bool(NAMES_MODULES.search(source)))
            for name, (_, source) in sources.items()
        }

    def _imports(self, name, tree, with_strings):
        found = set()

        def visit(node, inside, imported):
            """imported: whether strings here name what is imported."""
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found.update((target, inside) for target in self._targets(name, node))
            elif isinstance(node, ast.Constant):
                if isinstance(node.value, str) and imported:
                    # A formatted string has the name before its first brace.
                    target = node.value.removesuffix(".")
                    found.update({(target, inside)} if target in self.files else ())
                return
            elif isinstance(node, ast.expr) and not with_strings:
                return
            elif isinstance(node, FUNCTIONS):
                inside, imported = True, False
            elif isinstance(node, ast.Call) and inside:
                imported = getattr(node.func, "attr", "") == "import_module"
            for child in ast.iter_child_nodes(node):
                visit(child, inside, imported)

        visit(tree, False, True)
        return {(target, inside) for target, inside in found if target not in (name, PACKAGE)}

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
            for target, inside in imports
            if inside
        }


def room(name):
    """The part of a module's name after the package's; an empty string for the package itself."""
    return name.split(".")[1] if "." in name else ""


def floor(name):
    return FLOOR.get(room(name), TOP)


def imported_modules(sources, first):
    """Finds the modules that are imported together with some modules.

    Returns:
        `(modules, users)`: the set of modules of this package, and the set of those among them
        that import KerasHub. Implementations in `backends` are left out.
    """
    files = Graph({name: (file, "") for name, (file, _) in sources.items()})
    modules, users, pending = set(), set(), list(first)
    while pending:
        name = pending.pop()
        if name in modules or name.startswith(f"{PACKAGE}.backends"):
            continue
        modules.add(name)
        pending += filter(None, [name.rpartition(".")[0]])  # the package of a module
        for node in _import_statements(ast.parse(sources[name][1])):
            pending += files._targets(name, node)
            source = getattr(node, "module", None) or node.names[0].name
            slow = [compat.SOURCE_NAMES.get(alias.name, "") for alias in node.names]
            slow = [source, *(slow if source == f"{PACKAGE}.compat" else ())]
            users |= {name for module in slow if module.startswith("keras_hub")}
    return modules, users


def _import_statements(node):
    """Yields the statements that run when a module is imported."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node
    is_for_types = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    if not isinstance(node, FUNCTIONS) and not is_for_types:
        for child in ast.iter_child_nodes(node):
            yield from _import_statements(child)


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


def test_import_of_the_package_and_layers_does_not_import_kerashub(sources):
    """Importing a layer imports KerasHub and TensorFlow, which takes seconds."""
    names = ("exporting", "serving.__main__")
    modules, users = imported_modules(sources, [f"{PACKAGE}.{name}" for name in names])
    assert users == set()
    assert {f"{PACKAGE}.layers.rg_lru", f"{PACKAGE}.upstream"} < modules
    assert imported_modules(sources, [f"{PACKAGE}.samplers"])[1]  # it finds KerasHub


def test_registered_classes_are_imported_for_saved_models(sources):
    """A saved model does not load after `import keras_recurrent`."""
    modules, _ = imported_modules(sources, [PACKAGE, *upstream.REGISTERING_MODULES])
    registering = {
        name for name, (_, source) in sources.items() if "register_keras_serializable" in source
    }
    assert registering - modules == set()


def test_imports_inside_functions_are_listed(graph):
    assert graph.inside_functions() == set(INSIDE_FUNCTIONS)
    assert set(INSIDE_FUNCTIONS.values()) == {PACKAGE_MISSING, LAZY_NAME}
    assert len(INSIDE_FUNCTIONS) <= 8


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("compat", "from keras_recurrent.layers import remat"),
        ("compat", "def f():\n    from keras_recurrent.layers.remat import RecomputableLayer"),
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
