"""The public operations: cuts, documents, padding, direction, graphs, errors."""

import keras
import numpy as np
import pytest

from keras_recurrent import ops
from tests.ops.cases import DRAW, Case, beside, draw, named, unit
from tests.ops.judge import reference

TIMED = {  # the tensors with a time axis
    "linear_scan": ("x", "log_a"),
    "complex_linear_scan": ("x", "log_a", "phase"),
    "rg_lru": ("x", "gate_a", "gate_x"),
    "causal_conv1d": ("x",),
    "gated_linear_attention": ("q", "k", "v", "log_f"),
    "lightning_attention": ("q", "k", "v"),
    "sliding_window_attention": ("q", "k", "v"),
}
OPTIONS = {
    "sliding_window_attention": {"sliding_window": 6},
    "causal_conv1d": {"activation": "silu"},
}
every_operation = pytest.mark.parametrize("operation", DRAW)


def call(operation, tensors, **context):
    tensors = {name: t.astype("float32") for name, t in tensors.items()}
    options = OPTIONS.get(operation, {})
    output, state = getattr(ops, operation)(**tensors, **options, **context)
    return keras.tree.map_structure(keras.ops.convert_to_numpy, (output, state))


def tokens(operation, tensors, where):
    """The tensors at some of the tokens: a slice, or places [B, n] a row."""
    if isinstance(where, slice):
        return {n: t[:, where] if n in TIMED[operation] else t for n, t in tensors.items()}
    return {
        n: np.take_along_axis(t, beside(t, where), axis=1) if n in TIMED[operation] else t
        for n, t in tensors.items()
    }


def close(result, expected, message=""):
    """Equal but for the rounding of two float32 computations of the same numbers."""
    if isinstance(expected, dict):
        assert set(result) == set(expected)
        for name in expected:
            close(result[name], expected[name], f"{message} {name}")
        return
    bound = 16 * unit("float32", np.abs(expected).max(initial=1))
    np.testing.assert_allclose(result, expected, rtol=0, atol=bound, err_msg=message)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def packed(rng, length, documents=4):
    """Segment ids of two rows that are cut into documents at random places."""
    cuts = np.sort(rng.choice(np.arange(1, length), (2, documents - 1), replace=False), axis=1)
    return np.sum(np.arange(length) >= cuts[:, :, None], axis=1).astype("int32")


