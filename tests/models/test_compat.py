"""Private modules of Keras and KerasHub, and presets and directories of their classes."""

import ast
import importlib
import pathlib

import keras_hub
import pytest

import keras_recurrent
from keras_recurrent import compat, models
from keras_recurrent.checkpoints import loading
from tests.layers.table import assert_rejects

PACKAGE = pathlib.Path(keras_recurrent.__file__).parent
INSIDE = ("keras.src", "keras_hub.src")
# All files but kernels, which do not use Keras.
FILES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "backends"
}


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
    for name, module in compat.SOURCE_NAMES.items():
        assert getattr(compat, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = compat.nothing


def test_directory_without_config_raises_the_error_of_keras_hub(tmp_path):
    """A directory without a config is taken for the preset whose name it has."""
    assert_rejects(r"has no config.json", keras_hub.models.CausalLM.from_preset, str(tmp_path))
    # The directory has a name similar to that of a preset.
    (tmp_path / "hawk_10m").mkdir()
    assert_rejects(r"has no config.json", loading.get_loader, str(tmp_path / "hawk_10m"))


LANGUAGE_MODELS = {
    "hawk_tiny": "Griffin",
    "hgrn2_tiny": "HGRN2",
    "tnl_tiny": "TransNormer",
    "hypenet_tiny": "LightningHybrid",
    "nemotron_h_tiny": "MambaHybrid",
    "lfm2_tiny": "LFM2",
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
