"""Faulty checkpoints raise an error that names the fault, before a model is built."""

import importlib
import json
import os
import shutil

import huggingface_hub
import keras
import keras_hub
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import load_file, save_file

from keras_recurrent.checkpoints import files, loaders
from keras_recurrent.models import (
    GriffinBackbone,
    GriffinCausalLM,
    GriffinCausalLMPreprocessor,
)
from keras_recurrent.tokenizers import ByteTokenizer, SentencePieceTokenizer
from tests.checkpoints import golden

NORM = "model.final_norm.weight"
BIAS = "model.layers.0.mlp_block.up_proj.bias"
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@pytest.fixture
def nothing_built(monkeypatch):
    def init(*args, **kwargs):
        raise AssertionError("a model was built")

    monkeypatch.setattr(GriffinBackbone, "__init__", init)


pytestmark = pytest.mark.once


# === Tensors ===


def test_weights_that_are_read_are_not_random_first(monkeypatch):
    """Random numbers take longer than reading, and temporary arrays of the size of the model."""

    def fail(self, shape, dtype=None, **kwargs):
        raise AssertionError("random numbers")

    for initializer in (keras.initializers.VarianceScaling, keras.initializers.RandomNormal):
        monkeypatch.setattr(initializer, "__call__", fail)
    GriffinBackbone.from_preset(str(golden.PATH))
    with pytest.raises(AssertionError, match="random numbers"):
        GriffinBackbone.from_preset(str(golden.PATH), load_weights=False)


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
def test_tensors_that_are_not_the_models(tmp_path, nothing_built, tensors, match):
    path = golden.copy(tmp_path / "wrong", tensors=tensors)
    for load in (golden.model, lambda path: GriffinBackbone.from_preset(str(path))):
        with pytest.raises(ValueError, match=match):
            load(path)


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_files_that_are_cut_off(tmp_path, nothing_built, keep):
    path = golden.copy(tmp_path / "cut")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or cut off .* Fetch it"):
        golden.model(path)


def sharded(folder):
    """The golden checkpoint in two files with an index."""
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


def test_an_index_and_its_files(tmp_path):
    sharded(tmp_path)
    wanted = golden.model().get_weights()
    for a, b in zip(golden.model(tmp_path).get_weights(), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda index: index.update({NORM: "part2.safetensors"}), "no part2.safetensors"),
        (lambda index: index.update({NORM: "part1.safetensors"}), f"'{NORM}' is in the file alone"),
        (lambda index: index.update(x="part1.safetensors"), "'x' is in the index alone"),
        (
            lambda index: index.update({NORM: "../part0.safetensors"}),
            "only from .safetensors files",
        ),
        (lambda index: index.update({NORM: "part0.bin"}), "names 'part0.bin'"),
        (lambda index: index.update({NORM: 3}), "names 3. Tensors are read"),
        (lambda index: index.update({NORM: ["part0.safetensors"]}), "names .'part0.safetensors'."),
        (lambda index: index.clear(), "has no 'weight_map'"),
    ],
)
def test_an_index_that_does_not_tell_what_is_there(tmp_path, nothing_built, change, match):
    weight_map = sharded(tmp_path)
    change(weight_map)
    write_index(tmp_path, weight_map)
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        golden.model(tmp_path)


def with_header(path, change):
    """The golden checkpoint with another text in the header of its tensors' file."""
    golden.copy(path)
    file = path / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = change(content[8:end].decode()).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    return path


def test_a_header_with_a_name_twice(tmp_path, nothing_built):
    def change(header):
        entry = json.dumps(json.loads(header)[NORM])
        return f'{{"{NORM}":{entry},{header[1:]}'

    with pytest.raises(ValueError, match=f"model.safetensors has the key '{NORM}' twice"):
        golden.model(with_header(tmp_path / "twice", change))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_that_are_not_numbers_are_told_once(tmp_path, dtype):
    nan = np.ones(96, dtype)
    nan[5] = np.nan
    path = golden.copy(tmp_path / "nan", tensors={BIAS: nan, NORM: -nan[:64]})
    with pytest.warns(UserWarning, match="hold NaN.*: 'model.*' and 1 more") as warnings:
        golden.model(path)
    assert len(warnings) == 1
    one = golden.copy(tmp_path / "one", tensors={BIAS: -nan, NORM: np.full(64, np.inf, dtype)})
    with pytest.warns(UserWarning, match=f"hold NaN.*: '{BIAS}'. The files"):
        golden.model(one)


def test_pickled_weights_are_not_read(tmp_path, nothing_built):
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
def test_configurations_that_are_not_served(tmp_path, nothing_built, config, match):
    path = golden.copy(tmp_path / "wrong", config=config)
    for load_weights in (None, False):
        with pytest.raises(ValueError, match=match):
            golden.model(path, load_weights=load_weights)


