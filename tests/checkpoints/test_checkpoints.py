"""Loading of checkpoints: files, configuration, the Hub and the tokenizer.

Faulty checkpoints raise an error that names the fault, before a model is built.
"""

import importlib
import json
import os
import shutil

import huggingface_hub
import keras_hub
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import load_file, save_file

from keras_recurrent.checkpoints import files, loaders
from keras_recurrent.models import GriffinBackbone, GriffinCausalLM, MambaHybridBackbone
from keras_recurrent.tokenizers import ByteTokenizer, SentencePieceTokenizer
from tests.checkpoints import golden
from tests.layers.table import assert_rejects

NORM = "model.final_norm.weight"
BIAS = "model.layers.0.mlp_block.up_proj.bias"
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@pytest.fixture
def no_model_built(monkeypatch):
    def init(*args, **kwargs):
        raise AssertionError("a model was built")

    monkeypatch.setattr(GriffinBackbone, "__init__", init)


pytestmark = pytest.mark.once


# === Tensors ===


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({NORM: None}, f"1 missing: '{NORM}'"),
        ({"model.lm_head.weight": np.ones((96, 64), "float32")}, "1 unknown: 'model.lm_head"),
        ({BIAS: np.ones(95, "float32")}, rf"1 of another shape: '{BIAS}' \[95\] instead of \[96\]"),
        ({NORM: np.ones(64, "float64")}, f"of a dtype other than F32, BF16, F16: '{NORM}' F64"),
        ({NORM: np.ones(64, "int8")}, f"'{NORM}' I8"),
        ({NORM: None, BIAS: None, "x": np.ones(1, "float32")}, "2 missing: .*; 1 unknown: 'x'"),
    ],
)
def test_load_with_wrong_tensors_names_each(tmp_path, no_model_built, tensors, match):
    path = golden.copy(tmp_path / "wrong", tensors=tensors)
    for load in (golden.model, lambda path: GriffinBackbone.from_preset(str(path))):
        assert_rejects(match, load, path)


@pytest.mark.parametrize(
    ("family", "dropped", "note"),
    [
        ("lfm2", ["block_multiple_of"], r"'block_multiple_of' is 256\. \d+ of another shape"),
        ("lfm2", ["vocab_size"], r"'vocab_size' is 65536, .*\. 1 of another shape"),
        ("lfm2", ["num_hidden_layers", "layer_types"], "'num_hidden_layers' is 32"),
        ("granite", ["layer_types"], r"'layer_types' is \['mamba', .*\]\. \d+ missing"),
        ("granite", ["tie_word_embeddings"], r"'tie_word_embeddings' is False\. 1 missing"),
    ],
)
def test_load_without_a_size_says_its_default(tmp_path, family, dropped, note):
    """Tensors are listed as wrong, where `config.json` lacks a key."""
    folder = golden.DATA / f"{family}_tiny"
    shutil.copy(folder / "model.safetensors", tmp_path)
    config = {k: v for k, v in golden.read_config(folder).items() if k not in dropped}
    (tmp_path / "config.json").write_text(json.dumps(config))
    match = f"Keys that config.json of .* lacks have default values: .*{note}"
    assert_rejects(match, keras_hub.models.Backbone.from_preset, str(tmp_path))


@pytest.mark.parametrize(
    ("source", "renamed", "extra"),
    [
        ("nemotron_h", ("backbone.", "model."), "mtp.layers.0.norm.weight"),
        ("mamba2", ("backbone.embeddings.", "backbone.embedding."), None),
    ],
)
def test_checkpoint_with_other_names_of_tensors_loads_equal_weights(
    tmp_path, source, renamed, extra
):
    """Weights of transformers' modules, of older files or next to prediction heads do not load."""
    folder = golden.DATA / f"{source}_tiny"
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    other = {name.replace(*renamed): array for name, array in tensors.items()}
    if extra:
        other[extra] = np.ones(3, "float32")
    save_file(other, tmp_path / "model.safetensors")
    found = MambaHybridBackbone.from_preset(str(tmp_path))
    golden.assert_equal_weights(found, MambaHybridBackbone.from_preset(str(folder)))
    save_file({**other, **tensors}, tmp_path / "model.safetensors")
    assert_rejects("twice, under the names", MambaHybridBackbone.from_preset, str(tmp_path))


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_load_of_truncated_file_names_the_file(tmp_path, no_model_built, keep):
    path = golden.copy(tmp_path / "cut")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert_rejects(r"model.safetensors is damaged or cut off .* Fetch it", golden.model, path)


