"""Layers in the place of a GRU, beside `keras.layers.GRU` itself: what they return."""

import keras
import numpy as np
import pytest

from keras_recurrent import layers
from keras_recurrent.layers.tokens import find_tokens
from tests.layers.gradients import call_with, gradients
from tests.layers.table import (
    ROWS,
    SHARED,
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
from tests.layers.test_streaming import MASKS, SEGMENTS

OUTPUT_IS_STATE = ["RGLRU", "CGLRU"]
LEARNING = ["RecurrentBlock", "RGLRU", "HGRN2", "LightningAttention"]
PADDING = {name: mask for name, mask in MASKS.items() if mask is not None}
padding = pytest.mark.parametrize("mask", PADDING.values(), ids=PADDING)


def like(layer, **arguments):
    """A layer with the same weights and other arguments."""
    config = {name: value for name, value in layer.get_config().items() if name != "name"}
    other = type(layer).from_config({**config, **arguments})
    other.build((None, None, WIDTH))
    other.set_weights(layer.get_weights())
    return other


def last(output, mask, before=None):
    """Outputs `[B, T, D]` at the last real token of each row; `before` where there is none."""
    before = np.zeros_like(output[:, 0]) if before is None else before
    rows = zip(output, mask, before, strict=True)
    return np.stack([o[real].T[:, -1] if real.any() else b for o, real, b in rows])


def repeated(output, mask, before=None):
    parts = [last(output[:, : t + 1], mask[:, : t + 1], before) for t in range(output.shape[1])]
    return np.stack(parts, axis=1)


def turned(*arrays):
    return [None if a is None else np.flip(numpy(a), axis=1).copy() for a in arrays]


def gru(**arguments):
    layer = keras.layers.GRU(WIDTH, return_sequences=True)
    layer.build((None, None, WIDTH))
    return like(layer, **arguments)


@padding
def test_a_gru_itself(mask):
    """What is asked of our layers below is what Keras's own layer does."""
    x, layer = inputs(), gru()
    rows = [numpy(layer(x[i : i + 1, mask[i]])) if mask[i].any() else None for i in range(3)]
    output = np.zeros_like(x)
    for i, row in enumerate(rows):
        if row is not None:
            output[i, mask[i]] = row[0]
    assert_close(layer(x, mask=mask), repeated(output, mask))
    assert_close(like(layer, zero_output_for_mask=True)(x, mask=mask), output)
    assert_close(like(layer, return_sequences=False)(x, mask=mask), last(output, mask))
    backwards = like(layer, go_backwards=True)
    assert_close(backwards(x, mask=mask), layer(*turned(x), mask=turned(mask)[0]))


@parametrize_layers(STREAMING, default=SHARED, mask=PADDING, segment_ids=SEGMENTS)
def test_outputs_wanted(name, mask, segment_ids):
    layer, x = built(name), inputs()
    _, state = layer(inputs(seed=7), segment_ids=segment_ids, return_state=True)
    for initial_state in (None, state):
        given = {"mask": mask, "segment_ids": segment_ids, "initial_state": initial_state}
        output, after = numpy(layer(x, **given, return_state=True))
        before = None
        if initial_state is not None and name in OUTPUT_IS_STATE:
            before = numpy(state["hidden"])

        def check(wanted, given=given, after=after, **arguments):
            got = like(layer, **arguments)(x, **given, return_state=True)
            assert_close(got, (wanted, after))

        check(last(output, mask, before), return_sequences=False)
        check(last(output, mask, before), return_sequences=False, zero_output_for_mask=True)
        check(repeated(output, mask, before), zero_output_for_mask=False)
        check(np.where(mask[..., None], output, 0), zero_output_for_mask=True)


@shared_by_layers
def test_gradients(name):
    layer, x, mask = built(name), inputs(length=4), np.array([[1, 1, 1, 1], [0, 1, 1, 0], [0] * 4])
    weights = numpy([weight.value for weight in layer.trainable_variables])
    chosen = np.zeros((3, 4, 1), "float32")
    chosen[0, 3] = chosen[1, 2] = 1

    only = like(layer, return_sequences=False)

    def loss_of_last(values):
        return keras.ops.sum(keras.ops.sin(call_with(only, values[0], values[1], mask=mask)))

    def loss_of_all(values):
        y = call_with(layer, values[0], values[1], mask=mask)
        return keras.ops.sum(keras.ops.multiply(keras.ops.sin(y), chosen))

    got, wanted = (gradients(loss, [weights, x]) for loss in (loss_of_last, loss_of_all))
    for g, w in zip(keras.tree.flatten(got), keras.tree.flatten(wanted), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5 * (1 + np.abs(w).max(initial=0)))
    np.testing.assert_array_equal(got[1][mask == 0], 0)


@shared_by_layers
def test_outputs_wanted_without_padding(name):
    layer, x = built(name), inputs()
    output = numpy(layer(x))
    assert_close(like(layer, return_sequences=False)(x), output[:, -1])
    assert_close(like(layer, return_sequences=False)(x[:, :1]), output[:, 0])
    for value in (True, False):
        assert_close(like(layer, zero_output_for_mask=value)(x), output)


@parametrize_layers(STREAMING, default=SHARED, mask=MASKS, segment_ids=SEGMENTS)
def test_go_backwards(name, mask, segment_ids):
    layer, x = built(name), inputs()
    backwards = like(layer, go_backwards=True, zero_output_for_mask=True)
    forwards = like(layer, zero_output_for_mask=True)
    given = {"mask": mask, "segment_ids": segment_ids}
    (x_turned, *others) = turned(x, mask, segment_ids)
    given_turned = dict(zip(given, others, strict=True))
    state = other = None
    for _ in range(2):  # from no state, then from one
        wanted, other = forwards(x_turned, **given_turned, initial_state=other, return_state=True)
        got, state = backwards(x, **given, initial_state=state, return_state=True)
        assert_close((got, state), (wanted, other))
    only = like(backwards, return_sequences=False)
    assert_close(only(x, **given), like(layer, return_sequences=False)(x_turned, **given_turned))


@shared_by_layers
def test_parts_from_the_end_equal_the_whole(name):
    layer, x, mask = built(name, go_backwards=True), inputs(), MASKS["padding anywhere"]
    ids = SEGMENTS["documents"]
    whole, after = layer(x, mask, ids, return_state=True)
    right, state = layer(x[:, 5:], mask[:, 5:], ids[:, 5:], return_state=True)
    left, state = layer(x[:, :5], mask[:, :5], ids[:, :5], initial_state=state, return_state=True)
    parts = np.concatenate(numpy([right, left]), axis=1)
    assert_close(parts, numpy(whole), where=mask[:, ::-1])
    assert_close(state, after)


@parametrize_layers(STREAMING, default=SHARED, mask=PADDING)
def test_bidirectional(name, mask, tmp_path):
    layer, x = built(name, zero_output_for_mask=True), inputs()
    both = keras.layers.Bidirectional(layer)
    both.build((None, None, WIDTH))
    both.set_weights(2 * layer.get_weights())
    backwards = like(layer, go_backwards=True)
    wanted = [numpy(layer(x, mask=mask)), *turned(backwards(x, mask=mask))]
    assert_close(both(x, mask=mask), np.concatenate(wanted, axis=-1))

    only = keras.layers.Bidirectional(like(layer, return_sequences=False), merge_mode="sum")
    only.build((None, None, WIDTH))
    only.set_weights(2 * layer.get_weights())
    ends = [like(one, return_sequences=False)(x, mask=mask) for one in (layer, backwards)]
    assert_close(only(x, mask=mask), sum(numpy(ends)))

    model = keras.Sequential([keras.Input((None, WIDTH)), only])
    assert model.output_shape == (None, WIDTH)
    model.save(tmp_path / "model.keras")
    assert_close(keras.models.load_model(tmp_path / "model.keras")(x), only(x))


@shared_by_layers
def test_bidirectional_states(name):
    both = keras.layers.Bidirectional(built(name, return_state=True))
    x, mask = inputs(), MASKS["padding anywhere"]
    _, *states = both(x, mask=mask)
    y, forward, backward = both(x, mask=mask, initial_state=states)
    first, second = both.forward_layer, both.backward_layer
    wanted, after = first(x, mask=mask, initial_state=states[0])
    assert_close(y[..., :WIDTH], wanted, where=mask)
    assert_close(forward, after)
    wanted, after = second(x, mask=mask, initial_state=states[1])
    assert_close(y[..., WIDTH:], turned(wanted)[0], where=mask)
    assert_close(backward, after)


@shared_by_layers
def test_masks_and_shapes_in_a_graph(name, tmp_path):
    """Of Keras, as an embedding makes them, with a time that is not known."""
    ids = np.array([[3, 1, 2, 0, 0], [0, 1, 0, 2, 2], [0] * 5], "int32")
    tokens, embedding = keras.Input((None,), dtype="int32"), keras.layers.Embedding(4, WIDTH)
    embedding.mask_zero = embedding.supports_masking = True
    layer = built(name)
    ways = [{"return_sequences": False}, {"zero_output_for_mask": False}, {"go_backwards": True}]
    ways = [{"zero_output_for_mask": True, **way} for way in ways]
    made = [like(layer, **way) for way in ways]
    outputs = [one(embedding(tokens)) for one in made]
    assert [y.shape for y in outputs] == [
        one.compute_output_shape((None, None, WIDTH)) for one in made
    ]
    assert outputs[0].shape == (None, WIDTH)
    assert getattr(outputs[0], "_keras_mask", None) is None
    model = keras.Model(tokens, outputs)
    model.save(tmp_path / "model.keras")
    model.compile(jit_compile=False)
    x = numpy(embedding(ids))
    wanted = [one(x, mask=ids != 0) for one in made]
    assert_close(keras.models.load_model(tmp_path / "model.keras")(ids), wanted)
    assert_close(model.predict(ids, verbose=0), wanted)
    passed_on = made[2](embedding(ids))._keras_mask
    np.testing.assert_array_equal(numpy(passed_on), (ids != 0)[:, ::-1])
    assert not hasattr(made[0](embedding(ids)), "_keras_mask")


@pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="a graph of TensorFlow")
@streaming_layer
def test_lengths_that_are_known_stay_known(name):
    """What `TimeDistributed` behind a layer needs, for batches of more than one size."""
    import tensorflow as tf

    for go_backwards in (False, True):
        layer = built(name, go_backwards=go_backwards)
        # Each layer has a mask in one direction, neighbors in the table in opposite ones.
        masked = go_backwards == STREAMING.index(name) % 2
        mask = tf.TensorSpec((None, 24), "bool") if masked else None
        call = tf.function(lambda x, mask, layer=layer: layer(x, mask=mask))
        graph = call.get_concrete_function(tf.TensorSpec((None, 24, WIDTH)), mask)
        assert graph.structured_outputs.shape[1] == 24


