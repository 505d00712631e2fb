"""Layers with a state: a sequence computed in parts equals the sequence computed at once."""

import keras
import numpy as np
import pytest

from keras_recurrent.layers import HGRN, LocalAttention, RecurrentBlock
from keras_recurrent.layers.tokens import find_tokens
from tests.layers import loops
from tests.layers.gradients import call_with, gradients
from tests.layers.table import (
    ROWS,
    STREAMING,
    WIDTH,
    assert_close,
    built,
    inputs,
    numpy,
    parametrize_layers,
    shared_by_layers,
    streaming_layer,
)

LENGTH = 8
PLACE = np.arange(LENGTH)
MASKS = {  # a row each of what the names tell
    "all real": None,
    "padding at the end, at the beginning, in the middle": np.array(
        [PLACE < 5, PLACE >= 5, np.abs(PLACE - 4) >= 2]
    ),
    "all real, padding alone, one token": np.array([PLACE >= 0, PLACE < 0, PLACE == LENGTH - 1]),
    "padding anywhere": np.random.default_rng(5).permuted([[0, 1] * 4] * 3, axis=1) > 0,
}
SEGMENTS = {
    "one document": None,
    "documents": np.array([[0] * 4 + [1] * 4, [3] * 5 + [1] + [3] * 2, [0, 1, 2] + [7] * 5]),
}
CUTS = {  # parts of few different lengths, as XLA compiles each
    "one token at a time": range(1, LENGTH),
    "on a border of documents in one row, inside documents in others": [4],
}
GARBAGE = {"zeros": 0.0, "large numbers": 1e4, "NaN": np.nan, "infinity": np.inf}


def in_parts(layer, x, mask, segment_ids, cuts, state=None):
    """The outputs of all parts side by side, and the last state."""
    outputs = []
    for start, stop in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        output, state = layer(
            x[:, start:stop],
            mask=None if mask is None else mask[:, start:stop],
            segment_ids=None if segment_ids is None else segment_ids[:, start:stop],
            initial_state=state,
            return_state=True,
        )
        outputs.append(numpy(output))
    return np.concatenate(outputs, axis=1), state


@parametrize_layers(STREAMING, mask=MASKS, segment_ids=SEGMENTS)
def test_equals_a_loop(name, mask, segment_ids):
    layer, x = built(name), inputs()
    output = layer(x, mask=mask, segment_ids=segment_ids)
    wanted = loops.run(loops.unit(layer), x, mask, segment_ids)
    assert_close(output, wanted.astype("float32"), where=mask)


@parametrize_layers(STREAMING, mask=MASKS, segment_ids=SEGMENTS)
def test_parts_equal_the_whole(name, mask, segment_ids):
    layer, x = built(name), inputs()
    whole = layer(x, mask=mask, segment_ids=segment_ids, return_state=True)
    for cuts in CUTS.values():
        output, state = in_parts(layer, x, mask, segment_ids, cuts)
        assert_close(output, numpy(whole[0]), where=mask)
        assert_close(state, whole[1])


@parametrize_layers(STREAMING, segment_ids=SEGMENTS)
def test_tokens_are_handed_down(name, segment_ids):
    """A layer inside another gets its tokens and its own part of the state, and returns that."""
    layer, x, mask = built(name), inputs(), MASKS["padding anywhere"]
    given, state, own = {"mask": mask, "segment_ids": segment_ids}, None, None
    for _ in range(2):
        wanted = layer(x, **given, initial_state=state, return_state=True)
        tokens, places = find_tokens(
            x, **given, state=state, uses_position=layer.uses_position, return_state=True
        )
        output, own = layer(x, tokens=tokens, initial_state=own, return_state=True)
        state = {**own, **places}
        keras.tree.map_structure(
            np.testing.assert_array_equal, numpy((output, state)), numpy(wanted)
        )
    for argument in ("mask", "segment_ids"):
        with pytest.raises(ValueError, match=f"`tokens` and `{argument}`. Leave one of them"):
            layer(x, tokens=tokens, **{argument: mask})


