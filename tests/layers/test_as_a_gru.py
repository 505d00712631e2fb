"""Arguments and outputs that streaming layers share with `keras.layers.GRU`."""

import keras
import numpy as np
import pytest

from keras_recurrent import layers
from keras_recurrent.layers.tokens import compute_tokens
from tests.layers.table import (
    ROWS,
    STREAMING,
    WIDTH,
    assert_close,
    assert_rejects,
    built,
    inputs,
    numpy,
    parametrize_layers,
    shared_by_layers,
    streaming_layer,
)
from tests.layers.test_streaming import MASKS, SEGMENTS

OUTPUT_IS_STATE = ["RGLRU", "CGLRU"]
ANYWHERE = MASKS["padding anywhere"]


def copy_layer(layer, **arguments):
    """Returns a layer with the same weights and other arguments."""
    config = {name: value for name, value in layer.get_config().items() if name != "name"}
    copy = type(layer).from_config({**config, **arguments})
    copy.build((None, None, WIDTH))
    copy.set_weights(layer.get_weights())
    return copy


def last_real(output, mask, before=None):
    """Outputs `[B, T, D]` at the last real token of each sequence; `before` where none is real."""
    before = np.zeros_like(output[:, 0]) if before is None else before
    rows = zip(output, mask, before, strict=True)
    return np.stack([o[real].T[:, -1] if real.any() else b for o, real, b in rows])


def repeat_last_real(output, mask, before=None):
    """Outputs with each one at padding replaced by the last one at a real token before."""
    ends = range(1, output.shape[1] + 1)
    return np.stack([last_real(output[:, :t], mask[:, :t], before) for t in ends], axis=1)


def flip(*arrays):
    """Returns arrays in reversed order of time; None stays None."""
    return [None if a is None else np.flip(numpy(a), axis=1).copy() for a in arrays]


@parametrize_layers(STREAMING, mask=MASKS)
def test_return_sequences_and_zero_output_for_mask_choose_outputs(name, mask):
    layer, x, segment_ids = built(name), inputs(), SEGMENTS["documents"]
    _, state = layer(inputs(seed=7), segment_ids=segment_ids, return_state=True)
    for initial_state in (None, state):
        call = {"mask": mask, "segment_ids": segment_ids, "initial_state": initial_state}
        output, after = numpy(layer(x, **call, return_state=True))
        before = None
        if initial_state is not None and name in OUTPUT_IS_STATE:
            before = numpy(state["hidden"])
        real = np.ones((3, 8), bool) if mask is None else mask
        last = last_real(output, real, before)
        for arguments, expected in (
            ({"return_sequences": False}, last),
            ({"return_sequences": False, "zero_output_for_mask": True}, last),
            ({"zero_output_for_mask": False}, repeat_last_real(output, real, before)),
            ({"zero_output_for_mask": True}, np.where(real[..., None], output, 0)),
        ):
            found = copy_layer(layer, **arguments)(x, **call, return_state=True)
            assert_close(found, (expected, after))


@parametrize_layers(STREAMING, mask=MASKS)
def test_go_backwards_equals_reversed_inputs(name, mask):
    layer, x, segment_ids = built(name), inputs(), SEGMENTS["documents"]
    backwards = copy_layer(layer, go_backwards=True, zero_output_for_mask=True)
    forwards = copy_layer(layer, zero_output_for_mask=True)
    x_flipped, mask_flipped, ids_flipped = flip(x, mask, segment_ids)
    call = {"mask": mask, "segment_ids": segment_ids}
    flipped = {"mask": mask_flipped, "segment_ids": ids_flipped}
    state = other = None
    for _ in range(2):  # first without a state, then from one
        expected, other = forwards(x_flipped, **flipped, initial_state=other, return_state=True)
        found, state = backwards(x, **call, initial_state=state, return_state=True)
        assert_close((found, state), (expected, other))
    last, last_forwards = (copy_layer(one, return_sequences=False) for one in (backwards, layer))
    assert_close(last(x, **call), last_forwards(x_flipped, **flipped))