def write_shards(folder):
    """Writes the golden checkpoint as two files with an index; returns the index."""
    golden.copy(folder)
    tensors = load_file(golden.TENSORS)
    weight_map = {}
    for i, names in enumerate((sorted(tensors)[:30], sorted(tensors)[30:])):
        save_file({name: tensors[name] for name in names}, folder / f"part{i}.safetensors")
        weight_map |= dict.fromkeys(names, f"part{i}.safetensors")
    (folder / "model.safetensors").unlink()
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda index: index.update({NORM: "part2.safetensors"}), "no part2.safetensors"),
        (lambda index: index.update({NORM: "part1.safetensors"}), f"'{NORM}' is in the file alone"),
        (lambda index: index.update(x="part1.safetensors"), "'x' is in the index alone"),
        (lambda index: index.update({NORM: "../part0.safetensors"}), "only from .safetensors"),
        (lambda index: index.update({NORM: "part0.bin"}), "names 'part0.bin'"),
        (lambda index: index.update({NORM: 3}), "names 3. Tensors are read"),
        (lambda index: index.update({NORM: ["part0.safetensors"]}), "names .'part0.safetensors'."),
        (lambda index: index.clear(), "has no 'weight_map'"),
    ],
)
def test_load_with_wrong_index_names_the_entry(tmp_path, no_model_built, change, match):
    weight_map = write_shards(tmp_path)
    change(weight_map)
    write_index(tmp_path, weight_map)
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        golden.model(tmp_path)


def test_load_with_tensor_twice_in_the_header_names_it(tmp_path, no_model_built):
    file = golden.copy(tmp_path / "twice") / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    entry = json.dumps(json.loads(content[8:end])[NORM])
    header = f'{{"{NORM}":{entry},{content[9:end].decode()}'.encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    with pytest.raises(ValueError, match=f"model.safetensors has the key '{NORM}' twice"):
        golden.model(tmp_path / "twice")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_load_of_nan_or_infinity_warns_once_with_names(tmp_path, dtype):
    nan = np.ones(96, dtype)
    nan[5] = np.nan
    path = golden.copy(tmp_path / "nan", tensors={BIAS: nan, NORM: -nan[:64]})
    with pytest.warns(UserWarning, match="hold NaN.*: 'model.*' and 1 more") as warnings:
        golden.model(path)
    assert len(warnings) == 1
    one = golden.copy(tmp_path / "one", tensors={BIAS: -nan, NORM: np.full(64, np.inf, dtype)})
    with pytest.warns(UserWarning, match=f"hold NaN.*: '{BIAS}'. The files"):
        golden.model(one)


def test_load_of_pickled_weights_raises(tmp_path, no_model_built):
    path = golden.copy(tmp_path / "pickled")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model.bin, which is pickled"):
        golden.model(path)
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors .*load_weights=False"):
        golden.model(path)


