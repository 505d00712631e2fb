"""Layers with a state: a sequence computed in parts equals the sequence computed as a whole."""

import keras
import numpy as np
import pytest

from keras_recurrent.layers import HGRN, LocalAttention, RecurrentBlock
from keras_recurrent.layers.tokens import compute_tokens
from tests.layers import loops
from tests.layers.gradients import assert_gradients_close, call_with, gradients
from tests.layers.table import (
    ROWS,
    SHARED,
    STREAMING,
    WIDTH,
    assert_close,
    assert_rejects,
    built,
    inputs,
    numpy,
    parametrize_layers,
    parametrize_names,
    shared_by_layers,
    streaming_layer,
)

LENGTH = 8
POSITION = np.arange(LENGTH)
MASKS = {  # the name describes the three sequences in their order
    "all real": None,
    "padding at the end, at the beginning, in the middle": np.array(
        [POSITION < 5, POSITION >= 5, np.abs(POSITION - 4) >= 2]
    ),
    "all real, padding alone, one token": np.array(
        [POSITION >= 0, POSITION < 0, POSITION == LENGTH - 1]
    ),
    "padding anywhere": np.random.default_rng(5).permuted([[0, 1] * 4] * 3, axis=1) > 0,
}
ANYWHERE = MASKS["padding anywhere"]
SEGMENTS = {
    "one document": None,
    "documents": np.array([[0] * 4 + [1] * 4, [3] * 5 + [1] + [3] * 2, [0, 1, 2] + [7] * 5]),
}
CUTS = {  # parts of few different lengths, as XLA compiles each
    "one token at a time": range(1, LENGTH),
    "at the end of a document in one sequence, inside documents in others": [4],
}
GARBAGE = {"large numbers": 1e4, "NaN": np.nan}


def call_in_parts(layer, x, mask, segment_ids, cuts):
    """Returns the concatenated outputs of all parts, and the last state."""
    outputs, state = [], None
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


def assert_parts_equal_the_whole(layer, x, mask, segment_ids, cuts):
    whole, whole_state = layer(x, mask=mask, segment_ids=segment_ids, return_state=True)
    output, state = call_in_parts(layer, x, mask, segment_ids, cuts)
    assert_close(output, numpy(whole), where=mask)
    assert_close(state, whole_state)


@parametrize_layers(STREAMING, mask=MASKS, segment_ids=SEGMENTS)
def test_outputs_match_a_loop_in_numpy(name, mask, segment_ids):
    layer, x = built(name), inputs()
    output = layer(x, mask=mask, segment_ids=segment_ids)
    expected = loops.run(loops.unit(layer), x, mask, segment_ids)
    assert_close(output, expected.astype("float32"), where=mask)


@parametrize_layers(STREAMING, mask=MASKS, segment_ids=SEGMENTS)
def test_parts_equal_the_whole(name, mask, segment_ids):
    for cuts in CUTS.values():
        assert_parts_equal_the_whole(built(name), inputs(), mask, segment_ids, cuts)


@pytest.mark.once
@parametrize_layers(STREAMING, segment_ids=SEGMENTS)
def test_layer_called_with_tokens_equals_a_call_with_mask_and_segment_ids(name, segment_ids):
    """A layer inside another one returns other outputs or another part of the state."""
    layer, x = built(name), inputs()
    call, state, inner_state = {"mask": ANYWHERE, "segment_ids": segment_ids}, None, None
    for _ in range(2):
        expected = layer(x, **call, initial_state=state, return_state=True)
        tokens, position = compute_tokens(
            x, **call, state=state, uses_position=layer.uses_position, return_state=True
        )
        output, inner_state = layer(x, tokens=tokens, initial_state=inner_state, return_state=True)
        state = {**inner_state, **position}
        found = numpy((output, state))
        keras.tree.map_structure(np.testing.assert_array_equal, found, numpy(expected))
    for argument in ("mask", "segment_ids"):
        match = f"`tokens` and `{argument}`. Leave one of them"
        assert_rejects(match, layer, x, tokens=tokens, **{argument: ANYWHERE})


@parametrize_layers(STREAMING, garbage=GARBAGE)
def test_inputs_at_padding_change_no_outputs_and_states(name, garbage):
    """Padding is not ignored, here with a mask of integers."""
    layer, x = built(name), inputs()
    x_padded = np.where(ANYWHERE[..., None], x, garbage)
    padded, state = numpy(layer(x_padded, mask=ANYWHERE.astype("int32"), return_state=True))
    for row, real in enumerate(ANYWHERE):
        one = slice(row, row + 1)
        output, state_of_one = layer(x[one, real], return_state=True)
        assert_close(padded[one, real], output)
        assert_close(keras.tree.map_structure(lambda a, one=one: a[one], state), state_of_one)