@streaming_layer
def test_random_parts_equal_the_whole(name):
    layer, x = built(name), inputs()
    rng = np.random.default_rng(2)
    # TensorFlow and JAX dispatch or compile each part; `test_parts_equal_the_whole` has more.
    for _ in range(6 if keras.config.backend() == "torch" else 3):
        mask = rng.random(x.shape[:2]) < 0.7
        segment_ids = np.cumsum(rng.random(x.shape[:2]) < 0.3, axis=1)
        cuts = np.cumsum(rng.permutation([1, 1, 1, 1, 4]))[:-1]
        whole = layer(x, mask=mask, segment_ids=segment_ids, return_state=True)
        parts = in_parts(layer, x, mask, segment_ids, cuts)
        assert_close(parts[0], numpy(whole[0]), where=mask)
        assert_close(parts[1], whole[1])


@streaming_layer
def test_packed_documents_equal_separate_ones(name):
    layer, x = built(name), inputs()
    segment_ids = np.array([[0] * 4 + [1] * 4, [4] * 4 + [2] * 4, [6] * 4 + [9] * 4])
    packed, state = layer(x, segment_ids=segment_ids, return_state=True)
    assert_close(packed[:, :4], layer(x[:, :4]))
    second, second_state = layer(x[:, 4:], segment_ids=segment_ids[:, 4:], return_state=True)
    assert_close(packed[:, 4:], second)
    assert_close(state, second_state)


@parametrize_layers(STREAMING, garbage=GARBAGE)
def test_padded_rows_equal_unpadded_ones(name, garbage):
    layer, x = built(name), inputs()
    mask = MASKS["padding anywhere"]
    padded, state = layer(np.where(mask[..., None], x, garbage), mask=mask, return_state=True)
    for row in range(3):
        real = mask[row]
        output, row_state = layer(x[row : row + 1, real], return_state=True)
        assert_close(padded[row][real], output[0])
        assert_close(
            keras.tree.map_structure(lambda a, row=row: a[row : row + 1], state), row_state
        )


@streaming_layer
def test_padding_alone_leaves_the_state(name):
    layer, x = built(name), inputs()
    segment_ids = np.full((3, LENGTH), 4)
    _, state = layer(x, segment_ids=segment_ids, return_state=True)
    nothing = np.zeros((3, LENGTH), bool)
    for other in (None, segment_ids + 1):
        _, after = layer(x, mask=nothing, segment_ids=other, initial_state=state, return_state=True)
        np.testing.assert_equal(numpy(after), numpy(state))


@parametrize_layers(STREAMING, mask=MASKS)
def test_no_state_is_the_initial_state(name, mask):
    layer, x = built(name), inputs()
    nothing = layer(x, mask=mask, return_state=True)
    initial = layer(
        x, mask=mask, initial_state=layer.get_initial_state(batch_size=3), return_state=True
    )
    assert_close(initial[0], nothing[0], where=mask)
    assert_close(initial[1], nothing[1])


@shared_by_layers
def test_a_state_kept_by_a_layer(name):
    """Keras turns a dict that becomes an attribute of a layer into one of its own."""
    layer, x, keeper = built(name), inputs(), keras.layers.Layer()
    whole = layer(x)
    _, keeper.state = layer(x[:, :4], return_state=True)
    assert_close(layer(x[:, 4:], initial_state=keeper.state), whole[:, 4:])


@shared_by_layers
def test_a_document_goes_on_without_ids(name):
    """Segment ids may be left out for a part: it belongs to the document before."""
    layer, x = built(name), inputs()
    whole = layer(x, segment_ids=np.full((3, LENGTH), 6), return_state=True)
    left = layer(x[:, :4], segment_ids=np.full((3, 4), 6), return_state=True)
    right = layer(x[:, 4:], initial_state=left[1], return_state=True)
    assert_close(right[0], whole[0][:, 4:])
    assert_close(right[1], whole[1])


