"""Files of `model.export` in each format, run by the runtime of the format.

`make test-export` installs exporters and runtimes, and runs these tests.
"""

import keras
import numpy as np
import pytest

import keras_recurrent
from tests.export import runtimes
from tests.export.models import MODELS, compute, draw, pack_inputs
from tests.models.tiny import tiny_causal_lm

BACKEND = keras.backend.backend()
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # each exporter has many warnings
    pytest.mark.skipif(not runtimes.INSTALLED, reason="requires `make test-export`"),
]


def parametrize_models(every_change, nightly):
    """Parametrizes a test by models of this backend, some of which run nightly only."""
    marked = [pytest.param(name, marks=pytest.mark.nightly) for name in nightly.get(BACKEND, ())]
    return pytest.mark.parametrize("name", [*every_change.get(BACKEND, ()), *marked])


# jax2onnx cannot reshape with two unknown sizes, as some linear layers do.
LARGER = ["griffin lm", "lightning_hybrid lm", "lfm2 lm", "mamba_hybrid lm"]
STEPS = ["gru, step", "hgrn2, step"]


def assert_outputs(model, inputs, actual):
    """Asserts that the outputs of a runtime match those of the model at real tokens."""
    mask = inputs.get("padding_mask")
    for array, expected in zip(actual, compute(model, inputs), strict=True):
        if mask is not None:
            array, expected = array[mask > 0], expected[mask > 0]
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-5)


def assert_runs(model, run, shapes=((3, 70), (1, 5))):
    """Asserts that one file, run by `run(inputs)`, matches the model for batches and lengths."""
    for batch, length in shapes:
        inputs = draw(model, batch, length)
        assert_outputs(model, inputs, run(inputs))


ENDINGS = {"onnx": ".onnx", "torch": ".pt2", "openvino": ".xml", "litert": ".tflite"}


def export(name, folder, form, **arguments):
    model = MODELS[name]()
    model(pack_inputs(model, draw(model, 1, 4)))  # Keras requires a call before the export
    path = str(folder / f"model{ENDINGS[form]}")
    model.export(path, format=form, verbose=False, **arguments)
    return model, path


@parametrize_models(
    {
        "jax": ["block, step", "lightning", "hgrn2 lm"],
        "torch": ["block, step", "hgrn2"],
        "tensorflow": ["block, step", "text classifier", "hgrn2 lm"],
    },
    nightly={
        "jax": [*STEPS, "hgrn2"],
        "torch": [*STEPS, "block", "text classifier", "hgrn2 lm", *LARGER],
        "tensorflow": [*STEPS, "block", "lightning", *LARGER],
    },
)
def test_onnx_file_matches_the_model(name, tmp_path):
    model, path = export(name, tmp_path, "onnx")
    assert_runs(model, lambda inputs: runtimes.onnx(path, inputs))


LINEAR, CONVOLUTION = "LinearAttention", "CausalConvWithState"
# {model: counts of its operators in opset 27}
OPERATORS: dict = {
    "hgrn2, step": {LINEAR: 1},
    "hgrn2, convolutions": {LINEAR: 1, CONVOLUTION: 3},
    "convolution, step": {CONVOLUTION: 1},
    "lightning, packed": {LINEAR: 1},
    "hgrn2 lm": {LINEAR: 2},
    "transnormer lm": {LINEAR: 2},
}


@pytest.mark.skipif(BACKEND != "torch", reason="keras_recurrent writes opset 27 from torch")
@parametrize_models(
    {"torch": ["hgrn2, convolutions", "convolution, step", "lightning, packed", "hgrn2 lm"]},
    nightly={"torch": ["hgrn2, step", "transnormer lm"]},
)
def test_onnx_opset_27_has_recurrent_operators_and_matches_the_model(name, tmp_path):
    import onnx

    model, path = export(name, tmp_path, "onnx", opset_version=27)
    onnx.checker.check_model(path, full_check=True)
    graph = onnx.load(path)
    assert [(o.domain, o.version) for o in graph.opset_import] == [("", 27)]
    nodes = [node.op_type for node in graph.graph.node]
    for operator in (LINEAR, CONVOLUTION):
        assert nodes.count(operator) == OPERATORS[name].get(operator, 0)
    assert_runs(model, lambda inputs: runtimes.onnx(path, inputs))


@pytest.mark.skipif(BACKEND != "torch", reason="torch's exporter")
@pytest.mark.parametrize("version", [26, 28])
def test_unsupported_opset_raises_and_writes_nothing(version, tmp_path):
    match = f"`opset_version` must be at most 25, or 27.*{version}"
    with pytest.raises(ValueError, match=match):
        export("hgrn2", tmp_path, "onnx", opset_version=version)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(BACKEND != "torch", reason="a format of torch")
@parametrize_models(
    {"torch": ["hgrn2, step", "griffin lm"]},
    nightly={"torch": ["gru, step", "block", "lightning_hybrid lm"]},
)
def test_torch_program_has_plain_operators_and_matches_the_model(name, tmp_path):
    """A file of this package is wrong, or this package breaks Keras's exporter for its layers."""
    import torch

    model, path = export(name, tmp_path, "torch")
    loaded = torch.export.load(path)
    assert "keras_recurrent" not in str(loaded.graph)
    program = loaded.module()

    def run(inputs):
        tensors = keras.tree.map_structure(torch.tensor, pack_inputs(model, inputs))
        return [tensor.detach().numpy() for tensor in keras.tree.flatten(program(tensors))]

    # Keras exports a GRU for a batch of 1.
    assert_runs(model, run, shapes=((1, 1),) if name == "gru, step" else ((3, 70), (2, 5)))


