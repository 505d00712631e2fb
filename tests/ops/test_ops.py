"""The public operations: masks, packed documents, states, direction, and symbolic graphs."""

import functools

import keras
import numpy as np
import pytest

from keras_recurrent import ops
from tests.ops import native, small, token_wise
from tests.ops.cases import DRAW, Case, align, draw, flatten, unit
from tests.ops.judge import reference

OPTIONS = {
    "sliding_window_attention": {"sliding_window": 6},
    "causal_conv1d": {"activation": "silu"},
}
every_operation = pytest.mark.parametrize("operation", DRAW)
# JAX compiles each length again: all tests have this one.
LENGTH = 29
MASK = np.random.default_rng(0).random((2, LENGTH)) < 0.7
SEGMENTS = np.array([[0] * 15 + [1] * 9 + [2] * 5, [0] * 4 + [3] * 20 + [5] * 5], "int32")


def call(operation, tensors, **context):
    """Output and state of a public operation, in float32, as NumPy arrays."""
    tensors = {name: t.astype("float32") for name, t in tensors.items()}
    options = OPTIONS.get(operation, {})
    results = getattr(ops, operation)(**tensors, **options, **context)
    return keras.tree.map_structure(keras.ops.convert_to_numpy, results)


def draw_tensors(operation):
    return draw(operation, Case(2, LENGTH, 3)).tensors


def select_tokens(tensors, part):
    """The tensors at a slice of the tokens. Parameters have no time axis."""
    return {n: t[:, part] if t.ndim >= 3 else t for n, t in tensors.items()}


def assert_close(result, expected, message=""):
    """Allows the rounding errors of two computations of the same numbers in float32."""
    if isinstance(expected, dict):
        assert set(result) == set(expected)
        for name in expected:
            assert_close(result[name], expected[name], f"{message} {name}")
        return
    bound = 16 * unit("float32", np.abs(expected).max(initial=1))
    np.testing.assert_allclose(result, expected, rtol=0, atol=bound, err_msg=message)


@every_operation
def test_operation_in_several_calls_equals_one_call(operation):
    """The state, or the last segment, of a call is not continued by the next one."""
    tensors = draw_tensors(operation)
    whole, final = call(operation, tensors, mask=MASK, segment_ids=SEGMENTS)
    outputs, previous = [], {}
    # The first sequence starts a document with the third part.
    for part in (slice(0, 1), slice(1, 15), slice(15, LENGTH)):
        tokens = {"mask": MASK[:, part], "segment_ids": SEGMENTS[:, part]}
        output, state = call(operation, select_tokens(tensors, part), **tokens, **previous)
        outputs.append(output)
        seen = zip(MASK[:, : part.stop], SEGMENTS[:, : part.stop], strict=True)
        last_segment = [s[m][-1] if m.any() else -1 for m, s in seen]
        previous = {
            "initial_state": state,
            "previous_segment_id": np.array(last_segment, "int32"),
        }
    real = align(MASK, whole)
    assert_close(np.where(real, np.concatenate(outputs, axis=1), 0), np.where(real, whole, 0))
    assert_close(state, final)


@every_operation
def test_token_kind_equals_mask_and_segments(operation):
    """`token_kind` has another effect than the mask and the segments from which it is made."""
    tensors, tokens = draw_tensors(operation), {"mask": MASK, "segment_ids": SEGMENTS}
    _, state = call(operation, tensors)
    previous = {"initial_state": state, "previous_segment_id": np.array([0, 1], "int32")}
    for context in ({}, previous):
        expected = call(operation, tensors, **tokens, **context)
        kind = ops.token_kind(np.zeros((2, LENGTH)), MASK, SEGMENTS, **context)
        context = {"initial_state": state} if context else {}
        result = call(operation, tensors, token_kind=kind, **context)
        keras.tree.map_structure(np.testing.assert_array_equal, result, expected)