@streaming_layer
@pytest.mark.parametrize(
    "policy",
    ["float32", "mixed_bfloat16"]
    + [pytest.param(policy, marks=pytest.mark.once) for policy in ("bfloat16", "mixed_float16")],
)
def test_dtypes_of_states(name, policy):
    layer = built(name, dtype=policy, return_state=True)
    spec = layer(keras.Input((None, WIDTH)))[1]
    _, state = layer(inputs(length=2))
    _, state = layer(inputs(length=2), initial_state=state)
    initial = layer.get_initial_state(3)
    for found in (spec, state, initial):
        keras.tree.assert_same_structure(found, spec)
        for path, array in keras.tree.flatten_with_path(found):
            # What keys and values were computed in; integers; and float32 for all that adds up.
            wanted = {"key": layer.compute_dtype, "value": layer.compute_dtype}
            wanted |= {"segment": "int32", "position": "int32"}
            dtype = keras.backend.standardize_dtype(array.dtype)
            assert dtype == wanted.get(path[-1], "float32"), path
    for array, drawn in zip(keras.tree.flatten(initial), keras.tree.flatten(state), strict=True):
        assert tuple(array.shape) == tuple(drawn.shape)


@pytest.mark.once
@streaming_layer
def test_state_shapes(name):
    layer = built(name, return_state=True)

    def check(shapes, state):
        if isinstance(shapes, dict):
            assert set(shapes) == set(state)
            for key in shapes:
                check(shapes[key], state[key])
        else:
            assert tuple(state.shape) == (3, *shapes)

    check(ROWS[name].state, layer(inputs())[1])
    output_shape, state_shapes = layer.compute_output_shape((3, None, WIDTH))
    assert output_shape == (3, None, WIDTH)
    assert state_shapes == keras.tree.map_structure(
        lambda spec: spec.shape, layer.state_spec(batch_size=3)
    )


@shared_by_layers
def test_return_state_of_the_call_goes_first(name):
    row = ROWS[name]
    assert isinstance(row.make(return_state=True)(inputs()), tuple)
    assert not isinstance(row.make(return_state=True)(inputs(), return_state=False), tuple)
    assert isinstance(row.make()(inputs(), return_state=True), tuple)


@streaming_layer
def test_functional_model_with_states(name, tmp_path):
    layer = built(name)
    sequence, segment_ids = keras.Input((None, WIDTH)), keras.Input((None,), dtype="int32")
    before = keras.tree.map_structure(
        lambda spec: keras.Input(spec.shape[1:], dtype=spec.dtype), layer.state_spec()
    )
    output, after = layer(
        sequence, segment_ids=segment_ids, initial_state=before, return_state=True
    )
    assert output.shape == (None, None, WIDTH)
    model = keras.Model([sequence, segment_ids, before], [output, after])
    model.save(tmp_path / "model.keras")

    x, ids = inputs(), SEGMENTS["documents"].astype("int32")
    wanted = layer(x, segment_ids=ids, return_state=True)
    for runs in (model, keras.models.load_model(tmp_path / "model.keras")):
        _, state = runs([x[:, :4], ids[:, :4], numpy(layer.get_initial_state(3))])
        output, state = runs([x[:, 4:], ids[:, 4:], numpy(state)])
        assert_close(output, wanted[0][:, 4:])
        assert_close(state, wanted[1])


