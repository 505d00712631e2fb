"""A published layout gives the numbers that other programs compute from it."""

import json
import tracemalloc

import keras
import keras_hub
import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import load_file

from keras_recurrent.checkpoints import export
from keras_recurrent.models import GriffinBackbone, GriffinCausalLM
from keras_recurrent.models.griffin.checkpoint import RecurrentGemma
from keras_recurrent.presets.griffin import SIZES as SIZES_OF_PRESETS
from keras_recurrent.presets.griffin import embedding_scale
from tests.checkpoints import golden
from tests.models import plain_generation
from tests.models.tiny import SIZES, tiny_causal_lm

# Two float32 programs that sum in different orders; a wrong constant shows at 1e-4 and above.
SAME = 3e-6


@pytest.fixture(scope="module")
def model():
    return golden.model()


@pytest.fixture(scope="module")
def wanted():
    return golden.arrays()


def test_logits(model, wanted):
    """Rows of 40 tokens, a window of 17."""
    assert golden.relative(golden.logits(model, wanted["token_ids"]), wanted["logits"]) < SAME


def test_logits_of_packed_documents(model, wanted):
    segment_ids = np.cumsum(wanted["packed_positions"] == 0, axis=1, dtype="int32")
    packed = golden.logits(model, wanted["token_ids"], segment_ids=segment_ids)
    assert golden.relative(packed, wanted["packed_logits"]) < SAME