FINISHING = {
    "RecurrentBlock": ["linear_y", "linear_out"],
    "HGRN": ["o_proj"],
    "HGRN2": ["norm", "o_proj"],
    "LightningAttention": ["u_proj", "norm", "o_proj"],
    "LocalAttention": ["o_proj"],
    "LocalAttention with all options": ["gate_proj", "o_proj"],
}


@pytest.mark.parametrize("name", FINISHING)
@pytest.mark.parametrize("mask", [None, MASKS["padding anywhere"]], ids=["all real", "padding"])
def test_only_the_last_token_is_finished(name, mask):
    """Gates, norms and linear maps behind the recurrence see one token a row."""
    layer, seen = built(name, return_sequences=False), {}

    def spied(one):
        call = one.call

        def spy(x, *args, **kwargs):
            seen[one.name] = int(np.prod(x.shape[:-1]))
            return call(x, *args, **kwargs)

        one.call = spy

    for one in layer._flatten_layers(include_self=False):
        spied(one)
    layer(inputs(), mask=mask)
    assert {one for one, tokens in seen.items() if tokens == 3} == set(FINISHING[name])


@shared_by_layers
def test_mixed_precision(name):
    layer, x, mask = built(name, dtype="mixed_bfloat16"), inputs(), MASKS["padding anywhere"]
    output = numpy(layer(x, mask=mask)).astype("float32")
    for way, wanted in (
        ({"return_sequences": False}, last(output, mask)),
        ({"zero_output_for_mask": False}, repeated(output, mask)),
        ({"zero_output_for_mask": True}, np.where(mask[..., None], output, 0)),
    ):
        got = like(layer, **way)(x, mask=mask)
        assert keras.backend.standardize_dtype(got.dtype) == "bfloat16"
        np.testing.assert_allclose(numpy(got).astype("float32"), wanted, rtol=0.02, atol=0.02)
    # Keras casts states that pass through `Bidirectional` to its own compute dtype.
    both = keras.layers.Bidirectional(like(layer, return_state=True), dtype="float32")
    _, *states = both(x, mask=mask)
    _, forward, _ = both(x, mask=mask, initial_state=states)
    assert_close(forward, both.forward_layer(x, mask=mask, initial_state=states[0])[1])


