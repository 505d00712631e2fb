"""A cache in a file: whole or not there, and refused by name where it does not fit."""

import json

import keras
import numpy as np
import pytest

from keras_recurrent.generation import cache_file, cache_key
from keras_recurrent.generation.cache_key import SAMPLED, _fingerprint
from keras_recurrent.models import GenerationCache
from tests.generation.test_cache import arrays, generate, given, more, other_model, prefill, tokens
from tests.models.tiny import shared_by_families, tiny_causal_lm

safetensors = pytest.importorskip("safetensors.numpy")
FAMILY = "griffin"


@pytest.fixture
def model():
    return greedy(tiny_causal_lm(family=FAMILY))


def greedy(model):
    model.compile(sampler="greedy")
    return model


@shared_by_families
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.once)])
def test_a_file_holds_the_same_bits(family, dtype, tmp_path):
    model = tiny_causal_lm(family=family, dtype=dtype)
    cache = prefill(model, given())
    cache.save(tmp_path / "folder" / "cache.safetensors")
    again = GenerationCache.load(tmp_path / "folder" / "cache.safetensors", model)
    for a, b in zip(arrays(cache), arrays(again), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert repr(again) == repr(cache)
    model.compile(sampler="greedy")
    assert more(model, again, 6) == more(model, cache, 6)


@pytest.mark.once
def test_a_file_takes_the_place_of_another_or_leaves_it(model, tmp_path, monkeypatch):
    path = tmp_path / "cache.safetensors"
    first, second = prefill(model, given()), prefill(model, given((3, 1)))
    first.save(path)
    with monkeypatch.context() as patch:

        def replace(temporary, path):
            raise OSError("the disk is full")

        patch.setattr(cache_file.os, "replace", replace)
        with pytest.raises(OSError, match="full"):
            second.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert GenerationCache.load(path, model).batch_size == first.batch_size
    link = tmp_path / "link"
    link.symlink_to(path)
    second.save(str(link))
    assert link.is_symlink()
    assert GenerationCache.load(str(path), model).batch_size == 2
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="must be a language model"):
        GenerationCache.load(path, None)
    with pytest.raises(IsADirectoryError, match="is a directory"):
        first.save(tmp_path)


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
@pytest.mark.filterwarnings("ignore:.*The use of `x.T` on tensors:UserWarning")
def test_other_models_are_refused_by_name(model, tmp_path):
    cache = prefill(model, given())
    cache.save(tmp_path / "cache")
    low_rank, quantized = tiny_causal_lm(family=FAMILY), tiny_causal_lm(family=FAMILY)
    low_rank.backbone.enable_lora(2)
    quantized.quantize("int8")
    for other, words in (
        (tiny_causal_lm(family="hgrn2"), "to a `GriffinBackbone`; this is a"),
        (other_model(model, lru_width=16), "lru_width=.*; this one has 16"),
        (other_model(model, seed=0, dtype="mixed_bfloat16"), "the dtype float32; .* mixed_bf"),
        (low_rank, r"low-rank weights \(LoRA\) None; this one has \[2\]"),
        (quantized, r"the quantization None; this one has \['int8'\]"),
        (other_model(model), "other weights"),
    ):
        with pytest.raises(ValueError, match=words):
            GenerationCache.load(tmp_path / "cache", greedy(other))
        with pytest.raises(ValueError, match=words):
            more(other, cache, 3)
        with pytest.raises(ValueError, match=words):
            other.stream(None, 3, None, cache=cache)
        with pytest.raises(ValueError, match=words):
            other.prefill(tokens(given()), cache=cache)


@pytest.mark.once
def test_what_is_no_cache(model, tmp_path):
    path = tmp_path / "cache"
    with pytest.raises(FileNotFoundError, match="no file"):
        GenerationCache.load(path, model)
    prefill(model, given()).save(path)
    whole = path.read_bytes()
    tensors = safetensors.load(whole)
    metadata = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])["__metadata__"]
    content = json.loads(metadata["content"])
    name = next(name for name in tensors if name.startswith(cache_file.STATE))

    def written(tensors=tensors, **changes):
        checksum = {"sha256": cache_file._checksum(tensors)}
        path.write_bytes(safetensors.save(tensors, metadata={**metadata, **checksum, **changes}))

    def flipped():
        path.write_bytes(whole[:-4] + bytes(4 * [0xFF]))

    def without(name):
        return {n: t for n, t in tensors.items() if n != name}

    for damage, words in (
        (lambda: path.write_bytes(whole[: len(whole) // 2]), "damaged or cut off"),
        (lambda: path.write_bytes(b"{}"), "damaged or cut off"),
        (flipped, "damaged: its checksum"),
        (lambda: written(format="pt"), "must be a file that"),
        (lambda: written(content=json.dumps({**content, "version": 1})), "of version 1"),
        (lambda: written(content="["), "not JSON"),
        (
            lambda: written(content=f'{{"version": {cache_file.VERSION}}}'),
            "name the model it belongs",
        ),
        (lambda: written(without(name)), "must hold the state"),
        (lambda: written({**tensors, name: tensors[name][:1]}), "must be .* of shape"),
        (lambda: written({**tensors, name: tensors[name].astype("int8")}), "must be .* int8"),
        (lambda: written(without("token_ids")), "must have 'token_ids'"),
        (lambda: written({**tensors, "token_ids": tensors["token_ids"][:1]}), "'token_ids'"),
        (lambda: written(without("num_tokens")), "must have 'num_tokens'"),
    ):
        damage()
        with pytest.raises(ValueError, match=words):
            GenerationCache.load(path, model)


@pytest.mark.once
def test_weights_are_hashed_once_a_turn(model, monkeypatch):
    """Fails if a conversation turn reads the weights from the device twice."""
    cache, calls = prefill(model, given()), []
    fingerprint = cache_key._fingerprint
    monkeypatch.setattr(cache_key, "_fingerprint", lambda w: calls.append(w) or fingerprint(w))
    model.generate(None, max_length=2, stop_token_ids=None, cache=cache, return_cache=True)
    assert len(calls) == 1


@pytest.mark.once
def test_weights_are_compared_from_few_numbers(model):
    """Of each weight, wherever it is, a change is seen; the model is the same after a copy."""
    cache = prefill(model, given())
    for weight in model.backbone.weights:
        value = keras.ops.convert_to_numpy(weight)
        weight.assign(value * np.float32(1.001) + np.float32(1e-3))
        with pytest.raises(ValueError, match="other weights"):
            cache.check(model)
        weight.assign(value)
    cache.check(model)
    same = greedy(type(model).from_config(model.get_config()))
    same.set_weights(model.get_weights())
    assert more(same, cache, 4) == more(model, cache, 4)
    assert generate(same, given(), 12) == generate(model, given(), 12)


@pytest.mark.once
def test_numbers_of_all_columns_are_compared():
    before = np.zeros((SAMPLED, 64), "float32")
    other = np.where(np.arange(64) == 0, before, np.float32(1))
    assert _fingerprint([before]) != _fingerprint([other])
    assert _fingerprint([before]) == _fingerprint([before.copy()])