@shared_by_layers
def test_padding_alone_keeps_the_state(name):
    layer, x = built(name), inputs()
    segment_ids = np.full((3, LENGTH), 4)
    _, state = layer(x, segment_ids=segment_ids, return_state=True)
    mask = np.zeros((3, LENGTH), bool)
    for ids in (None, segment_ids + 1):
        _, after = layer(x, mask=mask, segment_ids=ids, initial_state=state, return_state=True)
        np.testing.assert_equal(numpy(after), numpy(state))


@pytest.mark.once
@shared_by_layers
def test_state_stored_as_an_attribute_of_a_layer_can_be_passed(name):
    """Keras wraps a dict that becomes an attribute of a layer."""
    layer, x, owner = built(name), inputs(), keras.layers.Layer()
    _, owner.state = layer(x[:, :4], return_state=True)
    assert_close(layer(x[:, 4:], initial_state=owner.state), layer(x)[:, 4:])


@pytest.mark.once
@shared_by_layers
def test_part_without_segment_ids_continues_the_document(name):
    layer, x = built(name), inputs()
    ids = np.full((3, LENGTH), 6)
    whole, whole_state = layer(x, segment_ids=ids, return_state=True)
    _, state = layer(x[:, :4], segment_ids=ids[:, :4], return_state=True)
    right, state = layer(x[:, 4:], initial_state=state, return_state=True)
    assert_close(right, whole[:, 4:])
    assert_close(state, whole_state)


@pytest.mark.once
@streaming_layer
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_states_have_the_shapes_of_the_table_and_the_dtypes_of_their_specification(name, policy):
    layer = built(name, dtype=policy, return_state=True)
    symbolic = layer(keras.Input((None, WIDTH)))[1]
    _, state = layer(inputs(length=2))
    _, state = layer(inputs(length=2), initial_state=state)
    shapes = keras.tree.map_structure_up_to(symbolic, lambda shape: (3, *shape), ROWS[name].state)
    # Attention stores keys and values as it computes them; sums are stored in float32.
    dtypes = {"key": layer.compute_dtype, "value": layer.compute_dtype}
    dtypes |= {"segment": "int32", "position": "int32"}
    for found in (symbolic, state, layer.get_initial_state(3)):
        keras.tree.assert_same_structure(found, symbolic)
        for path, array in keras.tree.flatten_with_path(found):
            dtype = keras.backend.standardize_dtype(array.dtype)
            assert dtype == dtypes.get(path[-1], "float32"), path
        if found is not symbolic:
            assert keras.tree.map_structure(lambda array: tuple(array.shape), found) == shapes
    spec = keras.tree.map_structure(lambda array: array.shape, layer.state_spec(batch_size=3))
    assert layer.compute_output_shape((3, None, WIDTH)) == ((3, None, WIDTH), spec)


@pytest.mark.once
@shared_by_layers
def test_functional_model_with_states_as_inputs_and_outputs_saves(name, tmp_path):
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
    expected = layer(x, segment_ids=ids, return_state=True)
    for call in (model, keras.models.load_model(tmp_path / "model.keras")):
        _, state = call([x[:, :4], ids[:, :4], numpy(layer.get_initial_state(3))])
        output, state = call([x[:, 4:], ids[:, 4:], numpy(state)])
        assert_close(output, expected[0][:, 4:])
        assert_close(state, expected[1])


@parametrize_names(STREAMING, always=STREAMING if keras.config.backend() == "torch" else SHARED[:1])
def test_gradients_through_states_equal_those_of_the_whole(name):
    """Gradients by inputs, weights or the first state are lost between two parts."""
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
            part = {"mask": mask[:, start:stop], "initial_state": before, "return_state": True}
            output, before = call_with(layer, weights, x[:, start:stop], **part)
            outputs.append(output)
        y = keras.ops.concatenate(outputs, axis=1)
        return keras.ops.sum(keras.ops.multiply(keras.ops.sin(3 * y), real))

    values = [weights, x, floats]
    whole, parts = (
        gradients(lambda values, cuts=cuts: loss(values, cuts), values) for cuts in ([], [2])
    )
    assert_gradients_close(parts, whole)
    for gradient in whole[2]:
        assert np.isfinite(gradient).all()
        assert gradient.size == 0 or (gradient != 0).mean() > 0.5
    np.testing.assert_array_equal(whole[1][~mask], 0)


@pytest.mark.once
@pytest.mark.parametrize(
    ("layer", "inner"),
    [
        (lambda **options: HGRN(**options), "o_proj"),
        (lambda **options: RecurrentBlock(8, **options), "linear_out"),
        (lambda **options: LocalAttention(2, head_dim=4, sliding_window=3, **options), "o_proj"),
    ],
)
def test_outputs_have_the_compute_dtype_if_the_last_sublayer_has_another(layer, inner):
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_bfloat16")
    policies[f"outer/{inner}"] = "float32"
    block = layer(name="outer", dtype=policies)
    output = block(np.ones((2, 5, 8), "float32"))
    assert getattr(block, inner).compute_dtype == "float32"
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
