"""`model.export` in each format, run by the runtime of the format, beside Keras's GRU.

`make test-export` installs exporters and runtimes, and runs these.
"""

import keras
import numpy as np
import pytest

import keras_recurrent
from tests.export import runtimes
from tests.export.models import MODELS, computed, draw, structured

BACKEND = keras.backend.backend()
# Warnings of exporters, of which each has many.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not runtimes.INSTALLED, reason="`make test-export` runs these"),
]


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


# On torch, "block" and "hgrn2 lm" fail with the layers of the nightly classifiers.
# jax2onnx cannot reshape where two sizes are open, as some linear maps do.
OPEN_SIZES = {
    "jax": ["hgrn2", "lightning", "hgrn2 lm"],
    "torch": ["block", nightly("text classifier"), "hgrn2 lm", nightly("image classifier")],
    "tensorflow": ["block", "text classifier", "lightning", "hgrn2 lm"],
}
IN_JAX = pytest.mark.skipif(BACKEND == "jax", reason="its linear maps have two open sizes")
LARGER = [
    pytest.param(name, marks=[pytest.mark.nightly, IN_JAX])
    for name in ("griffin lm", "lightning_hybrid lm")
]
STEPS = ["block, step", "hgrn2, step"]


def check(model, given, found, atol=1e-5):
    real = given.get("padding_mask")
    wanted = computed(model, given)
    assert len(found) == len(wanted)
    for array, expected in zip(found, wanted, strict=True):
        if real is not None:
            array, expected = array[real > 0], expected[real > 0]
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=atol)


def exported(name, tmp_path, form, ending, **arguments):
    model = MODELS[name]()
    model(structured(model, draw(model, 1, 4)))  # Keras exports what was called
    path = str(tmp_path / f"model{ending}")
    model.export(path, format=form, verbose=False, **arguments)
    return model, path


@pytest.mark.parametrize("name", ["gru, step", *STEPS, *OPEN_SIZES[BACKEND], *LARGER])
def test_onnx(name, tmp_path):
    model, path = exported(name, tmp_path, "onnx", ".onnx")
    for batch, length in (3, 70), (1, 5):  # by one file
        given = draw(model, batch, length)
        check(model, given, runtimes.onnx(path, given))


LINEAR, CONVOLUTION = "LinearAttention", "CausalConvWithState"
OPERATORS = {
    "hgrn2": {LINEAR: 1},
    "hgrn2, step": {LINEAR: 1},
    "hgrn2, convolutions": {LINEAR: 1, CONVOLUTION: 3},
    "convolution, step": {CONVOLUTION: 1},
    "lightning": {LINEAR: 1},
    "lightning, packed": {LINEAR: 1},
    "hgrn2 lm": {LINEAR: 2},
    "transnormer lm": {LINEAR: 2},
}


@pytest.mark.skipif(BACKEND != "torch", reason="keras_recurrent writes opset 27 from torch")
@pytest.mark.parametrize("name", [*list(OPERATORS)[:-1], nightly("transnormer lm")])
def test_operators_of_opset_27(name, tmp_path):
    import onnx

    model, path = exported(name, tmp_path, "onnx", ".onnx", opset_version=27)
    onnx.checker.check_model(path, full_check=True)
    graph = onnx.load(path)
    assert [(o.domain, o.version) for o in graph.opset_import] == [("", 27)]
    nodes = [node.op_type for node in graph.graph.node]
    for operator in (LINEAR, CONVOLUTION):
        assert nodes.count(operator) == OPERATORS[name].get(operator, 0)
    for batch, length in (3, 70), (1, 5):
        given = draw(model, batch, length)
        check(model, given, runtimes.onnx(path, given))


@pytest.mark.skipif(BACKEND != "torch", reason="of torch's exporter")
def test_opsets_that_are_not_written_are_errors(tmp_path):
    for version in (26, 28):
        with pytest.raises(
            ValueError, match=f"`opset_version` must be at most 25, or 27.*{version}"
        ):
            exported("hgrn2", tmp_path, "onnx", ".onnx", opset_version=version)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(BACKEND != "torch", reason="a format of torch")
@pytest.mark.parametrize(
    "name", ["block", "hgrn2, step", "griffin lm", nightly("lightning_hybrid lm")]
)
def test_torch_program(name, tmp_path):
    import torch

    model, path = exported(name, tmp_path, "torch", ".pt2")
    graph = torch.export.load(path)
    assert "keras_recurrent" not in str(graph.graph)  # plain operators: it runs anywhere
    program = graph.module()
    for batch, length in (3, 70), (2, 5):
        given = draw(model, batch, length)
        inputs = keras.tree.map_structure(torch.tensor, structured(model, given))
        found = [t.detach().numpy() for t in keras.tree.flatten(program(inputs))]
        check(model, given, found)


