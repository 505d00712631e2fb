"""Private names of Keras and KerasHub are listed in `compat` and `private_attributes`."""

import ast
import functools
import importlib
import inspect
import pathlib
import pkgutil
import sys

import keras_hub
import pytest

import keras_recurrent
from keras_recurrent import compat, models
from keras_recurrent.checkpoints import loading
from tests.layers.table import assert_rejects
from tests.models.private_attributes import PRIVATE_ATTRIBUTES

PACKAGE = pathlib.Path(keras_recurrent.__file__).parent
INSIDE = ("keras.src", "keras_hub.src")
# All files but kernels, which do not use Keras.
FILES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "backends"
}
NAMED_TUPLE_NAMES = {"_asdict", "_fields", "_replace"}
# `_foreach_copy_` copies many tensors in one launch; `_version` counts changes of a tensor.
TORCH_NAMES = {"_execution_engine", "_foreach_copy_", "_version"} | {
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_has_any_global_hook")
}


def private(names):
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - {"_"}


def attributes(tree, stored=(True, False)):
    """Returns private attributes in code, including names in calls of `getattr` and `hasattr`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) in stored:
            found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            name = getattr(node.args[1], "value", None)
            if isinstance(name, str) and False in stored:
                found.add(name)
    return private(found)


def definitions(tree):
    """Returns private names of functions, classes, variables and attributes defined in code."""
    found = attributes(tree, stored=(True,))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).rpartition(".")[2])
    return private(found)


def strings(tree):
    values = (getattr(node, "value", None) for node in ast.walk(tree))
    return {value for value in values if isinstance(value, str)}


@functools.cache
def classes_of(module):
    """Returns `{name: syntax tree}` of the classes of a module."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


@functools.cache
def names_in(cls):
    """Returns private names that a class defines or uses."""
    tree = classes_of(cls.__module__).get(cls.__name__)
    return attributes(tree) | definitions(tree) if tree else set()


def package_of(cls):
    return cls.__module__.partition(".")[0]


# Modules without classes of Keras, and modules that need another package.
MODULES_WITHOUT_KERAS = (
    "keras_recurrent.backends",
    "keras_recurrent.evaluation.lm_evaluation_harness",
    "keras_recurrent.lm_evaluation_harness",
)


def shared_with_keras():
    """Returns private names that a class here shares with its base classes in Keras."""
    shared = set()
    for info in pkgutil.walk_packages([str(PACKAGE)], "keras_recurrent."):
        if info.name.startswith(MODULES_WITHOUT_KERAS):
            continue
        for cls in vars(importlib.import_module(info.name)).values():
            if not inspect.isclass(cls) or cls.__module__ != info.name:
                continue
            ours = [names_in(c) for c in cls.__mro__ if package_of(c) == "keras_recurrent"]
            keras = [names_in(c) for c in cls.__mro__ if package_of(c) in ("keras", "keras_hub")]
            shared |= set().union(*ours) & set().union(*keras)
    return shared


@pytest.mark.once
def test_private_attributes_of_keras_are_listed():
    """The package uses a private attribute of Keras, or overrides one, that the list lacks."""
    pytest.importorskip("tensorflow", reason="a module of the package imports it")
    listed = set().union(*PRIVATE_ATTRIBUTES.values())
    used = set().union(*(attributes(tree) for tree in FILES.values()))
    defined = set().union(*(definitions(tree) for tree in FILES.values()))
    used_of_keras = (used - defined - NAMED_TUPLE_NAMES - TORCH_NAMES) | shared_with_keras()
    assert sorted(used_of_keras - listed) == [], "used, but not in `PRIVATE_ATTRIBUTES`"
    # A class may have the name of an attribute in a string.
    quoted = set().union(*(strings(tree) for tree in FILES.values()))
    assert sorted(listed - used_of_keras - used - quoted) == [], "listed, but not used"


@pytest.mark.once
@pytest.mark.parametrize("path", PRIVATE_ATTRIBUTES)
def test_listed_private_attributes_exist_in_keras(path):
    if "tensorflow" in path:
        pytest.importorskip("tensorflow")
    module, _, cls = path.rpartition(".")
    cls = getattr(importlib.import_module(module), cls)
    bases = [c for c in cls.__mro__ if package_of(c) in ("keras", "keras_hub")]
    for name in PRIVATE_ATTRIBUTES[path]:
        assert any(name in vars(c) or name in names_in(c) for c in bases), f"{path} has no {name}"


@pytest.mark.once
def test_only_compat_and_upstream_import_private_modules():
    inside = set()
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                modules = [getattr(node, "value", None)]  # an argument of `importlib`
            if any(isinstance(m, str) and m.startswith(INSIDE) for m in modules):
                inside.add(path)
    assert inside == {"compat.py", "upstream.py"}
    used = {
        n.attr for tree in FILES.values() for n in ast.walk(tree) if isinstance(n, ast.Attribute)
    }
    for tree in FILES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "keras_recurrent.compat":
                used |= {alias.name for alias in node.names}
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "__getattr__":
                used.add(node.args[0].value)
    for name, module in compat.SOURCE_NAMES.items():
        assert getattr(compat, name) is getattr(importlib.import_module(module), name)
        assert name in used, f"{name} is listed, but not used"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = compat.nothing


def test_directories_without_our_files_are_loaded_by_keras_hub(tmp_path):
    assert_rejects(r"has no config.json", keras_hub.models.CausalLM.from_preset, str(tmp_path))
    # The directory has a name similar to that of a preset.
    (tmp_path / "hawk_10m").mkdir()
    assert_rejects(r"has no config.json", loading.get_loader, str(tmp_path / "hawk_10m"))


LANGUAGE_MODELS = {
    "hawk_tiny": "Griffin",
    "hgrn2_tiny": "HGRN2",
    "tnl_tiny": "TransNormer",
    "hypenet_tiny": "LightningHybrid",
}
CLASSES = {name: f"{family}CausalLM" for name, family in LANGUAGE_MODELS.items()} | {
    "hgrn2_vision_tiny": "HGRN2ImageClassifier"
}


@pytest.mark.once
@pytest.mark.parametrize("name", CLASSES)
def test_preset_of_another_class_is_rejected_with_the_name_of_its_class(name):
    match = f"'{name}' is no preset of .*Call `from_preset` of `{CLASSES[name]}"
    base = keras_hub.models.CausalLM if "vision" in name else keras_hub.models.ImageClassifier
    others = set(CLASSES.values()) - {CLASSES[name]}
    for cls in (base, *(getattr(models, other) for other in others)):
        assert_rejects(f"{match}` .*instead", cls.from_preset, name)
    if name in LANGUAGE_MODELS:
        for family in set(LANGUAGE_MODELS.values()) - {LANGUAGE_MODELS[name]}:
            preprocessor = getattr(models, f"{family}CausalLMPreprocessor")
            assert_rejects(f"{match}Preprocessor`", preprocessor.from_preset, name)
            tokenizer = getattr(models, f"{family}Tokenizer")
            assert_rejects(f"of `{LANGUAGE_MODELS[name]}Tokenizer`", tokenizer.from_preset, name)
