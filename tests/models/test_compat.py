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
from keras_recurrent.checkpoints.loaders import NamedPresetLoader
from keras_recurrent.tokenizers import ByteTokenizer
from tests.models.private_attributes import PRIVATE_ATTRIBUTES

PACKAGE = pathlib.Path(keras_recurrent.__file__).parent
INSIDE = ("keras.src", "keras_hub.src")
# Kernels use no Keras. They have a folder of their own.
FILES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "backends"
}
OF_NAMED_TUPLES = {"_asdict", "_fields", "_replace"}
# Copies of many tensors in one launch; a number that changes when a tensor is overwritten.
OF_TORCH = {"_execution_engine", "_foreach_copy_", "_version"}


def private(names):
    return {name for name in names if name.startswith("_") and not name.startswith("__")} - {"_"}


def attributes(tree, stored=(True, False)):
    """Private attributes in code, those of `getattr` and `hasattr` by a string included."""
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
    """Private names that code gives to functions, classes, variables and attributes."""
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
    """`{name: syntax tree}` of the classes of a module."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


@functools.cache
def names_in(cls):
    """Private names that a class defines, or uses anywhere in its code."""
    tree = classes_of(cls.__module__).get(cls.__name__)
    return attributes(tree) | definitions(tree) if tree else set()


def package_of(cls):
    return cls.__module__.partition(".")[0]


# They have no classes of Keras's: kernels, and what cannot be imported without another package.
NOT_OF_KERAS = (
    "keras_recurrent.backends",
    "keras_recurrent.evaluation.lm_evaluation_harness",
    "keras_recurrent.lm_evaluation_harness",
)


def shared_with_keras():
    """Private names of classes here that a class of Keras has on which they are built."""
    shared = set()
    for info in pkgutil.walk_packages([str(PACKAGE)], "keras_recurrent."):
        if info.name.startswith(NOT_OF_KERAS):
            continue
        for cls in vars(importlib.import_module(info.name)).values():
            if not inspect.isclass(cls) or cls.__module__ != info.name:
                continue
            ours = [names_in(c) for c in cls.__mro__ if package_of(c) == "keras_recurrent"]
            keras = [names_in(c) for c in cls.__mro__ if package_of(c) in ("keras", "keras_hub")]
            shared |= set().union(*ours) & set().union(*keras)
    return shared


@pytest.mark.once
def test_private_attributes_are_listed():
    """Those that are not defined here, or that are here and in a base class of Keras."""
    pytest.importorskip("tensorflow", reason="a module of the package imports it")
    listed = set(PRIVATE_ATTRIBUTES)
    used = set().union(*(attributes(tree) for tree in FILES.values()))
    defined = set().union(*(definitions(tree) for tree in FILES.values()))
    of_keras = (used - defined - OF_NAMED_TUPLES - OF_TORCH) | shared_with_keras()
    assert sorted(of_keras - listed) == [], "used, but not in `PRIVATE_ATTRIBUTES`"
    # A class may have an attribute's name in a string.
    quoted = set().union(*(strings(tree) for tree in FILES.values()))
    assert sorted(listed - of_keras - used - quoted) == [], "listed, but not used"


@pytest.mark.once
@pytest.mark.parametrize("name", PRIVATE_ATTRIBUTES)
def test_private_attributes_exist(name):
    if "tensorflow" in str(PRIVATE_ATTRIBUTES[name]):
        pytest.importorskip("tensorflow")
    for path in PRIVATE_ATTRIBUTES[name]:
        module, _, cls = path.rpartition(".")
        cls = getattr(importlib.import_module(module), cls)
        bases = [c for c in cls.__mro__ if package_of(c) in ("keras", "keras_hub")]
        assert any(name in vars(c) or name in names_in(c) for c in bases), f"{path} has no {name}"


@pytest.mark.once
def test_two_files_name_private_modules_and_only_what_they_use():
    inside = set()
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                modules = [getattr(node, "value", None)]  # as `importlib` takes it
            if any(isinstance(m, str) and m.startswith(INSIDE) for m in modules):
                inside.add(path)
    assert inside == {"compat.py", "upstream.py"}
    asked = {
        n.attr for tree in FILES.values() for n in ast.walk(tree) if isinstance(n, ast.Attribute)
    }
    for tree in FILES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "keras_recurrent.compat":
                asked |= {alias.name for alias in node.names}
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "__getattr__":
                asked.add(node.args[0].value)
    for name, module in compat.SOURCE_NAMES.items():
        assert getattr(compat, name) is getattr(importlib.import_module(module), name)
        assert name in asked, f"{name} is listed, but not used"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = compat.nothing


def test_every_class_with_presets_asks_our_loader():
    for cls in (
        keras_hub.models.Backbone,
        keras_hub.models.Task,
        keras_hub.models.Preprocessor,
        keras_hub.tokenizers.Tokenizer,
    ):
        known = cls.from_preset.__func__.__globals__
        assert isinstance(known["get_preset_loader"]("hawk_tiny"), NamedPresetLoader), cls


def test_other_presets_are_kerashubs_business(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        keras_hub.models.CausalLM.from_preset(str(tmp_path))
    # A near name that is a directory is a directory.
    (tmp_path / "hawk_10m").mkdir()
    with pytest.raises(ValueError, match=r"has no config.json"):
        loading.get_loader(str(tmp_path / "hawk_10m"))


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
def test_a_preset_of_another_class_is_refused_by_naming_its_own(name):
    wanted = f"'{name}' is no preset of .*Call `from_preset` of `{CLASSES[name]}"
    for other in set(CLASSES.values()) - {CLASSES[name]}:
        with pytest.raises(ValueError, match=f"{wanted}` .*instead"):
            getattr(models, other).from_preset(name)
    base = keras_hub.models.CausalLM if "vision" in name else keras_hub.models.ImageClassifier
    with pytest.raises(ValueError, match=f"{wanted}` .*instead"):
        base.from_preset(name)
    if name in LANGUAGE_MODELS:
        for family in set(LANGUAGE_MODELS.values()) - {LANGUAGE_MODELS[name]}:
            with pytest.raises(ValueError, match=f"{wanted}Preprocessor`"):
                getattr(models, f"{family}CausalLMPreprocessor").from_preset(name)
            with pytest.raises(ValueError, match=f"of `{LANGUAGE_MODELS[name]}Tokenizer`"):
                getattr(models, f"{family}Tokenizer").from_preset(name)


def test_a_tokenizer_by_the_name_of_a_model():
    assert isinstance(keras_hub.tokenizers.Tokenizer.from_preset("hgrn2_tiny"), ByteTokenizer)