# === Configuration ===


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"hidden_activation": "relu"}, "'hidden_activation' is 'relu' in config.json of .*"),
        ({"hidden_act": "gelu"}, "'hidden_act', which this version does not know"),
        ({"block_types": ["recurrent", "mamba"]}, "'block_types' is .*'recurrent' and 'attention'"),
        ({"block_types": []}, "'block_types' is"),
        ({"conv1d_width": 3}, "'conv1d_width' is 3 .* supports 4"),
        ({"attention_bias": True}, "'attention_bias' is True"),
        ({"tie_word_embeddings": False}, "'tie_word_embeddings' is False"),
        ({"intermediate_size": 191}, "'intermediate_size' is 191 .* a multiple of 2"),
        ({"hidden_size": "64"}, "'hidden_size' is '64' .* an integer"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"num_hidden_layers": 10**7}, "'num_hidden_layers' is 10000000 .* at most 10000"),
        ({"hidden_size": 10**400}, r"'hidden_size' is 10+\.\.\.0+ in .* at most 2147483647"),
        ({"logits_soft_cap": -1}, "'logits_soft_cap' is -1 .* above 0"),
        ({"logits_soft_cap": float("inf")}, "'logits_soft_cap' is inf .* finite in float32"),
        ({"logits_soft_cap": 1e300}, "'logits_soft_cap' is 1e.300 .* finite in float32"),
        ({"rms_norm_eps": float("inf")}, "'rms_norm_eps' is inf"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ({"rms_norm_eps": 10**400}, "'rms_norm_eps' is 1000"),
        ({"rms_norm_eps": 1e-60}, "'rms_norm_eps' is 1e-60 .* a number above 0"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 1.5}}, "is 1.5 in .* at most 1"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.2}}, "'head_dim', 16, .* even"),
        ({"num_key_value_heads": 3}, "is 3 in .* a divisor of 'num_attention_heads', 4"),
        ({"lru_width": 66}, "is 66 in .* a multiple of 'num_attention_heads', 4"),
        ({f"key{i:03}": i for i in range(500)}, "'key003' and 496 more, which this version"),
        ({"model_type": ["recurrent_gemma"]}, "'model_type' is .'recurrent_gemma'. .* a string"),
        ({"model_type": "mamba9"}, "config.json of .* is of an unknown model"),
        ({"model_type": None, "registered_name": 3}, "'(model_type|registered_name)' is .* string"),
        ({"rope_parameters": {**ROPE, "rope_type": "yarn"}}, "'rope_type' is 'yarn' in 'rope_par"),
        ({"rope_parameters": {**ROPE, "factor": 8.0}}, "'rope_parameters' of .* has 'factor'"),
        ({"rope_parameters": ROPE, "rope_theta": 5e5}, "'rope_theta' is 500000.0 in"),
        ({"rope_scaling": {"type": "linear"}}, "'rope_scaling' is"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config', which this version"),
    ],
)
def test_load_with_unsupported_config_names_the_key(tmp_path, no_model_built, config, match):
    path = golden.copy(tmp_path / "wrong", config=config)
    for load_weights in (None, False):
        assert_rejects(match, golden.model, path, load_weights=load_weights)


def test_config_without_optional_keys_has_the_published_defaults(tmp_path):
    keys = ("rope_parameters", "num_key_value_heads", "lru_width", "head_dim", "block_types")
    path = golden.copy(tmp_path / "old", config={"partial_rotary_factor": 0.25}, drop=keys)
    expected = {
        "partial_rotary_factor": 0.25,
        "num_key_value_heads": 1,
        "lru_width": 64,
        "head_dim": 16,
        "block_types": ("recurrent", "recurrent", "local_attention"),
        "sliding_window": 17,
    }
    assert golden.model(path).backbone.get_config().items() >= expected.items()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold a JSON object"),
        (b"\xff", "config.json is not JSON"),
        ('{"a": 1, "b": {"c": 1, "d": 2, "c": 3}}', "config.json has the key 'c' twice"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "config.json is nested too deeply"),
        ('{"model_type": "recurrent_gemma", "hidden_size": 1' + "0" * 5000 + "}", "is not JSON"),
        ('{"hidden_size": ' + "[" * 300 + "]" * 300 + ",", "'hidden_size' is "),
    ],
    ids=["cut off", "list", "bytes", "key twice", "deep objects", "long integer", "deep lists"],
)
def test_load_of_unreadable_config_names_the_fault(tmp_path, content, match):
    file = golden.copy(tmp_path / "broken", drop=("hidden_size",)) / "config.json"
    content = content.encode() if isinstance(content, str) else content
    # A content that ends with a comma replaces the first character, the brace.
    file.write_bytes(content + file.read_bytes()[1:] if content.endswith(b",") else content)
    assert_rejects(match, golden.model, file.parent)


