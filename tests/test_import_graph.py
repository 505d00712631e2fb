"""The imports of the package have no circle, and no folder imports from one above it.

The graph is built from syntax trees: imports at the top of a file and inside functions, and names
of modules in strings, for `importlib` and a module's `__getattr__`.
"""

import ast
import graphlib
import pathlib

import pytest

from keras_recurrent import compat, upstream

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "keras_recurrent"
# A folder or module imports from itself and from lines above its own, not from its neighbors in a
# line.
LEVELS = [
    "backends presets import_order atomic_files",
    "compat progress inherited_docstrings families",
    "checks",
    "portable",
    "dispatch",
    "devices",
    "ops tuning optimizers",
    "layers tokenizers datasets",
    "training gqa export chat callbacks",
    "checkpoints",
    "generation",
    "models",
    "serving evaluation",
]
LEVEL = {folder: level for level, folders in enumerate(LEVELS) for folder in folders.split()}
TOP = len(LEVELS)  # other modules at the root of the package

# (file, module that is imported inside one of its functions, because a package may be missing)
INSIDE_FUNCTIONS = {
    ("keras_recurrent/dispatch.py", "backends"),
    ("keras_recurrent/dispatch.py", "backends.triton._runtime.framework"),
    ("keras_recurrent/generation/torch_batch.py", "backends.triton.argmax"),
    ("keras_recurrent/layers/integer_products.py", "backends.torch._common"),
    ("keras_recurrent/optimizers/fused_updates.py", "backends.triton._optimizers.adam_kernel"),
    ("keras_recurrent/serving/__main__.py", "serving.processes"),
    ("keras_recurrent/serving/http_process.py", "serving.processes"),
    ("keras_recurrent/serving/processes.py", "serving.server"),
    ("keras_recurrent/training/sources.py", "training.grain_loader"),
    ("keras_recurrent/tuning.py", "backends.triton._runtime.search"),
}
HUB = "keras_hub"


@pytest.fixture(scope="module")
def sources():
    """`{name of a module: (its file, its source)}`."""
    found = {}
    for folder in (PACKAGE, "backends", "presets"):
        for file in sorted((ROOT / folder).rglob("*.py")):  # does not follow links
            parts = file.relative_to(ROOT).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            name = ".".join(parts if folder == PACKAGE else (PACKAGE, *parts))
            found[name] = file, file.read_text()
    return found


@pytest.fixture(scope="module")
def graph(sources):
    return {name: imports_of(name, sources) for name in sources}


def imports_of(name, sources):
    """`{(imported module of the package or "keras_hub", kind)}` of a module.

    The kind is "import" if the import of the module runs it, "function", "types" (for type
    checkers), or "string" (a name in a table).
    """
    file, source = sources[name]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()

    def visit(node, kind, strings=True):
        """strings: whether strings here name modules that are imported."""
        if isinstance(node, ast.Import):
            found.update((alias.name, kind) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: 1 - node.level or None]
                base = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                target = f"{base}.{alias.name}"
                found.add((target if target in sources else base, kind))
                if base == f"{PACKAGE}.compat":  # whose names are of Keras and KerasHub
                    found.add((compat.SOURCE_NAMES.get(alias.name, ""), kind))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and strings:
            # A formatted string has the name before its first brace.
            target = node.value.removesuffix(".")
            found.update({(target, kind.replace("import", "string"))} if target in sources else ())
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            kind, strings = "function", False
        elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            kind = "types"
        elif isinstance(node, ast.Call) and kind == "function":
            strings = getattr(node.func, "attr", "") == "import_module"
        for child in ast.iter_child_nodes(node):
            visit(child, kind, strings)

    visit(ast.parse(source), "import")
    found = {(HUB if target.startswith(HUB) else target, kind) for target, kind in found}
    modules = {HUB, *sources} - {name, PACKAGE}
    return {(target, kind) for target, kind in found if target in modules}


def imported_with(graph, names):
    """Returns what is imported with some modules, except for modules in `backends`."""
    found, pending = set(), list(names)
    while pending:
        name = pending.pop()
        if name and name not in found and not name.startswith(f"{PACKAGE}.backends"):
            found.add(name)
            pending += [name.rpartition(".")[0]]  # the package of a module
            pending += [target for target, kind in graph.get(name, ()) if kind == "import"]
    return found


def folder(name):
    """The part of a module's name after the package's; an empty string for the package itself."""
    return name.split(".")[1] if "." in name else ""


def level(name):
    return LEVEL.get(folder(name), TOP)


def test_imports_of_the_package_have_no_circle(graph):
    targets = {name: {target for target, _ in imports} for name, imports in graph.items()}
    graphlib.TopologicalSorter(targets).prepare()


def test_imports_of_the_package_run_downward(graph):
    """A module imports from a later line of `LEVELS`, or from a neighbor in its own line."""
    assert [
        (name, target)
        for name, imports in graph.items()
        for target, _ in imports
        if target != HUB
        and (
            level(target) > level(name)
            or (level(target) == level(name) < TOP and folder(target) != folder(name))
        )
    ] == []


def test_import_of_the_package_and_layers_does_not_import_kerashub_or_gqa(graph):
    """Importing a layer imports KerasHub and TensorFlow, which takes seconds, or GQA code."""
    modules = imported_with(graph, [f"{PACKAGE}.exporting", f"{PACKAGE}.serving.__main__"])
    assert HUB not in modules
    assert not [name for name in modules if name.startswith(f"{PACKAGE}.gqa")]
    assert {f"{PACKAGE}.layers.rg_lru", f"{PACKAGE}.upstream"} < modules
    assert HUB in imported_with(graph, [f"{PACKAGE}.samplers"])


def test_registered_classes_are_imported_for_saved_models(sources, graph):
    """A saved model does not load after `import keras_recurrent`."""
    modules = imported_with(graph, [PACKAGE, *upstream.REGISTERING_MODULES])
    name = "register_keras_serializable"
    assert {module for module, (_, source) in sources.items() if name in source} <= modules


def test_imports_inside_functions_are_listed(sources, graph):
    found = {
        (sources[name][0].relative_to(ROOT).as_posix(), target.removeprefix(f"{PACKAGE}."))
        for name, imports in graph.items()
        for target, kind in imports
        if kind == "function" and target != HUB
    }
    assert found == INSIDE_FUNCTIONS