@every_operation
def test_reverse_equals_forward_on_reversed_sequence(operation):
    """`reverse=True` mixes up the direction of tensors, masks or segments."""
    tensors = draw_tensors(operation)
    # As Keras's layers, operations accept masks of integers, 0 at padding.
    options = {"mask": -3 * MASK, "segment_ids": SEGMENTS, "reverse": True}
    output, state = call(operation, tensors, **options)
    turned = select_tokens(tensors, slice(None, None, -1))
    expected, last = call(operation, turned, mask=MASK[:, ::-1], segment_ids=SEGMENTS[:, ::-1])
    assert_close(output, expected[:, ::-1])
    assert_close(state, last)


@pytest.mark.parametrize("operation", small.OPERATIONS)
def test_public_operation_matches_definition(operation):
    """A public operation passes arguments to its kernel in the wrong order or form."""
    drawn = small.draw(operation, LENGTH)
    function = functools.partial(getattr(ops, operation), **native.tensors(drawn))
    if not drawn.has_state:
        results = function(**drawn.options)
    else:
        options = OPTIONS.get(operation, {})
        _, state = function(**options)
        zeros = keras.tree.map_structure(keras.ops.zeros_like, state)
        results = function(**options, initial_state=zeros)
    truth = reference(operation, drawn, "float64")
    for name, result in flatten(drawn.name_results(results)).items():
        assert_close(native.to_numpy(result), truth[name], name)


# {name: operation, dtype, dtype of parameters, further options of the case}
FUNCTIONAL = {operation: (operation, "float32", None, {}) for operation in DRAW}
for operation in token_wise.DRAW:
    FUNCTIONAL[operation] = (operation, "bfloat16", "float32", {})
for operation in ("rms_norm", "log_forget_gate"):
    without_parameter = (operation, "bfloat16", "float32", {"parameter": False})
    FUNCTIONAL[f"{operation}, no parameter"] = without_parameter


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_model_equals_eager_call_before_and_after_saving(name, tmp_path):
    """Symbolic results have wrong shapes or dtypes, or a saved model computes something else."""
    operation, *dtypes, options = FUNCTIONAL[name]
    drawn = small.draw(operation, LENGTH, *dtypes, **options)
    tensors, options = native.tensors(drawn), drawn.options
    inputs = {
        name: keras.Input(
            batch_shape=(None, None, *t.shape[2:]) if len(t.shape) >= 3 else t.shape,
            dtype=drawn.dtypes[name],
            name=name,
        )
        for name, t in tensors.items()
    }
    if drawn.has_state:
        options = {**options, "reverse": True}
        inputs["mask"] = keras.Input((None,), dtype="bool", name="mask")
        tensors["mask"] = native.tensor(MASK, "bool")
    function = getattr(ops, operation)
    results = function(**inputs, **options)
    model = keras.Model(inputs, results)
    model.save(tmp_path / "model.keras")
    symbolic, eager = map(keras.tree.flatten, (results, function(**tensors, **options)))
    assert symbolic[0].shape == (None, None, *drawn.d_output.shape[2:])
    for node, array in zip(symbolic, eager, strict=True):
        assert node.dtype == native.dtype(array)
        assert tuple(node.shape[2:]) == tuple(array.shape[2:])
    for m in (model, keras.models.load_model(tmp_path / "model.keras")):
        for result, array in zip(keras.tree.flatten(m(tensors)), eager, strict=True):
            assert_close(native.to_numpy(result), native.to_numpy(array))


def test_operation_in_remat_scope_equals_eager_call():
    """Keras's `RematScope`, which TensorFlow implements without keywords, fails on operations."""
    x, mask = keras.Input((None, 3)), keras.Input((None,), dtype="bool")
    with keras.RematScope("full"):
        kind = ops.token_kind(x, mask)
        output, _ = ops.linear_scan(x, -keras.ops.abs(x), token_kind=kind)
    model = keras.Model([x, mask], output)
    model.compile(jit_compile=False)
    x, mask = np.ones((2, 5, 3), "float32"), np.arange(5) < [[5], [3]]
    expected, _ = call("linear_scan", {"x": x, "log_a": -x}, mask=mask)
    assert_close(model.predict_on_batch([x, mask]), expected)