def test_what_a_configuration_may_leave_out(tmp_path):
    keys = ("rope_parameters", "num_key_value_heads", "lru_width", "head_dim", "block_types")
    path = golden.copy(tmp_path / "old", config={"partial_rotary_factor": 0.25}, drop=keys)
    config = golden.model(path).backbone.get_config()
    assert config["partial_rotary_factor"] == 0.25
    assert (config["num_key_value_heads"], config["lru_width"], config["head_dim"]) == (1, 64, 16)
    assert config["block_types"] == ("recurrent", "recurrent", "local_attention")
    assert config["sliding_window"] == 17
    path = golden.copy(tmp_path / "less", drop=("hidden_size",))
    with pytest.raises(ValueError, match="has no 'hidden_size'"):
        golden.model(path)


def test_configurations_that_cannot_be_read(tmp_path):
    path = golden.copy(tmp_path / "broken", drop=("hidden_size",))
    rest = "," + (path / "config.json").read_text()[1:]
    for content, match in [
        ("{", "is not JSON"),
        ("[1]", "must hold a JSON object"),
        (b"\xff", "config.json is not JSON"),
        ('{"a": 1, "b": {"c": 1, "d": 2, "c": 3}}', "config.json has the key 'c' twice"),
        ('{"a": ' * 5000 + "1" + "}" * 5000, "config.json is nested too deeply"),
        ('{"model_type": "recurrent_gemma", "hidden_size": 1' + "0" * 5000 + "}", "is not JSON"),
        ('{"hidden_size": ' + "[" * 300 + "]" * 300 + rest, "'hidden_size' is "),
    ]:
        content = content.encode() if isinstance(content, str) else content
        (path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=match):
            golden.model(path)


def test_more_blocks_than_there_are_tensors(tmp_path, nothing_built):
    path = golden.copy(tmp_path / "deep", config={"num_hidden_layers": 10_000})
    with pytest.raises(ValueError, match=r"config.json of .* says 10000 blocks, more than the we"):
        golden.model(path)


def test_files_larger_than_any_configuration(tmp_path, monkeypatch):
    path = golden.copy(tmp_path / "large")
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 100)
    with pytest.raises(ValueError, match=r"config.json has .* bytes and is not read"):
        golden.model(path)


# === Arguments of from_preset ===


def test_overrides_of_a_checkpoint():
    model = golden.model(name="gemma", compile=False)
    assert (model.name, model.compiled, model.preprocessor) == ("gemma", False, None)
    fresh = golden.model(load_weights=False, num_layers=1)
    assert len(fresh.backbone.transformer_layers) == 1
    assert fresh.backbone.hidden_dim == 64
    for kwargs, match in [
        ({"num_layers": 1}, "'num_layers': the weights in .* fit only"),
        ({"num_layer": 1}, "'num_layer', which nothing takes"),
        (
            {"sequence_length": 8},
            "'sequence_length': .* neither tokenizer.model nor tokenizer",
        ),
        ({"dtype": "int8_from_float32"}, "`dtype` must not be a quantized policy; got 'int8_from"),
    ]:
        with pytest.raises(ValueError, match=match):
            golden.model(**kwargs)
    model = golden.model(
        tokenizer=ByteTokenizer(), sequence_length=8, load_weights=False, vocabulary_size=259
    )
    assert model.preprocessor.sequence_length == 8


def test_kerashubs_own_classes_read_it():
    wanted = golden.model().get_weights()
    for model in (
        keras_hub.models.CausalLM.from_preset(str(golden.PATH)),
        keras_hub.models.Backbone.from_preset(str(golden.PATH)),
    ):
        for a, b in zip(model.get_weights(), wanted, strict=True):
            np.testing.assert_array_equal(a, b)