@pytest.mark.once
@shared_by_layers
def test_bidirectional_combines_both_directions_and_saves(name, tmp_path):
    layer, x = built(name, zero_output_for_mask=True), inputs()
    backwards = copy_layer(layer, go_backwards=True)

    def bidirectional(layer, **arguments):
        both = keras.layers.Bidirectional(layer, **arguments)
        both.build((None, None, WIDTH))
        both.set_weights(2 * layer.get_weights())
        return both

    outputs = [numpy(layer(x, mask=ANYWHERE)), *flip(backwards(x, mask=ANYWHERE))]
    assert_close(bidirectional(layer)(x, mask=ANYWHERE), np.concatenate(outputs, axis=-1))
    last, last_backwards = (copy_layer(one, return_sequences=False) for one in (layer, backwards))
    sums = bidirectional(last, merge_mode="sum")
    expected = numpy(last(x, mask=ANYWHERE)) + numpy(last_backwards(x, mask=ANYWHERE))
    assert_close(sums(x, mask=ANYWHERE), expected)

    model = keras.Sequential([keras.Input((None, WIDTH)), sums])
    assert model.output_shape == (None, WIDTH)
    model.save(tmp_path / "model.keras")
    assert_close(keras.models.load_model(tmp_path / "model.keras")(x), sums(x))


@pytest.mark.once
@shared_by_layers
def test_bidirectional_passes_a_state_to_each_direction_in_its_dtypes(name):
    """Keras casts states that pass through `Bidirectional` to the dtype of the wrapper."""
    layer, x = built(name, dtype="mixed_bfloat16", return_state=True), inputs()
    both = keras.layers.Bidirectional(layer, dtype="float32")
    _, *states = both(x, mask=ANYWHERE)
    _, *after = both(x, mask=ANYWHERE, initial_state=states)
    pairs = zip((both.forward_layer, both.backward_layer), states, strict=True)
    expected = [one(x, mask=ANYWHERE, initial_state=state)[1] for one, state in pairs]
    assert_close(after, expected)


@pytest.mark.once
@shared_by_layers
def test_functional_model_passes_embedding_masks_and_infers_shapes(name, tmp_path):
    ids = np.array([[3, 1, 2, 0, 0], [0, 1, 0, 2, 2], [0] * 5], "int32")
    tokens, embedding = keras.Input((None,), dtype="int32"), keras.layers.Embedding(4, WIDTH)
    embedding.mask_zero = embedding.supports_masking = True
    options = {"return_sequences": False}, {"zero_output_for_mask": False}, {"go_backwards": True}
    copies = [copy_layer(built(name), **{"zero_output_for_mask": True, **o}) for o in options]
    outputs = [layer(embedding(tokens)) for layer in copies]
    shapes = [layer.compute_output_shape((None, None, WIDTH)) for layer in copies]
    assert [y.shape for y in outputs] == shapes
    assert outputs[0].shape == (None, WIDTH)
    assert getattr(outputs[0], "_keras_mask", None) is None
    model = keras.Model(tokens, outputs)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.compile(jit_compile=False)
    x = numpy(embedding(ids))
    expected = [layer(x, mask=ids != 0) for layer in copies]
    assert_close(loaded.predict(ids, verbose=0), expected)
    output_mask = copies[2](embedding(ids))._keras_mask
    np.testing.assert_array_equal(numpy(output_mask), (ids != 0)[:, ::-1])
    assert not hasattr(copies[0](embedding(ids)), "_keras_mask")


@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="a graph of TensorFlow")
@streaming_layer
def test_static_lengths_stay_known_in_a_graph(name):
    """`TimeDistributed` after a layer needs the length, for batches of several sizes."""
    import tensorflow as tf

    # Neighbors in the table have other directions, every second pair has masks.
    index = STREAMING.index(name)
    layer = built(name, go_backwards=bool(index % 2))
    mask = tf.TensorSpec((None, 24), "bool") if index // 2 % 2 else None
    call = tf.function(lambda x, mask: layer(x, mask=mask))
    graph = call.get_concrete_function(tf.TensorSpec((None, 24, WIDTH)), mask)
    assert graph.structured_outputs.shape[1] == 24


# Sublayers after the recurrence.
OUTPUT_SUBLAYERS = {
    "RecurrentBlock": {"linear_y", "linear_out"},
    "HGRN": {"o_proj"},
    "HGRN2": {"norm", "o_proj"},
    "LightningAttention": {"u_proj", "norm", "o_proj"},
    "GatedShortConv": {"c_proj", "o_proj"},
    "LocalAttention": {"o_proj"},
    "LocalAttention with all options": {"gate_proj", "o_proj"},
}