@shared_by_layers
@pytest.mark.parametrize("packed", [False, True])
def test_keras_masks_arrive(name, packed):
    """An embedding's mask comes along, also beside other tensors, and in a Functional model."""
    layer = built(name)
    tokens = np.array(
        [[3, 1, 2, 0, 0, 5, 0, 1], [0, 1, 0, 0, 4, 2, 2, 2], [1, 1, 0, 0, 0, 0, 0, 0]]
    )
    ids = np.array([[0, 0, 1, 1, 1, 1, 2, 2]] * 3)
    embedding = keras.layers.Embedding(6, WIDTH, mask_zero=True)

    token_input, id_input = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    others = {"segment_ids": id_input} if packed else {}
    functional = keras.Model(
        [token_input, id_input], layer(embedding(token_input), return_state=True, **others)
    )
    others = {"segment_ids": ids} if packed else {}
    eager = layer(embedding(tokens), return_state=True, **others)
    wanted = layer(numpy(embedding(tokens)), mask=tokens != 0, return_state=True, **others)
    for output, state in (eager, functional([tokens, ids])):
        assert_close(output, wanted[0], where=tokens != 0)
        assert_close(state, wanted[1])


@shared_by_layers
def test_a_mask_of_integers(name):
    layer, x, mask = built(name), inputs(), MASKS["padding anywhere"]
    ids = SEGMENTS["documents"]
    for others in ({}, {"segment_ids": ids}):
        wanted = layer(x, mask=mask, return_state=True, **others)
        assert_close(layer(x, mask=mask.astype("int32"), return_state=True, **others), wanted)


@shared_by_layers
def test_an_explicit_mask_goes_first(name):
    layer = built(name)
    tokens = np.array([[0, 1, 2, 3] * 2] * 3)
    x = keras.layers.Embedding(4, WIDTH, mask_zero=True)(tokens)
    mask = MASKS["padding at the end, at the beginning, in the middle"]
    assert_close(layer(x, mask=mask), layer(numpy(x), mask=mask), where=mask)


@shared_by_layers
def test_gradients_flow_through_states(name):
    """The gradient of a whole equals that of its parts, by inputs, weights and the first state."""
    layer, x = built(name), inputs(length=4)
    weights = numpy([weight.value for weight in layer.trainable_variables])
    _, state = layer(inputs(seed=9), return_state=True)
    state = numpy(state)
    floats = [a for a in keras.tree.flatten(state) if a.dtype == "float32"]
    mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 0, 1]]) > 0
    real = mask[..., None].astype("float32")

    def loss(values, cuts):
        weights, x, floats = values
        floats = iter(floats)
        before = keras.tree.map_structure(
            lambda a: next(floats) if a.dtype == "float32" else a, state
        )
        outputs = []
        for start, stop in zip([0, *cuts], [*cuts, 4], strict=True):
            output, before = call_with(
                layer,
                weights,
                x[:, start:stop],
                mask=mask[:, start:stop],
                initial_state=before,
                return_state=True,
            )
            outputs.append(output)
        y = keras.ops.concatenate(outputs, axis=1)
        return keras.ops.sum(keras.ops.multiply(keras.ops.sin(3 * y), real))

    whole = gradients(lambda values: loss(values, []), [weights, x, floats])
    parts = gradients(lambda values: loss(values, [2]), [weights, x, floats])
    for w, p in zip(keras.tree.flatten(whole), keras.tree.flatten(parts), strict=True):
        np.testing.assert_allclose(p, w, rtol=1e-4, atol=1e-5 * (1 + np.abs(w).max(initial=0)))
    for gradient in whole[2]:
        assert np.isfinite(gradient).all()
        assert gradient.size == 0 or (gradient != 0).mean() > 0.5
    np.testing.assert_array_equal(whole[1][~mask], 0)


@pytest.mark.parametrize(
    ("layer", "inner"),
    [
        (lambda **options: HGRN(**options), "o_proj"),
        (lambda **options: RecurrentBlock(8, **options), "linear_out"),
        (lambda **options: LocalAttention(2, head_dim=4, sliding_window=3, **options), "o_proj"),
    ],
)
def test_outputs_have_the_compute_dtype_whatever_a_sublayer_has(layer, inner):
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_bfloat16")
    policies[f"outer/{inner}"] = "float32"
    block = layer(name="outer", dtype=policies)
    output = block(np.ones((2, 5, 8), "float32"))
    assert getattr(block, inner).compute_dtype == "float32"
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