# === The Hub ===


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the Hub: it has the golden checkpoint, and remembers what it was asked."""
    asked = []

    def download(repo_id, filename):
        asked.append((repo_id, filename))
        if not (golden.PATH / filename).exists():
            raise errors.EntryNotFoundError(filename)
        return str(golden.PATH / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


def test_a_name_of_the_hub(hub):
    wanted = golden.model().get_weights()
    for load, preset in [
        (GriffinCausalLM.from_preset, "hf://google/recurrentgemma-2b"),
        (GriffinCausalLM.from_preset, "recurrentgemma_2b"),
        (keras_hub.models.CausalLM.from_preset, "recurrentgemma_2b"),
        (GriffinBackbone.from_preset, "recurrentgemma_2b"),
    ]:
        hub.clear()
        model = load(preset)
        assert {repository for repository, _ in hub} == {"google/recurrentgemma-2b"}
        assert {"config.json", "model.safetensors"} <= {file for _, file in hub}
        for a, b in zip(model.get_weights(), wanted, strict=True):
            np.testing.assert_array_equal(a, b)
        assert getattr(model, "preprocessor", None) is None
    with pytest.raises(ValueError, match="'num_layers': the weights in 'recurrentgemma_2b' fit"):
        GriffinCausalLM.from_preset("recurrentgemma_2b", num_layers=1)


def test_from_preset_without_meaning_of_window_warns_unless_named(hub, tmp_path, monkeypatch):
    """A model trained in transformers beyond its window silently gets other logits."""
    path = golden.copy(tmp_path / "published", drop=["window_includes_current_token"])
    monkeypatch.setattr(golden, "PATH", path)
    assert GriffinBackbone.from_preset("recurrentgemma_2b").get_config()["sliding_window"] == 17
    with pytest.warns(UserWarning, match="'window_includes_current_token' there: to false") as said:
        GriffinCausalLM.from_preset("hf://google/recurrentgemma-2b")
    assert len(said) == 1


CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
TOKENIZER, BPE = "tokenizer.model", "tokenizer.json"
NETWORK = (CONFIG, INDEX, WEIGHTS)  # the index is asked for, and is not there
# Asked for where there is a tokenizer, and not there.
SETTINGS = "tokenizer_config.json"
CHAT = {"chat_template.jinja", SETTINGS, "generation_config.json"}


@pytest.mark.parametrize("preset", ["hf://google/recurrentgemma-2b", "recurrentgemma_2b"])
@pytest.mark.parametrize(
    ("load", "wanted"),
    [
        (GriffinCausalLM.from_preset, {*NETWORK, TOKENIZER, *CHAT}),
        (keras_hub.models.CausalLM.from_preset, {*NETWORK, TOKENIZER, *CHAT}),
        (GriffinBackbone.from_preset, {*NETWORK}),
        (keras_hub.models.Backbone.from_preset, {*NETWORK}),
        (GriffinCausalLMPreprocessor.from_preset, {CONFIG, TOKENIZER, *CHAT}),
        (keras_hub.models.CausalLMPreprocessor.from_preset, {CONFIG, TOKENIZER, *CHAT}),
        (SentencePieceTokenizer.from_preset, {CONFIG, TOKENIZER, SETTINGS}),
        (keras_hub.tokenizers.Tokenizer.from_preset, {CONFIG, TOKENIZER, SETTINGS}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_each_file_is_fetched_once(
    hub, tmp_path, monkeypatch, sentence_piece, load, wanted, preset, with_tokenizer
):
    path = golden.copy(tmp_path / "once")
    if with_tokenizer:
        (path / TOKENIZER).write_bytes(sentence_piece)
    elif TOKENIZER in wanted:
        wanted = {*wanted, BPE}
    monkeypatch.setattr(golden, "PATH", path)
    opened = []

    def counting_open(file, *args, **kwargs):
        opened.append(os.path.basename(str(file)))
        return open(file, *args, **kwargs)

    monkeypatch.setattr(files, "open", counting_open, raising=False)
    for _ in range(2):  # nothing is remembered from one call to the next
        hub.clear()
        opened.clear()
        if with_tokenizer or NETWORK[2] in wanted:
            load(preset)
        else:
            with pytest.raises(FileNotFoundError, match=r"There is no tokenizer.model"):
                load(preset)
        expected = wanted if with_tokenizer else wanted - CHAT
        assert sorted(file for _, file in hub) == sorted(expected)
        assert opened == [CONFIG]


def test_a_directory_of_keras_is_found_once(tmp_path, monkeypatch):
    """KerasHub reads its own files of it as it likes, but for the configuration."""
    GriffinCausalLM.from_preset("hawk_tiny", num_layers=1).save_to_preset(str(tmp_path))
    fetched = []

    def fetch(preset, name):
        fetched.append(name)
        return files_fetch(preset, name)

    files_fetch = files.fetch
    monkeypatch.setattr(files, "fetch", fetch)
    for load, overrides in [
        (GriffinCausalLM.from_preset, {}),
        (GriffinCausalLM.from_preset, {"sequence_length": 8, "dtype": "bfloat16"}),
        (GriffinCausalLM.from_preset, {"num_layers": 2, "load_weights": False}),
        (GriffinBackbone.from_preset, {}),
        (keras_hub.models.CausalLM.from_preset, {}),
    ]:
        fetched.clear()
        load(str(tmp_path), **overrides)
        assert fetched == [CONFIG]


def test_pickled_weights_of_the_hub_are_not_even_fetched(hub, tmp_path, monkeypatch):
    path = golden.copy(tmp_path / "pickled")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    monkeypatch.setattr(golden, "PATH", path)
    with pytest.raises(FileNotFoundError, match=r"If it has pytorch_model.bin, .* never read"):
        GriffinCausalLM.from_preset("hf://google/recurrentgemma-2b")
    assert "pytorch_model.bin" not in {file for _, file in hub}


def test_fresh_models_of_published_names_need_no_network(hub):
    small = {"num_layers": 3, "vocabulary_size": 259, "hidden_dim": 16, "intermediate_dim": 16}
    small |= {"lru_width": 16, "head_dim": 8, "num_query_heads": 2}
    model = GriffinCausalLM.from_preset("recurrentgemma_9b_it", load_weights=False, **small)
    assert isinstance(model.preprocessor.tokenizer, ByteTokenizer)
    assert not hub


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (errors.GatedRepoError, PermissionError, "its terms are accepted"),
        (errors.RepositoryNotFoundError, ValueError, "no repository"),
        (errors.HFValidationError, ValueError, "'hf://owner/repository'"),
        (errors.LocalEntryNotFoundError, ConnectionError, "cannot be reached"),
    ],
)
def test_what_the_hub_may_answer(monkeypatch, error, kind, match):
    def download(**kwargs):
        raise error.__new__(error)  # made from a response otherwise

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for preset in ("hf://google/recurrentgemma-2b", "recurrentgemma_2b"):
        with pytest.raises(kind, match=match):
            GriffinCausalLM.from_preset(preset)


def test_missing_packages_are_named(monkeypatch):
    import_module = importlib.import_module

    def missing(name):
        package = name.partition(".")[0]
        if package in ("safetensors", "huggingface_hub"):
            raise ModuleNotFoundError(name=package)
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    install = "takes the package '{0}': the extra `huggingface` .*, or pip install {0}"
    with pytest.raises(ImportError, match=install.format("safetensors")):
        golden.model()
    with pytest.raises(ImportError, match=install.format("huggingface_hub")):
        golden.model("hf://google/recurrentgemma-2b")


# === The tokenizer ===


@pytest.mark.parametrize("ids", [{"eos_token_id": "1"}, {"bos_token_id": [[]]}, {}])
def test_a_tokenizer_that_is_broken(tmp_path, monkeypatch, sentence_piece, ids):
    """It is found before weights are read."""
    path = golden.copy(tmp_path / "text", config=ids)
    (path / "tokenizer.model").write_bytes(sentence_piece if ids else sentence_piece[:-200])
    monkeypatch.setattr(loaders.RecurrentPresetLoader, "load_backbone", None)
    match = f"'{next(iter(ids))}' is .* must be an integer" if ids else "made of .*tokenizer.model"
    with pytest.raises(ValueError, match=match):
        golden.model(path)
    if not ids:
        (path / "tokenizer.model").write_bytes(sentence_piece)
        golden.copy(path, config={"pad_token_id": 10**6})
        with pytest.raises(ValueError, match=r"made of .*tokenizer.model: `pad_token_id` must be"):
            golden.model(path)


def test_a_tokenizer_makes_the_preprocessor(tmp_path, sentence_piece):
    path = golden.copy(tmp_path / "text", config={"eos_token_id": [1, 5]})
    (path / "tokenizer.model").write_bytes(sentence_piece)
    model = golden.model(path, sequence_length=8, packed=True)
    tokenizer = model.preprocessor.tokenizer
    assert type(tokenizer) is SentencePieceTokenizer
    assert (tokenizer.start_token_id, tokenizer.end_token_id, tokenizer.pad_token_id) == (2, 1, 0)
    x, _, _ = model.preprocessor(["happy families"])
    assert keras.ops.convert_to_numpy(x["token_ids"])[0, 0] == 2
    assert model.generate("happy", max_length=12).startswith("happy")
    assert type(SentencePieceTokenizer.from_preset(str(path))) is SentencePieceTokenizer
    assert golden.model(path, preprocessor=None).preprocessor is None

    model.save_to_preset(str(tmp_path / "keras"))
    model.export_to_transformers(tmp_path / "export")
    for again in (
        GriffinCausalLM.from_preset(str(tmp_path / "keras")),
        golden.model(tmp_path / "export"),
    ):
        assert again.preprocessor.tokenizer("happy").tolist() == tokenizer("happy").tolist()
        assert again.preprocessor.tokenizer.start_token_id == 2
    written = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert written["bos_token"] == "<s>"
    shutil.rmtree(tmp_path / "keras")