@parametrize_layers(
    LEARNING,
    # Elsewhere one layer fits: `test_any_layer.py::test_gradients` compares gradients of all.
    default=LEARNING if keras.config.backend() == "torch" else ["HGRN2"],
    wrap={"alone": lambda layer: layer, "bidirectional": keras.layers.Bidirectional},
)
def test_fit(name, wrap):
    """A classifier of padded rows learns the first token, from either end."""
    ids = np.random.default_rng(0).integers(1, 4, (32, 6))
    ids[np.arange(6)[None] >= np.arange(32)[:, None] % 5 + 2] = 0
    layers_of_model = [
        keras.layers.Embedding(4, WIDTH, mask_zero=True),
        wrap(ROWS[name].make(return_sequences=False)),
        keras.layers.Dense(4),
    ]
    model = keras.Sequential(layers_of_model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.05), loss, jit_compile=False)
    history = model.fit(ids, ids[:, 0], batch_size=32, epochs=12, verbose=0).history["loss"]
    assert history[-1] < 0.7 * history[0]


@shared_by_layers
def test_inside_another_layer(name):
    """Padding is left as it is there; the order and the number of tokens are the network's."""
    layer, x, mask = built(name), inputs(), MASKS["padding anywhere"]
    tokens, _ = find_tokens(x, mask, uses_position=layer.uses_position)
    inside = like(layer, zero_output_for_mask=True)
    np.testing.assert_array_equal(numpy(inside(x, tokens=tokens)), numpy(layer(x, tokens=tokens)))
    for argument, value in (("return_sequences", False), ("go_backwards", True)):
        with pytest.raises(ValueError, match=f"`{argument}={value}`, which is for the outermost"):
            like(layer, **{argument: value})(x, tokens=tokens)


