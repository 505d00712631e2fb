"""Files of generation caches, and the model that a cache belongs to."""

import json

import keras
import numpy as np
import pytest

from keras_recurrent.generation import cache_file
from keras_recurrent.generation.cache_file import SAMPLED, _fingerprint
from keras_recurrent.models import GenerationCache
from tests.generation.test_cache import (
    continue_cache,
    generate,
    make_other_model,
    prefill,
)
from tests.generation.tokens import pad, random_prompts, to_arrays
from tests.models import tiny
from tests.models.tiny import tiny_causal_lm

safetensors = pytest.importorskip("safetensors.numpy")
FAMILY = "griffin"


def make_model(**options):
    model = tiny_causal_lm(**{"family": FAMILY, **options})
    model.compile(sampler="greedy")
    return model


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def cache(model):
    return prefill(model, random_prompts())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "float32") for family in tiny.SHARED),
        pytest.param("griffin", "bfloat16", marks=pytest.mark.once),
    ],
)
def test_loaded_cache_is_bit_identical(family, dtype, tmp_path):
    """A file drops a part of a state, or rounds it."""
    model, path = make_model(family=family, dtype=dtype), tmp_path / "folder" / "cache.safetensors"
    cache = prefill(model, random_prompts())
    cache.save(path)
    loaded = GenerationCache.load(path, model)
    for a, b in zip(to_arrays(cache), to_arrays(loaded), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert repr(loaded) == repr(cache)


@pytest.mark.once
def test_save_replaces_a_file_in_one_step(model, cache, tmp_path, monkeypatch):
    """A full disk damages the earlier file."""
    path = str(tmp_path / "cache.safetensors")
    cache.save(path)

    def fail(temporary, path):
        raise OSError("the disk is full")

    monkeypatch.setattr(cache_file.os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        prefill(model, random_prompts((3, 1))).save(path)
    assert [str(file) for file in tmp_path.iterdir()] == [path]
    assert GenerationCache.load(path, model).batch_size == cache.batch_size
    with pytest.raises(ValueError, match="must be a language model"):
        GenerationCache.load(path, None)
    with pytest.raises(IsADirectoryError, match="is a directory"):
        cache.save(tmp_path)


@pytest.mark.once
def test_cache_of_another_model_raises_an_error_that_names_the_difference(model, cache, tmp_path):
    cache.save(tmp_path / "cache")
    low_rank, quantized = make_model(), make_model()
    low_rank.backbone.enable_lora(2)
    quantized.quantize("int8")
    for other, words in (
        (make_model(family="hgrn2"), "to a `GriffinBackbone`; this is a"),
        (make_other_model(model, lru_width=16), "lru_width=.*; this one has 16"),
        (make_other_model(model, seed=0, dtype="mixed_bfloat16"), "dtype float32; .* mixed_bf"),
        (low_rank, r"low-rank weights \(LoRA\) None; this one has \[2\]"),
        (quantized, r"the quantization None; this one has \['int8'\]"),
        (make_other_model(model), "other weights"),
    ):
        for call in (
            lambda other=other: GenerationCache.load(tmp_path / "cache", other),
            lambda other=other: continue_cache(other, cache, 3),
            lambda other=other: other.stream(None, 3, None, cache=cache),
            lambda other=other: other.prefill(pad(random_prompts()), cache=cache),
        ):
            with pytest.raises(ValueError, match=words):
                call()


@pytest.mark.once
def test_load_of_a_damaged_file_raises(model, cache, tmp_path):
    """A damaged file is loaded, or the error does not name what is missing."""
    path = tmp_path / "cache"
    with pytest.raises(FileNotFoundError, match="no file"):
        GenerationCache.load(path, model)
    cache.save(path)
    whole = path.read_bytes()
    tensors = safetensors.load(whole)
    metadata = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
    content = json.loads(metadata["content"])
    name = next(name for name in tensors if name.startswith(cache_file.STATE))
    old, unnamed = {**content, "version": 1}, {"version": cache_file.VERSION}

    def replace(**changes):
        """Returns the tensors of a file with changes; None removes a tensor."""
        return {n: t for n, t in {**tensors, **changes}.items() if t is not None}, {}

    for data, words in (
        (whole[: len(whole) // 2], "damaged or cut off"),
        (b"{}", "damaged or cut off"),
        (whole[:-4] + bytes(4 * [0xFF]), "damaged: its checksum"),
        ((tensors, {"format": "pt"}), "must be a file that"),
        ((tensors, {"content": json.dumps(old)}), "of version 1"),
        ((tensors, {"content": "["}), "not JSON"),
        ((tensors, {"content": json.dumps(unnamed)}), "name the model it belongs"),
        (replace(**{name: None}), "must hold the state"),
        (replace(**{name: tensors[name][:1]}), "must be .* of shape"),
        (replace(**{name: tensors[name].astype("int8")}), "must be .* int8"),
        (replace(token_ids=None), "must have 'token_ids'"),
        (replace(token_ids=tensors["token_ids"][:1]), "'token_ids'"),
        (replace(num_tokens=None), "must have 'num_tokens'"),
    ):
        if isinstance(data, tuple):
            found, changes = data
            checksum = {"sha256": cache_file._checksum(found)}
            data = safetensors.save(found, metadata={**metadata, **checksum, **changes})
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            GenerationCache.load(path, model)


@pytest.mark.once
def test_generate_from_a_cache_hashes_the_weights_once(hgrn2, monkeypatch):
    """A turn of a conversation copies elements of all weights from the device twice."""
    cache = prefill(hgrn2, random_prompts())
    calls, fingerprint = [], cache_file._fingerprint
    monkeypatch.setattr(cache_file, "_fingerprint", lambda w: calls.append(w) or fingerprint(w))
    hgrn2.generate(None, max_length=2, stop_token_ids=None, cache=cache, return_cache=True)
    assert len(calls) == 1


@pytest.mark.once
def test_check_finds_a_small_change_of_any_weight(hgrn2):
    """A cache continues with other weights, or is rejected by a copy of its model."""
    cache = prefill(hgrn2, random_prompts())
    for weight in hgrn2.backbone.weights:
        value = keras.ops.convert_to_numpy(weight)
        weight.assign(value * np.float32(1.001) + np.float32(1e-3))
        with pytest.raises(ValueError, match="other weights"):
            cache.check(hgrn2)
        weight.assign(value)
    cache.check(hgrn2)
    copy = type(hgrn2).from_config(hgrn2.get_config())
    copy.compile(sampler="greedy")
    copy.set_weights(hgrn2.get_weights())
    assert continue_cache(copy, cache, 4) == continue_cache(hgrn2, cache, 4)
    assert generate(copy, random_prompts(), 12) == generate(hgrn2, random_prompts(), 12)


@pytest.mark.once
def test_fingerprint_depends_on_each_column():
    """The hashed elements of a weight are all in the same columns."""
    before = np.zeros((SAMPLED, 64), "float32")
    other = np.where(np.arange(64) == 0, before, np.float32(1))
    assert _fingerprint([before]) != _fingerprint([other])
    assert _fingerprint([before]) == _fingerprint([before.copy()])
