"""What this package takes from the inside of KerasHub is there, and in one file."""

import pathlib

import keras_hub
import pytest

import keras_recurrent
from keras_recurrent.checkpoints import loading
from keras_recurrent.checkpoints.loaders import NamedPresetLoader
from keras_recurrent.tokenizers import ByteTokenizer, SentencePieceTokenizer


def test_one_file_looks_inside():
    package = pathlib.Path(keras_recurrent.__file__).parent
    files = [f for f in package.rglob("*.py") if "keras_hub.src" in f.read_text()]
    assert [file.name for file in files] == ["compat.py"]


def test_every_class_with_presets_asks_our_loader():
    for cls in (
        keras_hub.models.Backbone,
        keras_hub.models.Task,
        keras_hub.models.Preprocessor,
        keras_hub.tokenizers.Tokenizer,
    ):
        known = cls.from_preset.__func__.__globals__
        loader = known["get_preset_loader"]("hawk_tiny")
        assert isinstance(loader, NamedPresetLoader), cls


def test_other_presets_are_kerashubs_business(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json"):
        keras_hub.models.CausalLM.from_preset(str(tmp_path))
    # A near name that is a directory is a directory.
    (tmp_path / "hawk_10m").mkdir()
    with pytest.raises(ValueError, match=r"has no config.json"):
        loading.get_loader(str(tmp_path / "hawk_10m"))


def test_the_hooks_of_kerashubs_tokenizers_are_its_own():
    for hook in ("_tokenize_tf", "_detokenize_tf", "_detokenize_python"):
        assert getattr(ByteTokenizer, hook) is not getattr(keras_hub.tokenizers.ByteTokenizer, hook)
    of_kerashub = keras_hub.tokenizers.SentencePieceTokenizer
    for hook in (
        "_update_special_token_ids",
        "_canonicalize_detokenize_spm_inputs",
        "_detokenize_tf",
    ):
        assert getattr(SentencePieceTokenizer, hook) is not getattr(of_kerashub, hook)