@every_operation
def test_whole_is_left_and_right(operation, rng):
    length = 29
    tensors = draw(operation, Case(2, length, 3)).tensors
    segments, mask = packed(rng, length), rng.random((2, length)) < 0.7
    whole, final = call(operation, tensors, mask=mask, segment_ids=segments)
    boundary = int(np.argmax(segments[0] > 0))
    # JAX compiles each length anew.
    more = () if keras.config.backend() == "jax" else (length // 2, length - 1)
    for cut in (1, boundary, *more):
        left, state = call(
            operation,
            tokens(operation, tensors, slice(0, cut)),
            mask=mask[:, :cut],
            segment_ids=segments[:, :cut],
        )
        right, last = call(
            operation,
            tokens(operation, tensors, slice(cut, None)),
            mask=mask[:, cut:],
            segment_ids=segments[:, cut:],
            initial_state=state,
            previous_segment_id=last_segment(mask[:, :cut], segments[:, :cut]),
        )
        both = np.concatenate([left, right], axis=1)
        real = beside(whole, mask)
        close(np.where(real, both, 0), np.where(real, whole, 0), f"cut {cut}")
        close(last, final, f"cut {cut}")


def last_segment(mask, segments):
    return np.array(
        [s[m][-1] if m.any() else -1 for m, s in zip(mask, segments, strict=True)], "int32"
    )


@every_operation
def test_packed_documents_are_separate(operation, rng):
    length = 23
    tensors = draw(operation, Case(2, length, 3)).tensors
    segments = packed(rng, length)
    whole, _ = call(operation, tensors, segment_ids=segments)
    for row in range(2):
        for document in range(segments.max() + 1):
            where = np.flatnonzero(segments[row] == document)
            alone, _ = call(operation, tokens(operation, tensors, np.array([where, where])))
            close(whole[row, where], alone[row], f"row {row}, document {document}")


@every_operation
def test_padding_changes_nothing(operation, rng):
    length = 21
    tensors = draw(operation, Case(2, length, 3)).tensors
    mask = rng.random((2, length)) < 0.6
    mask[:, :2] = False  # padding at the beginning, too
    padded, padded_state = call(operation, tensors, mask=mask)
    for row in range(2):
        where = np.flatnonzero(mask[row])
        alone, state = call(operation, tokens(operation, tensors, np.array([where, where])))
        close(padded[row, where], alone[row])
        for name, part in named("state", state).items():
            close(named("state", padded_state)[name][row], part[row], name)


@every_operation
def test_a_mask_of_integers(operation, rng):
    """As Keras's layers take it, too: 0 at padding."""
    tensors = draw(operation, Case(2, 9, 3)).tensors
    mask = rng.random((2, 9)) < 0.6
    for context in ({}, {"reverse": True}, {"segment_ids": packed(rng, 9)}):
        wanted = call(operation, tensors, mask=mask, **context)
        for number, dtype in ((1, "int32"), (1, "uint8"), (-3, "int64")):
            numbers = (mask * number).astype(dtype)
            found = call(operation, tensors, mask=numbers, **context)
            keras.tree.map_structure(np.testing.assert_array_equal, found, wanted)


@every_operation
def test_without_a_state_the_row_starts_afresh(operation):
    tensors = draw(operation, Case(2, 5, 3)).tensors
    output, state = call(operation, tensors)
    zeros = keras.tree.map_structure(np.zeros_like, state)
    seen_nothing, _ = call(
        operation, tensors, initial_state=zeros, previous_segment_id=np.array([-1, -1])
    )
    close(seen_nothing, output)
    noise = keras.tree.map_structure(np.ones_like, state)
    overwritten, _ = call(
        operation, tensors, initial_state=noise, previous_segment_id=np.array([-1, -1])
    )
    close(overwritten, output)
    goes_on, _ = call(
        operation, tensors, initial_state=noise, previous_segment_id=np.array([-1, 0])
    )
    close(goes_on[0], output[0])
    assert np.abs(goes_on[1] - output[1]).max() > 0.01


@every_operation
def test_token_kinds_stand_for_masks_segments_and_what_came_before(operation, rng):
    tensors = draw(operation, Case(2, 11, 3)).tensors
    mask, segments = rng.random((2, 11)) < 0.7, packed(rng, 11)
    before = np.array([0, 1], "int32")
    _, state = call(operation, tensors)
    for given in ({}, {"initial_state": state, "previous_segment_id": before}):
        expected = call(operation, tensors, mask=mask, segment_ids=segments, **given)
        kind = ops.token_kind(np.zeros((2, 11)), mask, segments, **given)
        given.pop("previous_segment_id", None)
        result = call(operation, tensors, token_kind=kind, **given)
        keras.tree.map_structure(np.testing.assert_array_equal, result, expected)


@every_operation
def test_reverse_is_forward_on_a_reversed_row(operation, rng):
    tensors = draw(operation, Case(2, 11, 3)).tensors
    mask, segments = rng.random((2, 11)) < 0.7, packed(rng, 11)
    result, state = call(operation, tensors, mask=mask, segment_ids=segments, reverse=True)
    turned = tokens(operation, tensors, slice(None, None, -1))
    expected, last = call(operation, turned, mask=mask[:, ::-1], segment_ids=segments[:, ::-1])
    close(result, expected[:, ::-1])
    close(state, last)


@every_operation
def test_agrees_with_the_definition(operation):
    drawn = draw(operation, Case(2, 13, 3))
    _, state = call(operation, drawn.tensors)
    zeros = keras.tree.map_structure(np.zeros_like, state)
    output, state = call(operation, drawn.tensors, initial_state=zeros)
    truth = reference(operation, drawn, "float64")
    close(output, truth["output"])
    for name, part in named("final_state", state).items():
        close(part, truth[name], name)


@every_operation
def test_in_a_symbolic_graph(operation, tmp_path, rng):
    case = Case(2, 6, 3)
    drawn = draw(operation, case)
    tensors = {name: t.astype("float32") for name, t in drawn.tensors.items()}
    inputs = {
        name: keras.Input(
            (None, *t.shape[2:]) if name in TIMED[operation] else t.shape[1:],
            batch_size=None if name in TIMED[operation] else t.shape[0],
            name=name,
        )
        for name, t in tensors.items()
    }
    mask = keras.Input((None,), dtype="bool", name="mask")
    options = OPTIONS.get(operation, {})
    output, state = getattr(ops, operation)(**inputs, **options, mask=mask, reverse=True)
    assert output.shape == (None, None, *drawn.d_output.shape[2:])
    for name, part in named("state", drawn.d_final_state).items():
        assert named("state", state)[name].shape[1:] == part.shape[1:]
    model = keras.Model({**inputs, "mask": mask}, [output, state])
    keep = rng.random((2, 6)) < 0.7
    expected = call(operation, tensors, mask=keep, reverse=True)
    feed = {**tensors, "mask": keep}
    for result, e in zip(model(feed), expected, strict=True):
        close(keras.tree.map_structure(keras.ops.convert_to_numpy, result), e)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for result, e in zip(again(feed), expected, strict=True):
        close(keras.tree.map_structure(keras.ops.convert_to_numpy, result), e)


def test_a_graph_made_for_recomputing():
    """Keras asks operations, as it does layers, and TensorFlow refuses keywords."""
    x, mask = keras.Input((None, 3)), keras.Input((None,), dtype="bool")
    with keras.RematScope("full"):
        kind = ops.token_kind(x, mask)
        output, _ = ops.linear_scan(x, -keras.ops.abs(x), token_kind=kind)
    model = keras.Model([x, mask], output)
    model.compile(jit_compile=False)
    x, mask = np.ones((2, 5, 3), "float32"), np.arange(5) < [[5], [3]]
    wanted, _ = call("linear_scan", {"x": x, "log_a": -x}, mask=mask)
    close(model.predict_on_batch([x, mask]), wanted)


BAD = {
    "rank": ({"x": np.zeros((2, 3), "float32")}, {}, r"`x` must have 3 dimensions, \[B"),
    "time": ({"log_a": np.zeros((2, 5, 3), "float32")}, {}, "`log_a` must have the shape"),
    "empty": (
        {"x": np.zeros((2, 0, 3), "float32"), "log_a": np.zeros((2, 0, 3), "float32")},
        {},
        r"`x` must have at least one token; got the shape \(2, 0, 3\) for \[B, T, D\]",
    ),
    "no rows": (
        {"x": np.zeros((0, 4, 3), "float32"), "log_a": np.zeros((0, 4, 3), "float32")},
        {},
        r"`x` must have no empty dimension; got the shape \(0, 4, 3\)",
    ),
    "dtype": ({"x": np.zeros((2, 4, 3), "int32")}, {}, "`x` must be one of float16"),
    "none": ({"log_a": None}, {}, "needs the argument `log_a`"),
    "state": ({}, {"initial_state": np.zeros((2, 4), "float32")}, "`initial_state`"),
    "mask": ({}, {"mask": np.ones((2, 3), "bool")}, "`mask` must have the shape"),
    "mask dtype": (
        {},
        {"mask": np.ones((2, 4), "float32")},
        "`mask` must be boolean, .* or integers, 0 at padding; got float32",
    ),
    "segments": ({}, {"segment_ids": np.ones((2, 4), "float32")}, "`segment_ids` must be integers"),
    "previous": ({}, {"previous_segment_id": np.ones((3,), "int32")}, "`previous_segment_id`"),
    "kinds": ({}, {"token_kind": np.zeros((2, 3), "int8")}, "`token_kind` must have the shape"),
    "kinds' dtype": ({}, {"token_kind": np.zeros((2, 4), "int32")}, "`token_kind` must be int8"),
    "kinds and a mask": (
        {},
        {"token_kind": np.zeros((2, 4), "int8"), "mask": np.ones((2, 4), "bool")},
        "got both `token_kind` and `mask`",
    ),
    "kinds and a direction": (
        {},
        {"token_kind": np.zeros((2, 4), "int8"), "reverse": True},
        "got both `token_kind` and `reverse`",
    ),
    "name": ({}, {"implementation": "cuda"}, "`implementation` must be one of"),
}


@pytest.mark.once
@pytest.mark.parametrize(("tensors", "context", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_name_themselves(tensors, context, message):
    good = {"x": np.zeros((2, 4, 3), "float32"), "log_a": np.zeros((2, 4, 3), "float32")}
    with pytest.raises(ValueError, match=message):
        ops.linear_scan(**(good | tensors), **context)


@every_operation
def test_a_sequence_of_no_tokens(operation):
    tensors = draw(operation, Case(2, 5, 3)).tensors
    first = TIMED[operation][0]
    with pytest.raises(
        ValueError, match=rf"`{first}` must have at least one token; got .*\(2, 0, "
    ):
        call(operation, tokens(operation, tensors, slice(0, 0)))


@pytest.mark.once
def test_bad_shapes_in_a_graph():
    with pytest.raises(ValueError, match="`log_a` must have the shape"):
        ops.linear_scan(keras.Input((None, 4)), keras.Input((None, 5)))
    with pytest.raises(ValueError, match="2D should be 10, not 8"):
        ops.complex_linear_scan(
            keras.Input((None, 8)), keras.Input((None, 5)), keras.Input((None, 5))
        )


@pytest.mark.once
def test_an_unknown_activation():
    kernel = np.ones((4, 3), "float32")
    for x in (np.ones((2, 5, 3), "float32"), keras.Input((None, 3))):
        with pytest.raises(ValueError, match="`activation` must be None or 'silu'; got 'relu'"):
            ops.causal_conv1d(x, kernel, activation="relu")


@pytest.mark.once
@pytest.mark.parametrize("value", ["abc", object(), [[[1.0], [1.0, 2.0]]], {"a": np.ones(1)}])
def test_an_argument_that_is_no_tensor_is_named(value):
    x = np.ones((1, 2, 3), "float32")
    with pytest.raises(ValueError, match="`linear_scan`: `x` must be"):
        ops.linear_scan(value, x)
    with pytest.raises(ValueError, match="`linear_scan`: `mask` must be"):
        ops.linear_scan(x, -x, mask=value)
    with pytest.raises(ValueError, match="`rms_norm`: `x` must be"):
        ops.rms_norm(value, epsilon=1e-6)