REFUSED = [
    (
        {"dropout": 0.1},
        r"`dropout=0.1`: Add `keras.layers.SpatialDropout1D\(rate\)`",
    ),
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
NOTHING = {
    **{"dropout": 0.0, "recurrent_dropout": 0, "stateful": False, "unroll": False, "seed": None},
    **{"kernel_regularizer": None, "bias_constraint": None, "use_cudnn": "auto"},
}


@pytest.mark.once
@streaming_layer
def test_arguments_of_a_gru(name):
    make = ROWS[name].make
    for arguments, message in REFUSED:
        with pytest.raises(ValueError, match=f"`{name.split()[0]}` does not support.*{message}"):
            make(**arguments)
    assert make(**NOTHING).get_config().keys() == make().get_config().keys()
    assert make().stateful is False
    for value in ("yes", 1, 0.0):
        for argument in ("return_sequences", "go_backwards", "zero_output_for_mask"):
            with pytest.raises(ValueError, match=f"`{argument}` must be True or False; got"):
                make(**{argument: value})
    for cell in (make(), [make()]):
        with pytest.raises(ValueError, match=r"`keras.layers.RNN` requires a cell.*`return_state`"):
            keras.layers.RNN(cell)


@pytest.mark.once
def test_regularizers_and_constraints_of_weights():
    """What the error says works."""
    layer = built("RecurrentBlock")
    assert not layer.losses
    layer.linear_x.kernel.regularizer = keras.regularizers.L2(0.5)
    kernel = numpy(layer.linear_x.kernel.value)
    np.testing.assert_allclose(numpy(layer.losses[0]), 0.5 * (kernel**2).sum(), rtol=1e-5)
    model = keras.Sequential([layer])
    layer.linear_out.kernel.constraint = keras.constraints.MaxNorm(0.1)
    model.compile("sgd", "mse", jit_compile=False)
    model.train_on_batch(inputs(), inputs())
    norms = np.linalg.norm(numpy(layer.linear_out.kernel.value), axis=0)
    assert norms.max() < 0.1001


def test_hgrn2_with_a_bound_in_both_directions():
    bound = np.log(np.full((2, WIDTH), 0.5, "float32"))
    layer = layers.HGRN2(expand_ratio=4, go_backwards=True)
    for x in (inputs(), keras.Input((None, WIDTH))):
        with pytest.raises(ValueError, match=r"keras_recurrent.layers.BidirectionalHGRN2"):
            layer(x, lower_bound=bound)


@pytest.mark.once
def test_segments_backwards_equal_reversed_inputs():
    """The alternative of the manual to `Bidirectional`, which refuses `segment_ids`, is wrong."""
    x, given = inputs(), {"segment_ids": SEGMENTS["documents"]}
    backward = built("RGLRU", go_backwards=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'segment_ids'"):
        keras.layers.Bidirectional(built("RGLRU"))(x, **given)
    (ids,) = turned(*given.values())
    outputs = backward(x, **given)
    assert_close(outputs, like(backward, go_backwards=False)(*turned(x), segment_ids=ids))


@pytest.mark.once
def test_a_mask_of_the_parts_of_each_token():
    """Keras's `TimeDistributed` hands on that of what is inside: words of sentences, say."""
    words, embedding = keras.Input((5, 7), dtype="int32"), keras.layers.Embedding(4, WIDTH)
    embedding.mask_zero = embedding.supports_masking = True
    of_words, of_sentences = (built(n, return_sequences=False) for n in ("RGLRU", "HGRN2"))
    sentences = keras.layers.TimeDistributed(of_words)(embedding(words))
    mask = sentences._keras_mask
    with pytest.raises(ValueError, match=r"`mask` must have.*`keras.ops.any\(mask, axis=-1\)`"):
        of_sentences(sentences)
    model = keras.Model(words, of_sentences(sentences, mask=keras.ops.any(mask, axis=-1)))
    ids = np.random.default_rng(0).integers(1, 4, (2, 5, 7))
    ids[:, 3:] = ids[1, 2, 4:] = 0
    text = [of_words(numpy(embedding(ids[:, i])), mask=ids[:, i] > 0) for i in range(3)]
    assert_close(model(ids), of_sentences(np.stack(numpy(text), axis=1)))


@pytest.mark.once
def test_bidirectional_hgrn2_is_no_gru():
    make = layers.BidirectionalHGRN2
    for arguments in ({"return_sequences": False}, {"go_backwards": True}, {"return_state": True}):
        with pytest.raises(
            ValueError, match=r"`BidirectionalHGRN2` does not support.* has seen all tok"
        ):
            make(expand_ratio=4, **arguments)
    with pytest.raises(ValueError, match=r"`dropout=0.5`"):
        make(expand_ratio=4, dropout=0.5)
    make(expand_ratio=4, return_sequences=True, go_backwards=False, zero_output_for_mask=None)
