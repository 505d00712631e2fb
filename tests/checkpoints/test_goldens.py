"""Tiny checkpoints in the published layouts, compared with outputs of independent programs.

`golden.npz` holds logits, from the recurrence in float64, token by token (flash-linear-attention
0.6.0 agrees on a GPU), or from the original programs in float32, with gradients and padded
sequences.
"""

import keras
import keras_hub
import numpy as np
import pytest
from ml_dtypes import bfloat16

from keras_recurrent.checkpoints import layout
from keras_recurrent.models.griffin.checkpoint import RecurrentGemma
from tests.checkpoints import golden

# The root mean square of float32's roundings, relative; mistakes show at 1e-4 and above.
ROUNDING = {
    "hgrn2_tiny": 1e-6,
    "recurrentgemma_tiny": 3e-6,
    "transnormer_tiny": 1.5e-6,
    "hgrn2_hybrid_tiny": 1.5e-6,
    "hypenet_tiny": 1.5e-6,
    "minicpm_sala_tiny": 1.5e-6,
    "nemotron_h_tiny": 2e-6,
    "granite_tiny": 2e-6,
    "mamba2_tiny": 2e-6,
    "falcon_h1_tiny": 2e-6,
    "lfm2_tiny": 1.5e-6,
}
MAMBA = ("nemotron_h_tiny", "granite_tiny", "mamba2_tiny", "falcon_h1_tiny")
# Checkpoints with layers of all kinds; other layouts differ in names and sizes of weights.
EVERY_BACKEND = ("hgrn2_tiny", "transnormer_tiny", "falcon_h1_tiny")


def only(*names):
    """Restricts a test to the checkpoints whose `golden.npz` has what the test compares."""
    return pytest.mark.parametrize("path", names, indirect=True)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in EVERY_BACKEND else [pytest.mark.once])
        for name in ROUNDING
    ],
)
def path(request):
    return golden.DATA / request.param


@pytest.fixture(scope="module")
def model(path):
    return load(path)


@pytest.fixture(scope="module")
def expected(path):
    return golden.arrays(path)


def load(path, **kwargs):
    return keras_hub.models.CausalLM.from_preset(str(path), **kwargs)


def test_logits_of_checkpoint_match_the_original(model, path, expected):
    logits = golden.logits(model, expected["token_ids"])
    assert golden.relative_error(logits, expected["logits"]) < ROUNDING[path.name]


@pytest.mark.once
@only("hgrn2_hybrid_tiny", "hypenet_tiny", "minicpm_sala_tiny", *MAMBA, "lfm2_tiny")
def test_gradients_of_loss_match_the_original(model, expected):
    """A gradient has another factor or sign, or too large a rounding error.

    The gradient of `dt_bias` in layer 3 of Nemotron-H has the largest errors: the terms of this sum
    over tokens are 42 times as large as the sum. Relative to its largest element, the errors
    compared with float64 are 1.0e-5 in the original program, 1.2e-5 on torch and 3.4e-5 on JAX,
    where a loop over tokens in float32, differentiated by JAX, has 2.5e-5. On torch and JAX, the
    terms have equal errors, which are rounding errors.
    """
    tensors = layout.get_layout(model.backbone).tensors(model.backbone.get_config())
    tensors = {tensor.name: tensor for tensor in tensors}
    actual = golden.loss_gradients(model, expected["token_ids"])
    for name in (name for name in expected if name.startswith("grad/")):
        tensor = tensors[name.removeprefix("grad/")]
        gradients = [actual[weight] for weight in tensor.weights]
        error = np.abs(tensor.transform.to_tensor(*gradients) - expected[name]).max()
        assert error < 2e-5 * np.abs(expected[name]).max(), name


@pytest.mark.once
@only("hgrn2_hybrid_tiny", "minicpm_sala_tiny", *MAMBA, "lfm2_tiny")
def test_logits_with_left_padding_match_the_original_without_padding(model, path, expected):
    real = expected["padded_mask"] > 0
    x = {"token_ids": expected["padded_token_ids"], "padding_mask": expected["padded_mask"]}
    logits = keras.ops.convert_to_numpy(model.predict_on_batch(x))
    error = golden.relative_error(logits[real], expected["padded_logits"][real])
    assert error < ROUNDING[path.name]