@pytest.mark.skipif(BACKEND != "torch", reason="a format of torch")
def test_a_gru_of_keras_itself_as_a_torch_program(tmp_path):
    """Keras exports it for a batch of 1."""
    import torch

    model, path = exported("gru, step", tmp_path, "torch", ".pt2")
    program = torch.export.load(path).module()
    given = [torch.tensor(array) for array in draw(model, 1, 1).values()]
    found = [t.detach().numpy() for t in program(given)]
    check(model, draw(model, 1, 1), found)


@pytest.mark.skipif(BACKEND == "jax", reason="Keras has no such export from JAX")
@pytest.mark.parametrize("name", [*STEPS, OPEN_SIZES[BACKEND][0]])
def test_openvino(name, tmp_path):
    model, path = exported(name, tmp_path, "openvino", ".xml")
    for batch, length in (3, 70), (1, 5):
        given = draw(model, batch, length)
        check(model, given, runtimes.openvino(path, given))


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND != "torch", reason="OpenVINO reads no GRU of TensorFlow")
def test_openvino_computes_in_bfloat16_by_default_where_the_cpu_has_it(tmp_path):
    """A GRU of Keras loses digits, too: it is the plugin's choice, not the file's."""
    lost = {}
    for name in ("gru, step", "block, step"):
        model, path = exported(name, tmp_path, "openvino", ".xml")
        given = draw(model, 1, 1)  # Keras exports a GRU for a batch of 1
        check(model, given, runtimes.openvino(path, given))
        freely, wanted = runtimes.openvino(path, given, None), computed(model, given)
        lost[name] = max(np.abs(a - b).max() for a, b in zip(freely, wanted, strict=True))
    assert (lost["gru, step"] > 1e-4) == (lost["block, step"] > 1e-4)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's converter")
@pytest.mark.parametrize("name", STEPS)
def test_litert(name, tmp_path):
    """The runtime has the built-in operators alone."""
    model, path = exported(name, tmp_path, "litert", ".tflite")
    given = draw(model, 1, 1)
    check(model, given, runtimes.litert(path, given))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's converter")
def test_a_gru_of_keras_needs_more_than_built_in_operators_of_litert(tmp_path):
    model, path = exported("gru, step", tmp_path, "litert", ".tflite")
    with pytest.raises(RuntimeError, match="Select TensorFlow op"):
        runtimes.litert(path, draw(model, 1, 1))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a format of TensorFlow")
def test_a_saved_model_writes_token_by_token(tmp_path):
    import tensorflow as tf

    model = MODELS["hgrn2 lm"]()
    model.export(str(tmp_path), verbose=False)
    program = tf.saved_model.load(str(tmp_path))
    token_ids = draw(model, 3, 7)["token_ids"]
    whole = {"token_ids": token_ids, "padding_mask": np.ones_like(token_ids)}
    (logits,) = computed(model, whole)
    np.testing.assert_allclose(program.serve(whole), logits, rtol=1e-5, atol=1e-5)

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
def test_the_signature_says_how_much_room_attention_needs(tmp_path):
    """A state with less room would be no error, and other text."""
    import tensorflow as tf

    model = MODELS["griffin lm"]()
    model.export(str(tmp_path), verbose=False)
    step = tf.saved_model.load(str(tmp_path)).signatures["step"]
    _, inputs = step.structured_input_signature
    names = keras_recurrent.exporting.state_names(model.backbone.cache_spec())
    room = {name: inputs[name].shape[1] for name in names if name.endswith("_key")}
    expected = {
        f"blocks_{i}_temporal_block_key": block.temporal_block.own_initial_state(1)["key"].shape[1]
        for i, block in enumerate(model.backbone.transformer_layers)
        if getattr(block.temporal_block, "sliding_window", None)
    }
    assert expected
    assert {name: room.get(name) for name in expected} == expected


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a format of TensorFlow")
@pytest.mark.parametrize("name", ["gru, step", "block, step", "block"])
def test_saved_models_of_layers(name, tmp_path):
    import tensorflow as tf

    model = MODELS[name]()
    model.export(str(tmp_path), verbose=False)
    given = draw(model, 3, 70)
    program = tf.saved_model.load(str(tmp_path))
    found = program.serve(structured(model, given))
    check(model, given, [np.asarray(t) for t in tf.nest.flatten(found)])