@pytest.mark.once
@pytest.mark.parametrize("name", OUTPUT_SUBLAYERS)
@pytest.mark.parametrize("mask", [None, ANYWHERE], ids=["all real", "padding"])
def test_output_sublayers_compute_only_the_last_token_if_it_alone_is_returned(name, mask):
    """Gates, norms and linear layers after the recurrence compute outputs that are discarded."""
    layer, num_tokens = built(name, return_sequences=False), {}

    def record_tokens(sublayer):
        call = sublayer.call

        def recorded(x, *args, **kwargs):
            num_tokens[sublayer.name] = int(np.prod(x.shape[:-1]))
            return call(x, *args, **kwargs)

        sublayer.call = recorded

    for sublayer in layer._flatten_layers(include_self=False):
        record_tokens(sublayer)
    layer(inputs(), mask=mask)
    assert {name for name, n in num_tokens.items() if n == 3} == OUTPUT_SUBLAYERS[name]


@pytest.mark.once
@shared_by_layers
def test_layer_inside_another_ignores_zero_output_and_rejects_other_options(name):
    """The outermost layer decides about padding, order and number of outputs."""
    layer, x = built(name), inputs()
    tokens, _ = compute_tokens(x, ANYWHERE, uses_position=layer.uses_position)
    inner = copy_layer(layer, zero_output_for_mask=True)
    np.testing.assert_array_equal(numpy(inner(x, tokens=tokens)), numpy(layer(x, tokens=tokens)))
    for argument, value in (("return_sequences", False), ("go_backwards", True)):
        match = f"`{argument}={value}`, which is for the outermost"
        assert_rejects(match, copy_layer(layer, **{argument: value}), x, tokens=tokens)


UNSUPPORTED = [
    ({"dropout": 0.1}, r"`dropout=0.1`: Add `keras.layers.SpatialDropout1D\(rate\)`"),
    ({"recurrent_dropout": 0.1}, r"`recurrent_dropout=0.1`: .*`keras.layers.Dropout"),
    ({"kernel_regularizer": "l2"}, r"`weight_decay`.*`weight.regularizer = ...`"),
    ({"recurrent_constraint": "max_norm"}, r"`weight.constraint = ...`"),
    (
        {"stateful": True},
        r"`y, state = layer\(x, initial_state=state, return_state=True\)`.*`RecurrentBlock`",
    ),
    ({"unroll": True}, r"no loop over tokens"),
    ({"units": 8, "reset_after": True}, r"`units=8`: .*`keras.layers.Dense`.* `reset_after=True`:"),
    ({"use_cudnn": True}, r"`keras_recurrent.implementation"),
    ({"time_major": True}, r"transpose"),
    ({"seed": 1}, r"no random numbers"),
    ({"recurrent_initializer": "zeros"}, r"no recurrent kernel"),
    ({"recurrent_activation": "sigmoid"}, r"equation"),
]
NEUTRAL = {
    **{"dropout": 0.0, "recurrent_dropout": 0, "stateful": False, "unroll": False, "seed": None},
    **{"kernel_regularizer": None, "bias_constraint": None, "use_cudnn": "auto"},
}


@pytest.mark.once
@streaming_layer
def test_gru_arguments_are_accepted_only_with_neutral_values(name):
    make = ROWS[name].make
    for arguments, message in UNSUPPORTED:
        match = f"`{name.split()[0]}` does not support.*{message}"
        assert_rejects(match, make, **arguments)
    assert make(**NEUTRAL).get_config().keys() == make().get_config().keys()
    assert make().stateful is False
    for value in ("yes", 1, 0.0):
        for argument in ("return_sequences", "go_backwards", "zero_output_for_mask"):
            match = f"`{argument}` must be True or False; got"
            assert_rejects(match, make, **{argument: value})
    for cell in (make(), [make()]):
        match = r"`keras.layers.RNN` requires a cell.*`return_state`"
        assert_rejects(match, keras.layers.RNN, cell)


def test_backward_hgrn2_rejects_lower_bounds():
    bound = np.log(np.full((2, WIDTH), 0.5, "float32"))
    layer = layers.HGRN2(expand_ratio=4, go_backwards=True)
    for x in (inputs(), keras.Input((None, WIDTH))):
        match = r"keras_recurrent.layers.BidirectionalHGRN2"
        assert_rejects(match, layer, x, lower_bound=bound)


@pytest.mark.once
def test_bidirectional_hgrn2_rejects_gru_arguments():
    make = layers.BidirectionalHGRN2
    for arguments in ({"return_sequences": False}, {"go_backwards": True}, {"return_state": True}):
        match = r"`BidirectionalHGRN2` does not support.* has seen all tok"
        assert_rejects(match, make, expand_ratio=4, **arguments)
    assert_rejects(r"`dropout=0.5`", make, expand_ratio=4, dropout=0.5)
    make(expand_ratio=4, return_sequences=True, go_backwards=False, zero_output_for_mask=None)
