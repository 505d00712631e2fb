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


def call(operation, tensors, **context):
    """Output and state of a public operation, in float32, as NumPy arrays."""
    tensors = {name: t.astype("float32") for name, t in tensors.items()}
    options = OPTIONS.get(operation, {})
    results = getattr(ops, operation)(**tensors, **options, **context)
    return keras.tree.map_structure(keras.ops.convert_to_numpy, results)


def draw_tensors(operation, length):
    return draw(operation, Case(2, length, 3)).tensors


def select_tokens(tensors, where):
    """The tensors at a slice of the tokens, or at indices [B, n]. Parameters have no time axis."""
    if isinstance(where, slice):
        return {n: t[:, where] if t.ndim >= 3 else t for n, t in tensors.items()}
    return {
        n: np.take_along_axis(t, align(where, t), axis=1) if t.ndim >= 3 else t
        for n, t in tensors.items()
    }


def assert_close(result, expected, message=""):
    """Allows the rounding errors of two computations of the same numbers in float32."""
    if isinstance(expected, dict):
        assert set(result) == set(expected)
        for name in expected:
            assert_close(result[name], expected[name], f"{message} {name}")
        return
    bound = 16 * unit("float32", np.abs(expected).max(initial=1))
    np.testing.assert_allclose(result, expected, rtol=0, atol=bound, err_msg=message)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def draw_segments(rng, length, documents=4):
    """Segment ids of two sequences that are cut into documents at random positions."""
    cuts = np.sort(rng.choice(np.arange(1, length), (2, documents - 1), replace=False), axis=1)
    return np.sum(np.arange(length) >= cuts[:, :, None], axis=1).astype("int32")


@every_operation
def test_operation_in_two_calls_equals_one_call(operation, rng):
    """The state, or the last segment, of a first call is not continued by a second call."""
    length = 29
    tensors = draw_tensors(operation, length)
    segments, mask = draw_segments(rng, length), rng.random((2, length)) < 0.7
    whole, final = call(operation, tensors, mask=mask, segment_ids=segments)
    boundary = int(np.argmax(segments[0] > 0))
    # JAX compiles each length again.
    further = () if keras.config.backend() == "jax" else (length // 2, length - 1)
    for cut in (1, boundary, *further):
        left, state = call(
            operation,
            select_tokens(tensors, slice(0, cut)),
            mask=mask[:, :cut],
            segment_ids=segments[:, :cut],
        )
        last_segment = [
            s[m][-1] if m.any() else -1
            for m, s in zip(mask[:, :cut], segments[:, :cut], strict=True)
        ]
        right, last = call(
            operation,
            select_tokens(tensors, slice(cut, None)),
            mask=mask[:, cut:],
            segment_ids=segments[:, cut:],
            initial_state=state,
            previous_segment_id=np.array(last_segment, "int32"),
        )
        both = np.concatenate([left, right], axis=1)
        real = align(mask, whole)
        assert_close(np.where(real, both, 0), np.where(real, whole, 0), f"cut {cut}")
        assert_close(last, final, f"cut {cut}")


@every_operation
def test_token_kind_equals_mask_and_segments(operation, rng):
    """`token_kind` has another effect than the mask and the segments from which it is made."""
    tensors = draw_tensors(operation, 11)
    mask, segments = rng.random((2, 11)) < 0.7, draw_segments(rng, 11)
    _, state = call(operation, tensors)
    previous = {"initial_state": state, "previous_segment_id": np.array([0, 1], "int32")}
    for context in ({}, previous):
        expected = call(operation, tensors, mask=mask, segment_ids=segments, **context)
        kind = ops.token_kind(np.zeros((2, 11)), mask, segments, **context)
        context = {"initial_state": state} if context else {}
        result = call(operation, tensors, token_kind=kind, **context)
        keras.tree.map_structure(np.testing.assert_array_equal, result, expected)


@every_operation
def test_reverse_equals_forward_on_reversed_sequence(operation, rng):
    """`reverse=True` mixes up the direction of tensors, masks or segments."""
    tensors = draw_tensors(operation, 11)
    mask, segments = rng.random((2, 11)) < 0.7, draw_segments(rng, 11)
    # As Keras's layers, operations accept masks of integers, 0 at padding.
    options = {"mask": -3 * mask, "segment_ids": segments, "reverse": True}
    output, state = call(operation, tensors, **options)
    turned = select_tokens(tensors, slice(None, None, -1))
    expected, last = call(operation, turned, mask=mask[:, ::-1], segment_ids=segments[:, ::-1])
    assert_close(output, expected[:, ::-1])
    assert_close(state, last)


@pytest.mark.parametrize("operation", small.OPERATIONS)
def test_public_operation_matches_definition(operation):
    """A public operation passes arguments to its kernel in the wrong order or form."""
    drawn = small.draw(operation, 13)
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
def test_functional_model_equals_eager_call_before_and_after_saving(name, tmp_path, rng):
    """Symbolic results have wrong shapes or dtypes, or a saved model computes something else."""
    operation, *dtypes, options = FUNCTIONAL[name]
    drawn = small.draw(operation, 6, *dtypes, **options)
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
        tensors["mask"] = native.tensor(rng.random((2, 6)) < 0.7, "bool")
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