def test_loss_and_gradients(wanted):
    model = golden.model()
    # A step so large that it is the gradient to the last digits.
    rate = 2.0**20
    model.compile(
        keras.optimizers.SGD(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[],
    )
    before = {w.path: keras.ops.convert_to_numpy(w) for w in model.weights}
    token_ids = wanted["token_ids"]
    loss = model.train_on_batch(golden.inputs(token_ids[:, :-1]), token_ids[:, 1:])
    np.testing.assert_allclose(loss, wanted["loss"], rtol=1e-6)
    gradients = {
        w.path: (before[w.path].astype("float64") - keras.ops.convert_to_numpy(w)) / rate
        for w in model.trainable_weights
    }
    theirs = {
        "linear_x.weight": ("linear_x/kernel", lambda g: g.T),
        "conv_1d.w": ("conv1d/kernel", lambda g: g),
        "rg_lru.a_param": ("rg_lru/a_logit", lambda g: -g),  # theirs is -Λ
        "rg_lru.a_gate.w": ("rg_lru/recurrence_gate/kernel", lambda g: g),
        "rg_lru.input_gate.w": ("rg_lru/input_gate/kernel", lambda g: g),
    }
    compared = 0
    for name, gradient in wanted.items():
        _, block, rest = (name.removeprefix("grad/") + "..").split(".", 2)
        if name == "grad/embedder.input_embedding":
            found = gradients["token_embedding/embeddings"]
        elif name.startswith("grad/"):
            weight, turn = theirs[rest.rstrip(".").removeprefix("recurrent_block.")]
            found = turn(gradients[f"block_{block}/temporal_block/{weight}"])
        else:
            continue
        assert golden.relative(found, gradient) < 10 * SAME, name
        compared += 1
    assert compared == 1 + 3 * 5


@pytest.mark.once
def test_greedy_continuation(model, wanted):
    prompt_length, written = int(wanted["greedy_prompt_length"]), wanted["greedy_token_ids"]
    given = np.broadcast_to(np.arange(written.shape[1]) < prompt_length, written.shape)
    model.compile(sampler="greedy")
    prompt = {"token_ids": np.where(given, written, 0), "padding_mask": given}
    found = model.generate(prompt, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(found, written)


@pytest.mark.once
def test_generation_far_past_the_window_is_that_of_plain_passes(model, wanted):
    """Ragged prompts, and four windows of tokens."""
    length = 68
    token_ids = np.tile(wanted["token_ids"], (1, 2))[:, :length]
    given = np.arange(length) < np.array([[45], [60]])
    prompt = np.where(given, token_ids, 0).astype("int32")

    def sampler():
        return keras_hub.samplers.RandomSampler(seed=1, temperature=3.0)

    expected, margin = plain_generation.sample(golden.model(), sampler(), prompt, given)
    assert margin > 1e-4
    model.compile(sampler=sampler())
    written = model.generate({"token_ids": prompt, "padding_mask": given}, stop_token_ids=None)
    np.testing.assert_array_equal(written["token_ids"], expected)
    cache = model.backbone.get_initial_state(2, max_length=length)
    # The current token's own key is not kept.
    assert cache["blocks"][2]["temporal_block"]["key"].shape[1] == 16


def assert_same_tensors(path, wanted, dtype):
    found = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == dtype, name
        assert found[name].tobytes() == array.astype(dtype).tobytes(), name


@pytest.mark.once
@pytest.mark.parametrize("max_shard_size", [5, 1e-4])
def test_a_round_trip_keeps_every_bit(model, tmp_path, max_shard_size):
    path = tmp_path / "new" / "checkpoint"
    path.mkdir(parents=True)
    model.export_to_transformers(path, max_shard_size=max_shard_size)
    assert_same_tensors(path, load_file(golden.TENSORS), "float32")
    config = json.loads((path / "config.json").read_text())
    ours = RecurrentGemma().backbone_arguments(config, "the export")
    original = json.loads((golden.PATH / "config.json").read_text())
    assert ours == RecurrentGemma().backbone_arguments(original, "the golden one")
    # Nothing but the checkpoint is left behind.
    assert [folder.name for folder in path.parent.iterdir()] == ["checkpoint"]
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if max_shard_size == 5:
        assert shards == ["model.safetensors"]
        return
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == shards
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert all(file.stat().st_size < 1.2e-4 * 1024**3 for file in path.glob("*.safetensors"))
    again = golden.model(path)
    for a, b in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.once
def test_bfloat16_files_come_and_go_as_they_are(tmp_path):
    tensors = {name: a.astype(bfloat16) for name, a in load_file(golden.TENSORS).items()}
    path = golden.copy(tmp_path / "bfloat16", tensors=tensors)
    model = golden.model(path, dtype="bfloat16")
    stored = {str(weight.dtype) for weight in model.backbone.token_embedding.weights}
    assert stored == {"bfloat16"}
    model.export_to_transformers(tmp_path / "again")
    assert_same_tensors(tmp_path / "again", tensors, bfloat16)
    # The same through float32, which holds every bfloat16.
    golden.model(path).export_to_transformers(tmp_path / "wide", dtype="bfloat16")
    assert_same_tensors(tmp_path / "wide", tensors, bfloat16)


@pytest.mark.once
def test_tensors_are_read_one_by_one(tmp_path):
    """Never all of a bfloat16 file at once, nor all in float32."""
    sizes = {"intermediate_size": 8192, "vocab_size": 1024, "num_hidden_layers": 6}
    peak, size = peak_of_loading(tmp_path, sizes)
    assert peak < 0.5 * size


@pytest.mark.once
def test_a_tensor_is_read_without_further_copies(tmp_path):
    """Keras on torch copies a bfloat16 array, then again to float32: five embeddings in all."""
    peak, size = peak_of_loading(tmp_path, {"vocab_size": 2**16, "num_hidden_layers": 1})
    assert peak < 1.25 * size


def peak_of_loading(tmp_path, sizes):
    """The bytes of Python and NumPy next to the weights of a bfloat16 file, and of the file."""
    large = {"hidden_size": 256, "intermediate_size": 512, "lru_width": 256, **sizes}
    with keras.device("cpu"):
        written = golden.model(config_only(tmp_path / "config", large), load_weights=False)
    path = tmp_path / "large"
    written.export_to_transformers(path, dtype="bfloat16")
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    tracemalloc.start()
    model = golden.model(path, dtype="bfloat16")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del model, written
    # JAX and TensorFlow may take NumPy's memory over.
    held = 0 if keras.backend.backend() == "torch" else size
    return peak - held, size


def config_only(folder, config):
    golden.copy(folder, config=config)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.once
def test_low_rank_weights_are_merged_in(tmp_path):
    model = golden.model()
    model.backbone.enable_lora(2)
    for weight in model.backbone.trainable_weights:
        weight.assign(0.1 * np.random.default_rng(0).normal(size=weight.shape))
    model.export_to_transformers(tmp_path / "merged")
    token_ids = golden.arrays()["token_ids"]
    exact = golden.logits(model, token_ids)
    found = golden.logits(golden.model(tmp_path / "merged"), token_ids)
    assert golden.relative(found, exact) < SAME
    assert golden.relative(golden.logits(golden.model(), token_ids), exact) > 0.01


@pytest.mark.once
def test_every_weight_has_its_tensor():
    arguments = golden.model().backbone.get_config()
    tensors = RecurrentGemma().tensors(arguments)
    shapes = {w.path: tuple(w.shape) for w in golden.model().backbone.weights}
    paths = [path for tensor in tensors for path in tensor.weights]
    assert sorted(paths) == sorted(shapes)
    for tensor in tensors:
        values = tensor.transform.to_weights(np.zeros(tensor.shape))
        assert [v.shape for v in values] == [shapes[path] for path in tensor.weights]


@pytest.mark.once
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_transformers_reads_an_export(model, tmp_path, wanted):
    """Rows of 40 tokens, a window of 17. Releases before 5 have no window in a forward pass."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    model.export_to_transformers(tmp_path / "export")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    token_ids = torch.tensor(wanted["token_ids"], dtype=torch.long)
    with torch.no_grad():
        logits = theirs(token_ids, use_cache=False).logits
    assert golden.relative(logits.numpy(), wanted["logits"]) < 10 * SAME


@pytest.mark.once
def test_an_export_counts_its_window_as_transformers_does(model, tmp_path, wanted):
    """There, `attention_window_size` is how many tokens a token sees, itself included.

    In the published files, as in the golden one, it is one less: how many come before it.
    """
    model.export_to_transformers(tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    token_ids, errors = wanted["token_ids"], []
    original = json.loads((golden.PATH / "config.json").read_text())
    for window in (config["attention_window_size"], original["attention_window_size"]):
        backbone = GriffinBackbone(**{**model.backbone.get_config(), "sliding_window": window})
        other = GriffinCausalLM(backbone)
        other.set_weights(model.get_weights())
        errors.append(golden.relative(golden.logits(other, token_ids), wanted["logits"]))
    assert errors[0] < SAME
    assert errors[1] > 0.01
    # By this key, which published files lack, the export loads as the same model.
    again = RecurrentGemma().backbone_arguments(config, "the export")
    assert again["sliding_window"] == model.backbone.sliding_window == 17
    assert config.pop("window_includes_current_token") is True
    with pytest.warns(UserWarning, match=r"without does not say .*'window_includes_current_token'"):
        arguments = RecurrentGemma().backbone_arguments(config, "without")
    assert arguments["sliding_window"] == 18
    recurrent = {**config, "block_types": ["recurrent"]}
    RecurrentGemma().backbone_arguments(recurrent, "without attention")
    wrong = {**config, "window_includes_current_token": 1}
    with pytest.raises(ValueError, match=r"'window_includes_current_token' is 1 .*true or false"):
        RecurrentGemma().backbone_arguments(wrong, "wrong")


@pytest.mark.once
@pytest.mark.parametrize(
    ("dtype", "number", "said"),
    [("float16", 1e6, r"1e\+06"), ("bfloat16", 3.4e38, r"3.4e\+38")],
)
def test_numbers_that_do_not_fit_are_said_before_anything_is_written(tmp_path, dtype, number, said):
    model = golden.model()
    kernel = model.backbone.transformer_layers[1].mlp.up_proj.kernel
    values = keras.ops.convert_to_numpy(kernel).copy()
    values[3, 5] = -number
    kernel.assign(values)
    name = r"'model\.layers\.1\.mlp_block\.up_proj\.weight'"
    with pytest.raises(ValueError, match=f"{dtype} holds .*{name} .*has one of {said}"):
        model.export_to_transformers(tmp_path / "new" / "export", dtype=dtype)
    assert not list(tmp_path.iterdir())
    values[3, 5] = 65504  # the largest of float16
    kernel.assign(values)
    model.export_to_transformers(tmp_path / "export", dtype=dtype)


@pytest.mark.once
def test_what_the_layout_cannot_hold_is_said_before_anything_is_written(tmp_path):
    gemma = {"num_blocks": 4, "embedding_scale": 4.0, "final_logit_soft_cap": 30.0}
    for block_types, kwargs, match in [
        (("recurrent", "local_attention"), {"final_logit_soft_cap": 30.0}, "`embedding_scale`"),
        (("recurrent", "local_attention"), {**gemma, "num_blocks": 8}, "`num_blocks` is 8"),
        (("recurrent", "global_attention"), gemma, "`block_types` is"),
        (("recurrent",), {**gemma, "sliding_window": None}, "no `sliding_window`|`sliding_window`"),
    ]:
        sizes = {**SIZES, "num_layers": 2, "block_types": block_types, **kwargs}
        with pytest.raises(ValueError, match=f"(?s){match}.*save_to_preset"):
            GriffinBackbone(**sizes).export_to_transformers(tmp_path / "export")
    fitting = {**gemma, "num_layers": 2, "block_types": ("recurrent", "local_attention")}
    model = tiny_causal_lm(**fitting)
    model.export_to_transformers(tmp_path / "export")
    again = golden.model(tmp_path / "export")
    token_ids = np.arange(3, 15)[None].astype("int32")
    wanted = golden.logits(model, token_ids)
    assert golden.relative(golden.logits(again, token_ids), wanted) < 1e-6
    with pytest.raises(FileExistsError, match="not empty"):
        model.export_to_transformers(tmp_path / "export")
    with pytest.raises(ValueError, match="`dtype` must be one of float32"):
        model.export_to_transformers(tmp_path / "other", dtype="int8")
    for size in (0, "5GB"):
        with pytest.raises(ValueError, match="`max_shard_size` must be a number of gigabytes"):
            model.export_to_transformers(tmp_path / "other", max_shard_size=size)
    assert [folder.name for folder in tmp_path.iterdir()] == ["export"]


@pytest.mark.once
def test_all_that_the_layout_cannot_hold_is_said_at_once(tmp_path):
    """The error leaves out a restriction that docs/checkpoints.md lists."""
    unfit = {
        "lru_width": None,
        "sliding_window": None,
        "num_blocks": 8,
        "block_types": ("global_attention",),
        "embedding_scale": 16**0.5 + 1e-3,
        "final_logit_soft_cap": None,
        "recurrence": "cg_lru",
        "scale_first_input": True,
        "partial_rotary_factor": 0.0,
        "layer_norm_epsilon": 0.0,
    }
    backbone = GriffinBackbone(**{**SIZES, **unfit})
    with pytest.raises(ValueError, match="save_to_preset") as raised:
        backbone.export_to_transformers(tmp_path / "export")
    for name, value in unfit.items():
        assert f"`{name}` is {value!r}, and must be " in str(raised.value)
    assert "4.0, which is sqrt(hidden_dim) rounded to bfloat16" in str(raised.value)
    hawk = {**SIZES, "num_query_heads": None, "block_types": ("recurrent",), "embedding_scale": 4.0}
    with pytest.raises(ValueError, match=r"`num_query_heads` is None.*`final_logit_soft_cap`"):
        GriffinBackbone(**hawk).export_to_transformers(tmp_path / "export")
    assert not list(tmp_path.iterdir())


@pytest.mark.once
def test_an_export_leaves_what_is_not_an_empty_directory(tmp_path, monkeypatch):
    model = golden.model()
    links = tmp_path / "to a directory", tmp_path / "to nothing"
    (tmp_path / "directory").mkdir()
    links[0].symlink_to(tmp_path / "directory")
    links[1].symlink_to(tmp_path / "nothing")
    for path in links:
        with pytest.raises(FileExistsError, match="is a symbolic link"):
            model.export_to_transformers(path)
    # Another process exports to the same place, and ends first.
    write_tokenizer = export.tokenizer_files.write

    def write_last(*arguments):
        (tmp_path / "directory" / "config.json").write_text("{}")
        return write_tokenizer(*arguments)

    monkeypatch.setattr(export.tokenizer_files, "write", write_last)
    with pytest.raises(FileExistsError, match="was empty when this export began"):
        model.export_to_transformers(tmp_path / "directory")
    assert (tmp_path / "directory" / "config.json").read_text() == "{}"
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
def test_a_quantized_model_is_not_exported(tmp_path):
    model = golden.model()
    model.quantize("int8")
    with pytest.raises(ValueError, match="before `quantize`"):
        model.export_to_transformers(tmp_path / "export")
    assert not list(tmp_path.iterdir())


@pytest.mark.once
def test_the_published_configurations_are_the_presets():
    """As transformers 4 wrote them, with a key of that time."""
    for name, hidden_size, layers, heads in [("2b", 2560, 26, 10), ("9b", 4096, 38, 16)]:
        config = {
            "architectures": ["RecurrentGemmaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attention_window_size": 2048,
            "block_types": ["recurrent", "recurrent", "attention"],
            "_block_types": ["recurrent", "recurrent", "attention"],
            "bos_token_id": 2,
            "conv1d_width": 4,
            "embeddings_scale_by_sqrt_dim": True,
            "eos_token_id": 1,
            "final_w_init_variance_scale": 2 / layers,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": hidden_size,
            "intermediate_size": 6 * hidden_size,
            "logits_soft_cap": 30.0,
            "lru_width": hidden_size,
            "model_type": "recurrent_gemma",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": None,
            "pad_token_id": 0,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.42.0.dev0",
            "use_cache": True,
            "vocab_size": 256000,
            "w_init_variance_scale": 0.01,
        }
        row = SIZES_OF_PRESETS[f"recurrentgemma_{name}"]
        config |= row.config_defaults
        arguments = RecurrentGemma().backbone_arguments(config, "config.json")
        preset = row.backbone_arguments
        assert {key: preset.get(key, arguments[key]) for key in arguments} == arguments
        tensors = RecurrentGemma().tensors(arguments)
        count = sum(int(np.prod(tensor.shape)) for tensor in tensors)
        assert count == row.parameters
    assert embedding_scale(2560) == 50.5
    assert embedding_scale(4096) == 64