@pytest.mark.once
@only("hypenet_tiny")
def test_attention_logit_scaling_matches_the_original(path, expected):
    """The logits of HypeNet's attention do not grow with the position as configured."""
    scaling = float(str(expected["scaled/attn_logits_scaling"]).split()[-1])
    logits = golden.logits(load(path, attention_logit_scaling=scaling), expected["token_ids"])
    assert golden.relative_error(logits, expected["scaled/logits"]) < ROUNDING[path.name]


@pytest.mark.once
def test_export_of_loaded_checkpoint_keeps_every_bit_and_the_config(model, path, tmp_path):
    model.export_to_transformers(tmp_path / "export")
    golden.assert_tensors(tmp_path / "export", golden.read_tensors(path), "float32")
    files = [file.name for file in (tmp_path / "export").glob("*.safetensors*")]
    assert files == ["model.safetensors"]  # below `max_shard_size`
    family = layout.get_layout(model.backbone)
    original, exported = (
        family.backbone_arguments(golden.read_config(folder), "config.json")
        for folder in (path, tmp_path / "export")
    )
    assert original == exported
    assert original.items() <= model.backbone.get_config().items()


@pytest.mark.once
def test_bfloat16_checkpoint_survives_loading_and_export(model, path, tmp_path):
    """A float32 detour or a wrong default dtype changes bits of a bfloat16 checkpoint."""
    model.export_to_transformers(tmp_path / "narrow", dtype="bfloat16")
    original = golden.read_tensors(path)
    narrow = {name: array.astype(bfloat16) for name, array in original.items()}
    golden.assert_tensors(tmp_path / "narrow", narrow, bfloat16)
    reloaded = load(tmp_path / "narrow", dtype="bfloat16")
    embeddings = reloaded.backbone.token_embedding.embeddings
    assert keras.backend.standardize_dtype(embeddings.dtype) == "bfloat16"
    reloaded.export_to_transformers(tmp_path / "again")
    golden.assert_tensors(tmp_path / "again", narrow, bfloat16)


@only("recurrentgemma_tiny")
def test_logits_of_packed_documents_match_the_original(model, path, expected):
    """A packed document reads the state or the keys of another."""
    segment_ids = np.cumsum(expected["packed_positions"] == 0, axis=1, dtype="int32")
    logits = golden.logits(model, expected["token_ids"], segment_ids=segment_ids)
    assert golden.relative_error(logits, expected["packed_logits"]) < ROUNDING[path.name]


@pytest.mark.once
@only("recurrentgemma_tiny")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export_loaded_by_transformers_matches_the_original(model, path, tmp_path, expected):
    """transformers computes other logits from an export, for example beyond the window."""
    torch = pytest.importorskip("torch")
    # transformers before 5 ignores the window in a forward pass.
    transformers = pytest.importorskip("transformers", minversion="5.0")
    model.export_to_transformers(tmp_path / "export")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    token_ids = torch.tensor(expected["token_ids"], dtype=torch.long)
    with torch.no_grad():
        logits = loaded(token_ids, use_cache=False).logits
    error = golden.relative_error(logits.numpy(), expected["logits"])
    assert error < 10 * ROUNDING[path.name]


@pytest.mark.once
@only("recurrentgemma_tiny")
def test_config_without_meaning_of_the_window_warns_and_reads_as_published(model, tmp_path):
    """An export has the `attention_window_size` of published files, which is one less.

    In transformers the window includes the current token; published files, and the golden one,
    count only the tokens before it.
    """
    model.export_to_transformers(tmp_path / "export")
    config = golden.read_config(tmp_path / "export")
    read = RecurrentGemma().backbone_arguments
    assert config["attention_window_size"] == golden.read_config()["attention_window_size"] + 1
    assert read(config, "export")["sliding_window"] == model.backbone.sliding_window == 17
    assert config.pop("window_includes_current_token") is True
    with pytest.warns(UserWarning, match=r"without does not say .*'window_includes_current_token'"):
        assert read(config, "without")["sliding_window"] == 18
    read({**config, "block_types": ["recurrent"]}, "a config without attention")  # does not warn
    with pytest.raises(ValueError, match=r"'window_includes_current_token' is 1 .*true or false"):
        read({**config, "window_includes_current_token": 1}, "config.json")