def test_load_with_more_blocks_than_tensors_raises(tmp_path, no_model_built):
    path = golden.copy(tmp_path / "deep", config={"num_hidden_layers": 10_000})
    assert_rejects(r"config.json of .* describes 10000 blocks, more than the", golden.model, path)


def test_load_of_too_large_config_raises(tmp_path, monkeypatch):
    path = golden.copy(tmp_path / "large")
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 100)
    assert_rejects(r"config.json has .* bytes and is not read", golden.model, path)


# === Arguments of from_preset ===


def test_from_preset_applies_overrides():
    model = golden.model(name="gemma", compile=False)
    assert (model.name, model.compiled, model.preprocessor) == ("gemma", False, None)
    fresh = golden.model(load_weights=False, num_layers=1)
    assert len(fresh.backbone.transformer_layers) == 1
    assert fresh.backbone.hidden_dim == 64
    model = golden.model(
        tokenizer=ByteTokenizer(), sequence_length=8, load_weights=False, vocabulary_size=259
    )
    assert model.preprocessor.sequence_length == 8


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"num_layers": 1}, "'num_layers': the weights in .* fit only"),
        ({"num_layer": 1}, "'num_layer', which nothing takes"),
        ({"sequence_length": 8}, "'sequence_length': .* neither tokenizer.model nor tokenizer"),
        ({"dtype": "int8_from_float32"}, "`dtype` must not be a quantized policy; got 'int8_from"),
    ],
)
def test_from_preset_with_unsupported_override_names_it(overrides, match):
    assert_rejects(match, golden.model, **overrides)


# === The Hub ===