@pytest.mark.skipif(BACKEND == "jax", reason="Keras has no such export from JAX")
@parametrize_models(
    {"torch": ["block"], "tensorflow": ["hgrn2, step", "block"]},
    nightly={"torch": ["block, step", "hgrn2, step"], "tensorflow": ["block, step"]},
)
def test_openvino_file_matches_the_model(name, tmp_path):
    model, path = export(name, tmp_path, "openvino")
    assert_runs(model, lambda inputs: runtimes.openvino(path, inputs))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's converter")
@parametrize_models({"tensorflow": ["hgrn2, step"]}, nightly={"tensorflow": ["block, step"]})
def test_litert_file_runs_with_built_in_operators_and_matches_the_model(name, tmp_path):
    model, path = export(name, tmp_path, "litert")
    assert_runs(model, lambda inputs: runtimes.litert(path, inputs), shapes=((1, 1),))


@parametrize_models(
    {"torch": ["lfm2, openvino"], "tensorflow": ["mamba_hybrid, litert"]},
    nightly={"torch": ["mamba_hybrid, onnx"], "tensorflow": ["lfm2, onnx"]},
)
def test_decoding_step_file_matches_the_forward_pass(name, tmp_path):
    """A runtime loses the state, or attention reads other slots of its cache."""
    family, form = name.split(", ")
    model = tiny_causal_lm(family=family)
    token_ids = np.random.default_rng(0).integers(3, 50, (1, 9)).astype("int32")
    (logits,) = compute(model, {"token_ids": token_ids, "padding_mask": np.ones_like(token_ids)})
    batch_size = 1 if form == "litert" else None
    step = keras_recurrent.exporting.DecodingStep(model, 12, batch_size)
    path, state = str(tmp_path / f"step{ENDINGS[form]}"), step.initial_state
    step.export(path, form, verbose=False)
    for i, token in enumerate(np.split(token_ids, 9, axis=1)):
        inputs = dict(sorted({"token_ids": token, **state}.items()))
        actual, *arrays = getattr(runtimes, form)(path, inputs)
        np.testing.assert_allclose(actual, logits[:, i : i + 1], rtol=1e-5, atol=1e-5)
        state = dict(zip(state, arrays, strict=True))


def export_saved_model(name, folder):
    import tensorflow as tf

    model = MODELS[name]()
    model.export(str(folder), verbose=False)
    return model, tf.saved_model.load(str(folder))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a format of TensorFlow")
def test_saved_model_steps_match_its_forward_pass(tmp_path):
    """The signature `step` loses the state after a prompt or a token."""
    import tensorflow as tf

    model, program = export_saved_model("hgrn2 lm", tmp_path)
    token_ids = draw(model, 3, 7)["token_ids"]
    x = {"token_ids": token_ids, "padding_mask": np.ones_like(token_ids)}
    (logits,) = compute(model, x)
    np.testing.assert_allclose(program.serve(x), logits, rtol=1e-5, atol=1e-5)

    step = program.signatures["step"]
    _, inputs = step.structured_input_signature
    state = {
        name: tf.fill([3, *spec.shape[1:]], tf.cast(-1 if name == "segment" else 0, spec.dtype))
        for name, spec in inputs.items()
        if name != "token_ids"
    }
    for tokens in np.split(token_ids, [4, 5, 6], axis=1):  # a prompt, then one by one
        state = step(token_ids=tf.constant(tokens), **state)
        last = state.pop("logits")[:, -1]
    np.testing.assert_allclose(last, logits[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a format of TensorFlow")
def test_saved_model_signature_has_the_window_of_local_attention(tmp_path):
    """The signature accepts a state with fewer keys, which gives other text without an error."""
    model, program = export_saved_model("griffin lm", tmp_path)
    _, inputs = program.signatures["step"].structured_input_signature
    names = keras_recurrent.exporting.state_names(model.backbone.cache_spec())
    lengths = {name: inputs[name].shape[1] for name in names if name.endswith("_key")}
    expected = {
        f"blocks_{i}_temporal_block_key": block.temporal_block.own_initial_state(1)["key"].shape[1]
        for i, block in enumerate(model.backbone.transformer_layers)
        if getattr(block.temporal_block, "sliding_window", None)
    }
    assert expected
    assert lengths.items() >= expected.items()


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a format of TensorFlow")
@parametrize_models({"tensorflow": ["gru, step", "block"]}, nightly={"tensorflow": ["block, step"]})
def test_saved_model_of_a_layer_matches_the_layer(name, tmp_path):
    model, program = export_saved_model(name, tmp_path)

    def run(inputs):
        outputs = program.serve(pack_inputs(model, inputs))
        return [np.asarray(tensor) for tensor in keras.tree.flatten(outputs)]

    assert_runs(model, run, shapes=((3, 70),))