@pytest.fixture
def hub_requests(monkeypatch):
    """Replaces the Hub by the golden checkpoint; lists the requested repositories and files."""
    requests = []

    def download(repo_id, filename):
        requests.append((repo_id, filename))
        if not (golden.PATH / filename).exists():
            raise errors.EntryNotFoundError(filename)
        return str(golden.PATH / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return requests


def test_from_preset_with_published_name_rejects_overrides_that_change_weights(hub_requests):
    with pytest.raises(ValueError, match="'num_layers': the weights in 'recurrentgemma_2b' fit"):
        GriffinCausalLM.from_preset("recurrentgemma_2b", num_layers=1)


def test_from_preset_of_a_hub_config_with_ambiguous_window_warns(
    hub_requests, tmp_path, monkeypatch
):
    """No warning for an ambiguous window, or one for the published preset."""
    path = golden.copy(tmp_path / "published", drop=["window_includes_current_token"])
    monkeypatch.setattr(golden, "PATH", path)
    assert GriffinBackbone.from_preset("recurrentgemma_2b").get_config()["sliding_window"] == 17
    match = "'window_includes_current_token' there: to false"
    with pytest.warns(UserWarning, match=match) as warnings:
        GriffinCausalLM.from_preset("hf://google/recurrentgemma-2b")
    assert len(warnings) == 1


CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
TOKENIZER, BPE = "tokenizer.model", "tokenizer.json"
NETWORK = (CONFIG, INDEX, WEIGHTS)  # the index is requested, but does not exist
# Files that are requested next to a tokenizer, but do not exist.
SETTINGS = "tokenizer_config.json"
CHAT = {"chat_template.jinja", SETTINGS, "generation_config.json"}


@pytest.mark.parametrize(
    ("load", "requested"),
    [
        (GriffinCausalLM.from_preset, {*NETWORK, TOKENIZER, *CHAT}),
        (keras_hub.models.Backbone.from_preset, {*NETWORK}),
        (keras_hub.models.CausalLMPreprocessor.from_preset, {CONFIG, TOKENIZER, *CHAT}),
        (SentencePieceTokenizer.from_preset, {CONFIG, TOKENIZER, SETTINGS}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
@pytest.mark.parametrize(
    ("preset", "with_tokenizer"),
    [("hf://google/recurrentgemma-2b", True), ("recurrentgemma_2b", False)],
)
def test_from_preset_of_the_hub_fetches_each_file_once_and_loads_the_weights(
    hub_requests, tmp_path, monkeypatch, sentence_piece, load, requested, preset, with_tokenizer
):
    path = golden.copy(
        tmp_path / "once", files={TOKENIZER: sentence_piece} if with_tokenizer else {}
    )
    if TOKENIZER in requested and not with_tokenizer:
        requested = {*requested, BPE}
    monkeypatch.setattr(golden, "PATH", path)
    opened = []

    def counting_open(file, *args, **kwargs):
        opened.append(os.path.basename(str(file)))
        return open(file, *args, **kwargs)

    monkeypatch.setattr(files, "open", counting_open, raising=False)
    for _ in range(2):  # a call must not depend on files of the call before
        hub_requests.clear()
        opened.clear()
        if with_tokenizer or WEIGHTS in requested:
            loaded = load(preset)
        else:
            with pytest.raises(FileNotFoundError, match=r"There is no tokenizer.model"):
                load(preset)
        expected = requested if with_tokenizer else requested - CHAT
        assert sorted(file for _, file in hub_requests) == sorted(expected)
        assert opened == [CONFIG]
        assert {repository for repository, _ in hub_requests} == {"google/recurrentgemma-2b"}
    if WEIGHTS in requested:
        golden.assert_equal_weights(loaded, golden.model())


def test_from_preset_never_fetches_pickled_weights(hub_requests, tmp_path, monkeypatch):
    path = golden.copy(tmp_path / "pickled")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    monkeypatch.setattr(golden, "PATH", path)
    with pytest.raises(FileNotFoundError, match=r"If it has pytorch_model.bin, .* never read"):
        GriffinCausalLM.from_preset("hf://google/recurrentgemma-2b")
    assert "pytorch_model.bin" not in {file for _, file in hub_requests}


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (errors.GatedRepoError, PermissionError, "its terms are accepted"),
        (errors.RepositoryNotFoundError, ValueError, "no repository"),
        (errors.HFValidationError, ValueError, "'hf://owner/repository'"),
        (errors.LocalEntryNotFoundError, ConnectionError, "cannot be reached"),
    ],
)
def test_from_preset_explains_errors_of_the_hub(monkeypatch, error, kind, match):
    def download(**kwargs):
        raise error.__new__(error)  # its constructor requires a response

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for preset in ("hf://google/recurrentgemma-2b", "recurrentgemma_2b"):
        with pytest.raises(kind, match=match):
            GriffinCausalLM.from_preset(preset)


def test_from_preset_without_packages_names_package_and_extra(monkeypatch):
    import_module = importlib.import_module

    def import_others(name):
        package = name.partition(".")[0]
        if package in ("safetensors", "huggingface_hub"):
            raise ModuleNotFoundError(name=package)
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", import_others)
    install = "takes the package '{0}': the extra `huggingface` .*, or pip install {0}"
    with pytest.raises(ImportError, match=install.format("safetensors")):
        golden.model()
    with pytest.raises(ImportError, match=install.format("huggingface_hub")):
        golden.model("hf://google/recurrentgemma-2b")


# === The tokenizer ===


@pytest.mark.parametrize(
    ("config", "cut", "match"),
    [
        ({"eos_token_id": "1"}, 0, "'eos_token_id' is .* must be an integer"),
        ({"bos_token_id": [[]]}, 0, "'bos_token_id' is .* must be an integer"),
        ({"pad_token_id": 10**6}, 0, "made of .*tokenizer.model: `pad_token_id` must be"),
        ({}, 200, "made of .*tokenizer.model"),
    ],
)
def test_load_with_broken_tokenizer_raises_before_reading_weights(
    tmp_path, monkeypatch, sentence_piece, config, cut, match
):
    content = sentence_piece[: len(sentence_piece) - cut]
    path = golden.copy(tmp_path / "text", config=config, files={TOKENIZER: content})
    monkeypatch.setattr(loaders.RecurrentPresetLoader, "load_backbone", None)
    assert_rejects(match, golden.model, path)
